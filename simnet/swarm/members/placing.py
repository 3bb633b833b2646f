"""Members that join and move to other layers: each one's `PlacementCore` decides, and here it is done in virtual time.

A newcomer asks about its neighbours only, as `initial_placement.py` says; who moves sees everybody.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from molink.dht.records.records import PeerView
from molink.peer.announcing import placement_core as core
from molink.peer.memory.leases import Refused
from molink.routing.placement.rebalancing import Move, next_move
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.timeline import Timeline
from molink.simnet.swarm.members.bulletin import Bulletin
from molink.simnet.swarm.members.initial_placement import InitialPlacement, neighbours
from molink.simnet.swarm.members.member import Member, NotConserved


@dataclass(slots=True)
class MoveCounts:
    """Counts what came of looks at whether to move."""

    looks: int = 0
    told: int = 0
    """Moves that others were told of."""
    left_out: int = 0
    """Looks, about, that peers would have taken besides."""
    called_off: int = 0
    """Of those that others were told of: the swarm had changed, or a session had come."""
    cut_short: int = 0
    """The peer went away."""
    made: int = 0
    made_in: Counter[int] = field(default_factory=Counter)
    """By the minute in which the layers were there, the first being 1."""

    @property
    def in_progress(self) -> int:
        """Moves that others were told of and of which nothing has come yet."""
        return self.told - self.made - self.called_off - self.cut_short

    def check(self) -> None:
        """Raises NotConserved if more came of moves than there were."""
        if self.in_progress < 0 or self.made != self.made_in.total():
            raise NotConserved(
                f"of {self.told} moves {self.made} were made, {self.called_off} called off, {self.cut_short} cut short"
            )


class VirtualPlacementDriver:
    """Drives the placement cores of members in virtual time. `changed` hears who has something else to announce."""

    def __init__(
        self,
        timeline: Timeline,
        model: ModelSpec,
        bulletin: Bulletin,
        moves: MoveCounts,
        initial_placement: InitialPlacement,
        changed: Callable[[Member], None],
    ) -> None:
        self.moves = moves
        self.model = model
        self._timeline = timeline
        self._bulletin = bulletin
        self._initial_placement = initial_placement
        self._changed = changed

    def join(self, member: Member) -> None:
        """A newcomer chooses its layers and loads them."""
        self._go_on(member, core.Join(neighbours(member, self._bulletin, self._timeline.now_s)))

    def look(self, member: Member) -> None:
        """A member looks at whether to move, unless it is gone or has something else to do."""
        busy = member.book.gate.is_closed or bool(member.book.loading)
        if busy or not member.alive or not member.placement.resting:
            return
        self.moves.looks += 1
        self._go_on(member, core.ConsiderMove(self._others(member), busy=False))

    def _go_on(self, member: Member, event: core.Event) -> None:
        if not member.alive:
            self.moves.cut_short += not _is_new(member)
            return
        *told, asked = member.placement.handle(event, self._timeline.now_s)
        self._tell(member, told)
        match asked:
            case core.Rest(outcome):
                self._count(outcome)
            case core.FindSpan(others):
                span = self._initial_placement.newcomer_span(member, others, len(self._bulletin))
                self._go_on(member, core.SpanFound(span))
            case core.FindMove(others, held_s, looked_s):
                move = self._next_move(member, others, held_s, looked_s)
                self._go_on(member, core.MoveFound(move, loading=bool(member.book.loading)))
            case core.AwaitViews(wait_s):
                self._timeline.call(
                    wait_s, lambda: self._go_on(member, core.ViewsAwaited(self._others(member)))
                )
            case core.FetchSpan():  # its time is in that of loading: routers do without what is claimed in either
                self._go_on(member, core.SpanFetched())
            case core.DropSpans(spans):
                self._go_on(member, core.SpansDropped(_dropped(member, spans)))
            case core.LoadSpan(span):
                self._load(member, span)

    def _tell(self, member: Member, told: Iterable[core.Effect]) -> None:
        for one in told:
            if isinstance(one, core.Claim):
                self.moves.told += one != core.Claim() and not _is_new(member)
                member.claim = one
                self._changed(member)

    def _count(self, outcome: core.PlacementOutcome) -> None:
        if outcome is core.PlacementOutcome.CALLED_OFF:
            self.moves.called_off += 1
        elif outcome is core.PlacementOutcome.MOVED:
            self.moves.made += 1
            self.moves.made_in[int(self._timeline.now_s // 60) + 1] += 1

    def _load(self, member: Member, span: Span) -> None:
        """One part after another, unless sessions have taken the memory meanwhile."""
        ready_s = self._timeline.now_s
        ordered = member.book.preload(span, ready_s)
        for part in () if isinstance(ordered, Refused) else ordered:
            ready_s += member.fetch_s((part,)) + member.load_s((part,))
            member.loads[part] = ready_s
            self._timeline.call_at(ready_s, lambda part=part: self._arrived(member, part))  # type: ignore[misc]
        if not _is_new(member):
            self._changed(member)
        self._timeline.call_at(ready_s, lambda: self._go_on(member, core.SpanLoaded()))

    def _arrived(self, member: Member, part: Span) -> None:
        if member.alive:
            member.arrived(part)
            if not _is_new(member):
                self._changed(member)

    def _next_move(
        self, member: Member, others: tuple[PeerView, ...], held_s: float, looked_s: float
    ) -> Move | None:
        member.book.expire(self._timeline.now_s)
        snapshot = Snapshot((*others, member.own_view()), self.model)
        leased = tuple(lease.span for lease in member.book.leases)
        return next_move(snapshot, member.peer_id, held_s, looked_s, leased)

    def _others(self, member: Member) -> tuple[PeerView, ...]:
        own, now_s = member.peer_id, self._timeline.now_s
        if _is_new(member):
            return neighbours(member, self._bulletin, now_s)
        notices = self._bulletin.notices()
        return tuple(
            [one.view(now_s) for one in notices if one.facts.peer_id != own and one.expires_s > now_s]
        )


def _is_new(member: Member) -> bool:
    """Whether it has not got its first layers yet: until it has, it says nothing but what it claims."""
    return member.placement.held_since_s == math.inf


def _dropped(member: Member, spans: tuple[Span, ...]) -> bool:
    try:
        member.book.drop(*spans)
    except ValueError:  # a session has come
        return False
    return True
