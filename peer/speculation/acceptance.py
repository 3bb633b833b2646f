"""How often guesses turn out right, by who guessed and how sure he was: of late, and as long as little is known, as
elsewhere. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from molink.peer.speculation.lookup import RESUMED, STRONGEST
from molink.peer.speculation.ngram_tables import LONGEST_CONTEXT, STRENGTHS_OF_CONTEXT

GuessKind: TypeAlias = tuple[str, int]
"""Source, and how strong it says that the guess is."""
LOOKUP, TABLE, PREDICTION, DRAFT = "lookup", "table", "prediction", "draft"
PRIOR_GUESSES = 4
"""For how many guesses of a kind what is known beforehand counts."""
REMEMBERED_GUESSES = 24
"""Of a kind: an average over about the last so many, so that it follows a text that changes."""
BEFOREHAND: Mapping[GuessKind, float] = MappingProxyType(
    {
        **{(LOOKUP, bits): chance for bits, chance in enumerate((0.1, 0.15, 0.3, 0.45, 0.7, 0.85))},
        **{
            (TABLE, tokens * STRENGTHS_OF_CONTEXT + often): 0.12 * tokens + 0.1 * often
            for tokens in range(1, LONGEST_CONTEXT + 1)
            for often in range(STRENGTHS_OF_CONTEXT)
        },
        **{(PREDICTION, bits): 0.8 for bits in range(RESUMED, STRONGEST + 1)},
        (DRAFT, 0): 0.6,
    }
)
"""What a session begins with: of lookup and tables about what was measured with the bundled model."""


@dataclass(slots=True)
class _Average:
    chance: float
    guesses: int = 0


class Acceptance:
    """Owns how often guesses of each kind were right in one session."""

    def __init__(self, beforehand: Mapping[GuessKind, float] = BEFOREHAND) -> None:
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
