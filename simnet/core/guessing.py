"""Guesses in virtual time: the product's own sources and decision, over recorded generations.

What a session generates is a tape of what the bundled model said, so that guesses are accepted as often as they were
there. Nothing is kept from one session for another: tapes come again, and would be known by heart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from molink.peer.scheduling.trip_load import TripBegun, TripLoad
from molink.peer.speculation.draft_model import MOST_DRAFTED, DraftModel
from molink.peer.speculation.session_guesses import SessionGuesses
from molink.routing.cost.pipeline import PipelineStage
from molink.simnet.core.generations import GenerationTape

DRAFTED_S = 2.6e-3
"""What a draft model takes of a head for a trip, before that begins: the most that was measured of the bundled one."""
OFF, AUTO, DRAFT = "off", "auto", "draft"
MOST_FIXED = 15


@cache
def bundled_draft() -> DraftModel:
    """The draft model of what was recorded."""
    # the reading of checkpoints takes long to load, and most simulations have no draft model
    from molink.peer.daemon.draft import open_draft
    from molink.shards.checkpoint.catalog import resolve
    from molink.shards.checkpoint.store import read_manifest

    recorded = "molink/tiny-shakespeare"
    draft = open_draft(f"{recorded}-draft", recorded, read_manifest(resolve(recorded)).files, None)
    return replace(draft, guess_ms=1000 * DRAFTED_S / MOST_DRAFTED)


@dataclass(frozen=True, slots=True)
class SimulatedSpeculation:
    """How many guesses travel."""

    fixed: int | None = None
    """Always so many, as far as there are; None: as is decided for each trip."""
    temperature: float = 0.0
    """Of the recorded generations."""
    drafts: bool = False
    """Whether the bundled draft model guesses too."""

    @classmethod
    def named(cls, name: str, temperature: float = 0.0) -> "SimulatedSpeculation | None":
        """What `auto`, `draft`, `off` or a number stands for; None: nothing is guessed. Raises ValueError with one
        sentence."""
        if name in (OFF, "0"):
            return None
        if name in (AUTO, DRAFT):
            return cls(None, temperature, name == DRAFT)
        if not (name.isascii() and name.isdecimal() and 1 <= int(name) <= MOST_FIXED):
            raise ValueError(f"{name!r} is none of auto, draft, off and the numbers from 0 to {MOST_FIXED}")
        return cls(int(name), temperature)


class TapeGuesser:
    """A `Guesser` of the head's core for a session that generates a tape."""

    drafter = None

    def __init__(
        self, speculation: SimulatedSpeculation, number: int, stages: Sequence[PipelineStage]
    ) -> None:
        """`number`: of the session, whose tape begins with another generation than the next one's."""
        self._tape = GenerationTape(number, speculation.temperature)
        self._guesses = SessionGuesses(
            stages=stages,
            draft=bundled_draft() if speculation.drafts else None,
            drawing=self._tape.drawing(),
            fixed=speculation.fixed,
        )
        self._guesses.extend(self._tape.prompt)
        self.drafted_s = DRAFTED_S if speculation.drafts else 0.0
        """What guesses for a trip take of its head."""
        self._generated = 0
        self.right = 0
        """Of the guesses that travel: how many the tail will draw."""

    def record_trip(self, tokens: Sequence[None], guessed: int) -> None:
        """As `Guesser.record_trip`."""
        self._guesses.extend(self._tape.tokens(self._generated, len(tokens)))
        if guessed:
            self._guesses.record(guessed, len(tokens) - 1)
        self._generated += len(tokens)

    def rests(self) -> bool:
        """As `Guesser.rests`."""
        return self._guesses.rests()

    def propose(self, last: None, most: int, load: TripLoad) -> tuple[None, TripBegun]:
        """As `Guesser.propose`."""
        guesses = self._guesses.propose(most, load)
        coming = self._tape.tokens(self._generated, len(guesses))
        self.right = next((at for at, one in enumerate(guesses) if one != coming[at]), len(guesses))
        return last, replace(self._guesses.begun, guesses=len(guesses))
