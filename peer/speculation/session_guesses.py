"""The guesses of one session: each source says its next token, and the one that has been right most often is taken.

Sources are asked at each place of a trip, and all go on with what was taken. What is guessed is scored when the tokens
are known, whether or not it travelled, so that it costs no trip to see that guessing would pay again. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Protocol

from molink.peer.scheduling.trip_load import ALONE, NO_GUESSES, TripBegun, TripLoad
from molink.peer.speculation.acceptance import (
    DRAFT,
    GRAMMAR,
    GREEDY,
    LOOKUP,
    OVERALL,
    PREDICTION,
    SAMPLED,
    TABLE,
    Acceptance,
    GuessKind,
)
from molink.peer.speculation.draft_drawing import DraftDrawing
from molink.peer.speculation.draft_model import MOST_DRAFTED, DraftLookup, DraftModel
from molink.peer.speculation.expected_tokens import ExpectedTokens
from molink.peer.speculation.guess_count import CircuitCosts, guess_count, lengthened_ms, predicted_ms
from molink.peer.speculation.lookup import PredictionLookup, TextLookup
from molink.peer.speculation.ngram_tables import NgramTable, TableLookup
from molink.peer.speculation.told_draft import ToldDraft
from molink.routing.cost.pipeline import PipelineStage

MOST_GUESSES = 15
"""Of one trip."""
DRAFTED_EVERY = 8
"""Where no guess travels, or its guesses are not expected to pay, a draft model is asked for some at every eighth
trip."""
RESTS_AFTER, ASKED_EVERY, ASKED_SELDOM = 8, 4, 16
"""After so many trips on which no guess travelled the other sources are asked at every fourth, and, the longer guesses
are there that do not pay, the more seldom, up to every sixteenth: where engines are full, what guessing takes of a
processor is taken from tokens."""
LEAST_PLACES = 4
"""Guessed of a trip, if any; and as many more as twice those that travelled with the one before."""
LEAST_CHANCE = 0.02
"""A guess that arrives with less, those before it counted, is not made."""


class Chain(Protocol):
    """A source's guesses of what follows the sequence, one after the other."""

    def guess(self) -> tuple[int, int] | None:
        """The next token, and how strong a guess it is; None: nothing is guessed."""

    def follow(self, token: int) -> None:
        """The sequence goes on with this token, whoever guessed it."""


class GuessSource(Protocol):
    """What guesses come from in one session."""

    def begin_with(self, tokens: Sequence[int]) -> None:
        """The sequence begins with these."""

    def extend(self, tokens: Sequence[int]) -> None:
        """What is generated has these tokens more, for certain."""

    def begin(self) -> Chain:
        """Guesses of what comes behind the sequence."""


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may come at one place of a trip."""

    token_id: int
    chance: float
    """That it is right, if those before it are."""
    source: str


@dataclass(slots=True)
class SourceCounts:
    """Counts of guesses that travelled, and of those of them that were right, by source."""

    trips: int = 0
    """Trips with guesses or without, of sessions whose tokens are guessed."""
    guessed: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)

    def add(self, sources: Sequence[str], accepted: int) -> None:
        """A trip had guesses of these sources, in order, of which the first so many were right."""
        for counted, places in ((self.guessed, sources), (self.accepted, sources[:accepted])):
            for source in places:
                counted[source] = counted.get(source, 0) + 1


@dataclass(slots=True)
class IdleTrips:
    """Counts the latest trips in a row with which no guess travelled, and says when sources rest."""

    count: int = 0
    asked_every: int = ASKED_EVERY

    @property
    def are_at_rest(self) -> bool:
        """Whether nobody is asked for the next trip."""
        return self.count >= RESTS_AFTER and self.count % self.asked_every > 0

    def record(self, *, travelled: bool, found: bool) -> None:
        """For one more trip guesses were found, and travelled, or not."""
        if travelled:
            self.count, self.asked_every = 0, ASKED_EVERY
            return
        self.count += 1
        if found and self.count > RESTS_AFTER:
            self.asked_every = min(2 * self.asked_every, ASKED_SELDOM)


class SessionGuesses:
    """Owns where one session's guesses come from, and how right each source has been in it."""

    def __init__(
        self,
        table: NgramTable | None = None,
        prediction: Sequence[int] = (),
        stages: Sequence[PipelineStage] = (),
        draft: DraftModel | ToldDraft | None = None,
        *,
        drawing: DraftDrawing | None = None,
        fixed: int | None = None,
        totals: SourceCounts | None = None,
    ) -> None:
        """`table` has the client's earlier generations, and learns this one; `prediction` is what the client says that
        will be generated; where tokens are sampled, by a `drawing`, less is guessed right. By the circuit's `stages` it
        is decided how many guesses travel, unless that is `fixed`; without either all do. What is counted is counted in
        `totals` too."""
        self._lookups: dict[str, GuessSource] = {LOOKUP: TextLookup()}
        if table is not None:
            self._lookups[TABLE] = TableLookup(table)
        if prediction:
            self._lookups[PREDICTION] = PredictionLookup(prediction)
        if draft is not None:
            self._lookups[DRAFT] = draft if isinstance(draft, ToldDraft) else DraftLookup(draft, drawing)
        self._acceptance = Acceptance(GREEDY if drawing is None else SAMPLED)
        self._idle = IdleTrips()
        self._costs = CircuitCosts(stages) if stages else None
        self._fixed = fixed
        self._load = ALONE
        """What the latest trip began beside."""
        self.begun = NO_GUESSES
        """The latest trip, as it was proposed."""
        self._is_begun = False
        self._proposed: list[tuple[int, list[tuple[GuessKind, int]]]] = []
        """For each place of the latest chain the token that was taken and what each source said, until scored."""
        self._sources: list[str] = []
        """Whose guess each place of the latest chain is."""
        self.counts = SourceCounts()
        self._all_counts = (self.counts,) if totals is None else (self.counts, totals)

    @classmethod
    def of_grammar(
        cls,
        stages: Sequence[PipelineStage] = (),
        *,
        drawing: DraftDrawing | None = None,
        fixed: int | None = None,
        totals: SourceCounts | None = None,
    ) -> "SessionGuesses":
        """Of a session whose tokens are of a grammar: its tail draws behind those guesses alone that it has said to
        expect, for it knows no other's masks."""
        made = cls(stages=stages, drawing=drawing, fixed=fixed, totals=totals)
        made._lookups = {GRAMMAR: ExpectedTokens()}
        return made

    def extend(self, token_ids: Iterable[int]) -> None:
        """The sequence has these tokens more, for certain. The first call has the whole sequence so far, which is not
        learnt."""
        tokens = tuple(token_ids)
        if self._is_begun:
            self._score(tokens)
        for source in self._lookups.values():
            (source.extend if self._is_begun else source.begin_with)(tokens)
        self._is_begun = True

    def forget(self, *, text: bool) -> None:
        """The prediction makes room for what others guess from, and the sequence's own `text` as well if it is to."""
        for name in (PREDICTION, LOOKUP) if text else (PREDICTION,):
            self._lookups.pop(name, None)

    def candidates(self, most: int, drafted: int = MOST_DRAFTED) -> tuple[Guess, ...]:
        """What may come next, place by place: at most so many, fewer where no source knows further. A draft model is
        asked for the first `drafted` places alone."""
        self._proposed, self._sources = [], []
        if most < 1:
            return ()
        chains = [(name, one.begin()) for name, one in self._lookups.items() if name != DRAFT or drafted]
        guesses: list[Guess] = []
        together = 1.0
        for place in range(min(most, MOST_GUESSES)):
            if place == drafted:
                chains = [one for one in chains if one[0] != DRAFT]
            said: list[tuple[GuessKind, int]] = []
            best, token, source = -1.0, 0, ""
            for name, chain in chains:
                if (found := chain.guess()) is not None:
                    kind = name, found[1]
                    said.append((kind, found[0]))
                    if (chance := self._acceptance.chance(kind)) > best:
                        best, token, source = chance, found[0], name
            together *= best
            if not said or together < LEAST_CHANCE:
                break
            self._proposed.append((token, said))
            guesses.append(Guess(token, best, source))
            for _, chain in chains:
                chain.follow(token)
        self._sources = [one.source for one in guesses]
        return tuple(guesses)

    def rests(self) -> bool:
        """Whether nothing is guessed for the next trip, whatever its load."""
        if self._fixed is not None or self._costs is None or GRAMMAR in self._lookups:
            return False
        return self._idle.are_at_rest

    def propose(self, most: int, load: TripLoad = ALONE) -> tuple[int, ...]:
        """The tokens that travel with the next trip, at most so many, beside that load. All guesses are kept until they
        are scored, also those that do not travel."""
        for counts in self._all_counts:
            counts.trips += 1
        if self.rests():
            self._proposed, self._sources, self.begun = [], [], NO_GUESSES
            self._idle.record(travelled=False, found=False)
            return ()
        self._load = load
        drafted = self._drafted_places(load) if self.told is None else MOST_GUESSES
        found = self.candidates(self._places(), drafted)
        chances = [one.chance for one in found[: most if self._fixed is None else min(most, self._fixed)]]
        costs, count = self._costs, len(chances)
        if costs is not None and self._fixed is None:
            count = guess_count(chances, costs, load)
        tokens = sum(accumulate(chances[:count], mul, initial=1.0))
        is_unanswered = self.told is not None and self.told.is_unanswered
        self._idle.record(travelled=count > 0 or is_unanswered, found=bool(chances))
        self.begun = TripBegun(count, tokens, guessing_ms=self._guessing_ms())
        if costs is not None:
            times_ms = predicted_ms(costs, count, load), lengthened_ms(costs, count, load)
            self.begun = TripBegun(count, tokens, *times_ms, self.begun.guessing_ms)
        return tuple(one.token_id for one in found[:count])

    @property
    def told(self) -> ToldDraft | None:
        """What knows of a draft that somebody else computes; None: there is none for this session."""
        source = self._lookups.get(DRAFT)
        return source if isinstance(source, ToldDraft) else None

    def places(self, most: int) -> int:
        """As `Drafter.places`: what the next trip begins beside is taken to be as with the latest one."""
        source = self.told
        if source is None or source.is_closed or not source.times.answers:
            return 0
        places = 0
        if not self.rests():
            places = min(most, self._places(), self._drafted_places(self._load))
        source.spent_ms, source.is_unanswered = source.share_ms(_sequences(self._load)) * places, places > 0
        return places

    def expect(self, token_ids: Sequence[int]) -> None:
        """The tail says that these probably come next, by its grammar."""
        if isinstance(source := self._lookups.get(GRAMMAR), ExpectedTokens):
            source.expect(token_ids)

    def sources(self, guessed: int) -> Sequence[str]:
        """Where the first so many of the latest guesses came from."""
        return self._sources[:guessed]

    def record(self, guessed: int, accepted: int) -> None:
        """So many of the latest guesses travelled, and the first so many of these were right."""
        for counts in self._all_counts:
            counts.add(self._sources[:guessed], accepted)

    def _places(self) -> int:
        """How many tokens are guessed for the next trip: guessing takes time, so no more than may travel."""
        if self._fixed is not None or self._costs is None or GRAMMAR in self._lookups:
            return MOST_GUESSES
        return LEAST_PLACES + 2 * self.begun.guesses

    def _drafted_places(self, load: TripLoad) -> int:
        """For how many places a draft model is asked: for as many as would travel if its guesses were all that there
        are, their time counted."""
        source = self._lookups.get(DRAFT)
        if not isinstance(source, DraftLookup | ToldDraft) or self._idle.count % DRAFTED_EVERY:
            return 0
        most = MOST_DRAFTED if isinstance(source, DraftLookup) else MOST_GUESSES
        if self._costs is None or self._fixed is not None:
            return most
        chances = [self._acceptance.chance((DRAFT, OVERALL))] * most
        pays = guess_count(chances, self._costs, load, source.share_ms(_sequences(load)))
        source.unasked_trips = 0 if pays else (source.unasked_trips + 1) % DRAFTED_EVERY
        return pays if pays or source.unasked_trips else LEAST_PLACES

    def _guessing_ms(self) -> float:
        """What the draft model's guesses for the latest trip took."""
        source = self._lookups.get(DRAFT)
        if isinstance(source, ToldDraft):
            return source.spent_ms
        if not isinstance(source, DraftLookup):
            return 0.0
        return source.guess_ms * sum([kind[0] == DRAFT for _, said in self._proposed for kind, _ in said])

    def _score(self, tokens: Sequence[int]) -> None:
        """What each source said, place by place, as long as the chain went the way of the sequence."""
        for token, (taken, said) in zip(tokens, self._proposed, strict=False):
            for kind, guessed in said:
                self._acceptance.record(kind, right=guessed == token)
                if kind[0] == DRAFT:
                    self._acceptance.record((DRAFT, OVERALL), right=guessed == token)
            if taken != token:
                break
        self._proposed = []


def _sequences(load: TripLoad) -> int:
    """How many sessions' tokens are guessed together, about: those of one micro-batch."""
    return 1 if load.beside is None else 1 + load.beside.sessions
