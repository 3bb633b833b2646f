"""How often guesses turn out right, by who guessed and how sure he was: of late, and as long as little is known, as
elsewhere. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from molink.peer.speculation.lookup import RESUMED, STRONGEST
from molink.peer.speculation.ngram_tables import STRENGTHS_OF_CONTEXT
from molink.shards.spec import GUESS_SOURCES

GuessKind: TypeAlias = tuple[str, int]
"""Source, and how strong it says that the guess is."""
_, LOOKUP, TABLE, PREDICTION, DRAFT, GRAMMAR = GUESS_SOURCES
OVERALL = -1
"""The strength of all guesses of a source together, as long as it is not asked for them."""
PRIOR_GUESSES = 4
"""For how many guesses of a kind what is known beforehand counts."""
REMEMBERED_GUESSES = 24
"""Of a kind: an average over about the last so many, so that it follows a text that changes."""


def _beforehand(
    lookup: Sequence[float], table: Sequence[float], draft: Sequence[float], drafted: float
) -> Mapping[GuessKind, float]:
    return MappingProxyType(
        {
            **{(LOOKUP, bits): chance for bits, chance in enumerate(lookup, 1)},
            **{(TABLE, STRENGTHS_OF_CONTEXT + at): chance for at, chance in enumerate(table)},
            **{(PREDICTION, bits): 0.8 for bits in range(RESUMED, STRONGEST + 1)},
            **{(DRAFT, eighths): chance for eighths, chance in enumerate(draft)},
            (DRAFT, OVERALL): drafted,
            (GRAMMAR, 0): 0.9,
        }
    )


GREEDY = _beforehand(
    (0.35, 0.6, 0.75, 0.8, 0.9),
    (0.2, 0.25, 0.45, 0.35, 0.5, 0.6, 0.5, 0.6, 0.75, 0.65, 0.8, 0.9),
    (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    0.66,
)
SAMPLED = _beforehand(
    (0.15, 0.3, 0.6, 0.65, 0.75),
    (0.1, 0.25, 0.5, 0.2, 0.4, 0.55, 0.25, 0.6, 0.75, 0.45, 0.8, 0.9),
    (0.34, 0.4, 0.45, 0.51, 0.61, 0.69, 0.78, 0.93),
    0.68,
)
"""What sessions begin with: about what was measured with the bundled model, greedy and at temperature 0.8: of tables
by length of context, and then by how often it was seen; of a draft model by the strength that it gives to a
guess, and of all its guesses."""


@dataclass(slots=True)
class _Average:
    chance: float
    guesses: int = 0


class Acceptance:
    """Owns how often guesses of each kind were right in one session."""

    def __init__(self, beforehand: Mapping[GuessKind, float]) -> None:
        self._beforehand = beforehand
        self._averages: dict[GuessKind, _Average] = {}

    def chance(self, kind: GuessKind) -> float:
        """How likely a guess of that kind is right, if those before it in its trip are: between 0 and 1."""
        found = self._averages.get(kind)
        return self._beforehand.get(kind, 0.5) if found is None else found.chance

    def record(self, kind: GuessKind, *, right: bool) -> None:
        """A guess of that kind was right, or was not, whether or not it travelled."""
        average = self._averages.get(kind)
        if average is None:
            average = self._averages[kind] = _Average(self.chance(kind))
        average.guesses += 1
        weight = max(1 / (PRIOR_GUESSES + average.guesses), 1 / REMEMBERED_GUESSES)
        average.chance += weight * (right - average.chance)
