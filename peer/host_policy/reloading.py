"""Reload after a pause: which layers a peer is to hold again, and when that is tried. Pure: the time is an argument."""

import math
from dataclasses import dataclass

from molink.shards.backoff import Backoff
from molink.shards.spec import Span, merge_spans, missing_spans

LOAD_AGAIN = Backoff(first_s=2.0, longest_s=60.0)
"""Between tries: what was in the way, such as a game that has the card still, is over within minutes as a rule."""


@dataclass(frozen=True, slots=True)
class Reload:
    """Reload: layers that a peer held when it paused, until it holds them again."""

    spans: tuple[Span, ...] = ()
    failures: int = 0
    """Tries in a row that have not brought all of them."""
    due_s: float = -math.inf
    """When they are tried next."""

    def joined(self, spans: tuple[Span, ...]) -> "Reload":
        """These too, and all of them as soon as may be."""
        return Reload(merge_spans((*self.spans, *spans)))

    def missing(self, held: tuple[Span, ...]) -> tuple[Span, ...]:
        """What is still to be loaded by a peer that holds `held`."""
        return tuple(part for span in self.spans for part in missing_spans(span, held))

    def is_given_up(self, present: tuple[Span, ...]) -> bool:
        """Whether a peer that has no room for them has taken others in their place: `present` is what it holds or
        loads."""
        return any(missing_spans(span, self.spans) for span in present)

    def tried(self, held: tuple[Span, ...], at_s: float) -> "Reload":
        """What is left to do after a try that ended at `at_s` (seconds, any clock that never goes back)."""
        if not self.missing(held):
            return Reload()
        failures = self.failures + 1
        return Reload(self.spans, failures, at_s + LOAD_AGAIN.after(failures))
