"""Guesses in virtual time: the product's own sources and decision, over recorded generations.

What a session generates is a tape of what the bundled model said, so that guesses are accepted as often as they were
there. Nothing is kept from one session for another: tapes come again, and would be known by heart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from molink.peer.scheduling.trip_load import TripBegun, TripLoad
from molink.peer.speculation.session_guesses import SessionGuesses
from molink.routing.cost.pipeline import PipelineStage
from molink.simnet.core.generations import GenerationTape

OFF, AUTO = "off", "auto"
MOST_FIXED = 15


@dataclass(frozen=True, slots=True)
class SimulatedSpeculation:
    """How many guesses travel."""

    fixed: int | None = None
    """Always so many, as far as there are; None: as is decided for each trip."""
    temperature: float = 0.0
    """Of the recorded generations."""

    @classmethod
    def named(cls, name: str, temperature: float = 0.0) -> "SimulatedSpeculation | None":
        """What `auto`, `off` or a number stands for; None: nothing is guessed. Raises ValueError with one sentence."""
        if name in (OFF, "0"):
            return None
        if name == AUTO:
            return cls(None, temperature)
        if not (name.isascii() and name.isdecimal() and 1 <= int(name) <= MOST_FIXED):
            raise ValueError(f"{name!r} is neither auto nor off nor a number from 0 to {MOST_FIXED}")
        return cls(int(name), temperature)


class TapeGuesser:
    """A `Guesser` of the head's core for a session that generates a tape."""

    def __init__(
        self, speculation: SimulatedSpeculation, number: int, stages: Sequence[PipelineStage]
    ) -> None:
        """`number`: of the session, whose tape begins with another generation than the next one's."""
        self._tape = GenerationTape(number, speculation.temperature)
        self._guesses = SessionGuesses(
            stages=stages, sampled=speculation.temperature > 0, fixed=speculation.fixed
        )
        self._guesses.extend(self._tape.prompt)
        self._generated = 0
        self.right = 0
        """Of the guesses that travel: how many the tail will draw."""

    def record_trip(self, tokens: Sequence[None], guessed: int) -> None:
        """As `Guesser.record_trip`."""
        self._guesses.extend(self._tape.tokens(self._generated, len(tokens)))
        if guessed:
            self._guesses.record(guessed, len(tokens) - 1)
        self._generated += len(tokens)

    def propose(self, last: None, most: int, load: TripLoad) -> tuple[None, TripBegun]:
        """As `Guesser.propose`."""
        guesses = self._guesses.propose(most, load)
        coming = self._tape.tokens(self._generated, len(guesses))
        self.right = next((at for at, one in enumerate(guesses) if one != coming[at]), len(guesses))
        return last, replace(self._guesses.begun, guesses=len(guesses))
