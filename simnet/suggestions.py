"""What somebody may have meant who named something that is not there. Pure."""

from collections.abc import Iterable
from difflib import get_close_matches

_LIKENESS = 0.7
"""From 0 to 1, as `difflib` counts it: `speed` is not taken for `peers`."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean llama-3.1-8b?)`, to come after a wrong name; empty if none of the known ones is near it."""
    near = get_close_matches(name.lower(), list(known), 1, _LIKENESS)
    return f" (did you mean {near[0]}?)" if near else ""
