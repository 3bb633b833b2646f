"""The tokens that are kept to guess from, divided among clients: who keeps most makes room for who keeps less. Pure.

A session's text is no longer than its lease, while a prediction takes none and costs its client a message: so of each
client predictions make room first.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """How many tokens are kept for one session."""

    client: str
    text: int
    """Of the sequence itself, at most."""
    predicted: int = 0


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """The place of one more session's tokens among those of others."""

    keeps_prediction: bool
    """Whether there is room for what its client predicts."""
    left: tuple[KeptTokens, ...]
    """What is kept of the others, in the order in which they were given: all, the text alone, or nothing."""


def place_kept(kept: Sequence[KeptTokens], asked: KeptTokens, most_tokens: int) -> KeptPlace | None:
    """The place of the tokens that are asked for among those that are kept, if all may be `most_tokens`; None: there is
    none, since no other client keeps more than this one would."""
    left = _with_room(kept, KeptTokens(asked.client, asked.text), most_tokens)
    if left is None:
        return None
    predicting = _with_room(left, asked, most_tokens) if asked.predicted else None
    return KeptPlace(predicting is not None, tuple(left if predicting is None else predicting))


def _with_room(kept: Sequence[KeptTokens], asked: KeptTokens, most_tokens: int) -> list[KeptTokens] | None:
    """What is kept of others beside what is asked for, all of it; None: that would be more than is left to others."""
    left = list(kept)
    held = Counter({asked.client: asked.text + asked.predicted})
    for one in kept:
        held[one.client] += one.text + one.predicted
    while held.total() > most_tokens:
        client = max(held, key=lambda name: (held[name], name == asked.client))
        predicting = [at for at, one in enumerate(left) if one.client == client and one.predicted]
        if client == asked.client and (asked.predicted or not predicting):
            return None
        among = predicting or [at for at, one in enumerate(left) if one.client == client]
        largest = max(among, key=lambda at: (left[at].predicted, left[at].text))
        before = left[largest]
        left[largest] = KeptTokens(client, before.text if before.predicted else 0)
        held[client] -= before.predicted or before.text
    return left
