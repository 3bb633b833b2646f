"""The placement of one peer's layers as a core without input or output: `handle(event, now_s)` returns what to do.

Peers that choose at the same moment would choose the same. So each says first what it is going to load, waits until
the others' word has come, and acts only if it would still choose so; of two whose words cross, the one of smaller id
goes ahead. A running peer drives this with asyncio (`placing.py`), the simulator in virtual time.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from molink.dht.records.records import PeerState, PeerView
from molink.routing.placement.rebalancing import SETTLE_S, Move, without_late_claims
from molink.shards.spec import Span, merge_spans, missing_spans

CHOICES = 5
"""Times that a joining peer chooses, at most. If the swarm still changes then, a later move makes up for it."""
Views = tuple[PeerView, ...]
"""The model's other peers."""
Spans = tuple[Span, ...]


class PlacementOutcome(Enum):
    """What came of a join or of a look at whether to move."""

    JOINED = "joined"
    STAYED = "stayed"
    """Nothing pays."""
    CALLED_OFF = "called off"
    """The swarm has changed, or a session has come, since others were told."""
    MOVED = "moved"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Join:
    """Event: the peer holds nothing yet, and chooses. Answers nothing."""

    others: Views


@dataclass(frozen=True, slots=True)
class ConsiderMove:
    """Event: it is time to look at whether to move. A look while something is under way is none."""

    others: Views
    busy: bool
    """Whether the peer is draining, or loads layers already."""


@dataclass(frozen=True, slots=True)
class SpanFound:
    """Event: answers `FindSpan`."""

    span: Span | None


@dataclass(frozen=True, slots=True)
class MoveFound:
    """Event: answers `FindMove`."""

    move: Move | None
    loading: bool
    """Whether the peer loads something by now."""


@dataclass(frozen=True, slots=True)
class ViewsAwaited:
    """Event: answers `AwaitViews`."""

    others: Views


@dataclass(frozen=True, slots=True)
class SpanFetched:
    """Event: answers `FetchSpan`: nobody else is needed to load the layers."""


@dataclass(frozen=True, slots=True)
class SpansDropped:
    """Event: answers `DropSpans`."""

    ok: bool
    """False: a session has come in the last moment, and everything is still held."""


@dataclass(frozen=True, slots=True)
class SpanLoaded:
    """Event: answers `LoadSpan`: the layers are there, or sessions have taken the memory meanwhile."""


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: answers any effect that is to be answered, in the place of what it asks for."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Effect: others are to hear that these layers will be loaded and dropped; of none: that nothing will."""

    load: Spans = ()
    drop: Spans = ()


@dataclass(frozen=True, slots=True)
class Choose:
    """Effect: the span that was found last is what a newcomer loads."""


@dataclass(frozen=True, slots=True)
class FindSpan:
    """Effect: ask `preview_join` what helps the swarm most."""

    others: Views


@dataclass(frozen=True, slots=True)
class FindMove:
    """Effect: ask `next_move`."""

    others: Views
    held_s: float
    """How long it has held its layers at that moment."""
    looked_s: float
    """The moment that it is asked about."""


@dataclass(frozen=True, slots=True)
class AwaitViews:
    """Effect: wait so long, then copy what others have said meanwhile."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class FetchSpan:
    """Effect: have the weights of these layers on this machine, beside those of the layers that are held."""

    span: Span


@dataclass(frozen=True, slots=True)
class DropSpans:
    """Effect: these layers are held no longer."""

    spans: Spans


@dataclass(frozen=True, slots=True)
class LoadSpan:
    """Effect: commit memory to these layers, and load them."""

    span: Span


@dataclass(frozen=True, slots=True)
class Rest:
    """Effect: it is done; `ConsiderMove` again after `LOOK_EVERY_S`."""

    outcome: PlacementOutcome


Event = (
    Join
    | ConsiderMove
    | SpanFound
    | MoveFound
    | ViewsAwaited
    | SpanFetched
    | SpansDropped
    | SpanLoaded
    | Failed
)
Effect = Claim | Choose | FindSpan | FindMove | AwaitViews | FetchSpan | DropSpans | LoadSpan | Rest
ANSWERS: dict[type[Effect], tuple[type[Event], ...]] = {
    FindSpan: (SpanFound, Failed),
    FindMove: (MoveFound, Failed),
    AwaitViews: (ViewsAwaited, Failed),
    FetchSpan: (SpanFetched, Failed),
    DropSpans: (SpansDropped, Failed),
    LoadSpan: (SpanLoaded, Failed),
    Rest: (Join, ConsiderMove, Failed),
}
"""What each effect is answered with, once. Effects that are not here are not answered."""
Steps = Generator[Effect, Event, PlacementOutcome]
Answer = TypeVar(
    "Answer", ConsiderMove, SpanFound, MoveFound, ViewsAwaited, SpanFetched, SpansDropped, SpanLoaded
)


class _GivenUpError(Exception):
    """What was asked for cannot be had."""


class PlacementCore:
    """One peer's joins and moves, one at a time. Times are those of a clock that is never set back."""

    def __init__(self, peer_id: str, held_since_s: float = -math.inf) -> None:
        self.held_since_s = held_since_s
        """Since when it has held its layers; infinite: it has not got them yet."""
        self._peer_id = peer_id
        self._now_s = held_since_s
        self._expected = ANSWERS[Rest]
        self._life = self._live()
        next(self._life)

    @property
    def resting(self) -> bool:
        """Whether nothing is under way."""
        return ConsiderMove in self._expected

    def handle(self, event: Event, now_s: float) -> tuple[Effect, ...]:
        """What to do next, in order; the last effect is to be answered, the others are not.

        Raises:
            ValueError: nobody has asked for such an answer.
        """
        if isinstance(event, ConsiderMove) and (event.busy or not self.resting):
            return (Rest(PlacementOutcome.STAYED),) if self.resting else ()
        if not isinstance(event, self._expected):
            raise ValueError(f"{type(event).__name__} answers nothing that was asked for")
        self._now_s = now_s
        effects = [self._life.send(event)]
        while type(effects[-1]) not in ANSWERS:
            effects.append(next(self._life))
        self._expected = ANSWERS[type(effects[-1])]
        return tuple(effects)

    def _live(self) -> Generator[Effect, Event, None]:
        outcome = PlacementOutcome.STAYED
        while True:
            event = yield Rest(outcome)
            try:
                if isinstance(event, Join):
                    outcome = yield from self._join(event.others)
                else:
                    outcome = yield from self._move(_answer(ConsiderMove, event).others)
            except _GivenUpError:
                outcome = PlacementOutcome.FAILED
                self.held_since_s = self._now_s
            if outcome is not PlacementOutcome.STAYED:
                yield Claim()

    def _join(self, others: Views) -> Steps:
        self.held_since_s = math.inf
        span, claimed = (yield from self._span(others)), None
        for _ in range(CHOICES):
            if span is None or span == claimed:
                break
            yield Claim(load=(span,))
            claimed = span
            others = yield from self._await_views(others, SETTLE_S)
            span = yield from self._span(others)
        if span is not None and span != claimed:  # the swarm still changes
            yield Claim(load=(span,))
        yield Choose()
        if span is not None:
            yield from self._load((span,))
        self.held_since_s = self._now_s
        return PlacementOutcome.JOINED

    def _move(self, others: Views) -> Steps:
        looked_s = self._now_s
        found = yield from self._found(others, looked_s)
        move = found.move
        if move is None:
            return PlacementOutcome.STAYED
        yield Claim(move.load, move.drop)
        others = yield from self._await_views(others, SETTLE_S)
        if not (yield from self._pays_still(move, others, looked_s)):
            return PlacementOutcome.CALLED_OFF
        began_s = self._now_s
        for span in move.load:  # who cannot have the new layers keeps the old ones
            _answer(SpanFetched, (yield FetchSpan(span)))
        if self._now_s - began_s > SETTLE_S:  # who held what is about to be dropped may be gone
            others = yield from self._await_views(others, 0.0)
            if not (yield from self._pays_still(move, others, looked_s)):
                return PlacementOutcome.CALLED_OFF
        dropped = _answer(SpansDropped, (yield DropSpans(move.drop)))
        if not dropped.ok:
            return PlacementOutcome.CALLED_OFF
        try:
            yield from self._load(move.load)
        except _GivenUpError:
            yield Claim(load=move.drop)
            yield from self._load(move.drop)
            raise
        self.held_since_s = self._now_s
        return PlacementOutcome.MOVED

    def _pays_still(self, move: Move, others: Views, looked_s: float) -> Generator[Effect, Event, bool]:
        """Whether the peer would move in the same way now."""
        found = yield from self._found(others, looked_s)
        again = found.move
        # while something loads, dropping would have to wait, and by then be decided anew
        return again is not None and not found.loading and (again.load, again.drop) == (move.load, move.drop)

    def _await_views(self, seen: Views, wait_s: float) -> Generator[Effect, Event, Views]:
        """The others as they are when they have heard what this peer has claimed."""
        settled = _answer(ViewsAwaited, (yield AwaitViews(wait_s if seen else 0.0)))
        return without_late_claims(settled.others, seen, self._peer_id)

    def _span(self, others: Views) -> Generator[Effect, Event, Span | None]:
        return _answer(SpanFound, (yield FindSpan(others))).span

    def _found(self, others: Views, looked_s: float) -> Generator[Effect, Event, MoveFound]:
        return _answer(MoveFound, (yield FindMove(others, looked_s - self.held_since_s, looked_s)))

    def _load(self, spans: Spans) -> Generator[Effect, Event, None]:
        for span in spans:
            _answer(SpanLoaded, (yield LoadSpan(span)))


def claimed(state: PeerState, claim: Claim) -> PeerState:
    """The state as it is told while the claim stands: then nobody else loads the same, and no router plans with what
    may soon be gone."""
    if claim == Claim():
        return state
    left = tuple(part for span in state.spans for part in missing_spans(span, claim.drop))
    return replace(state, spans=left, loading=merge_spans((*state.loading, *claim.load)))


def _answer(kind: type[Answer], event: Event) -> Answer:
    if isinstance(event, kind):
        return event
    raise _GivenUpError
