"""Members that move to other layers, as `molink.peer.announcing.placing` has peers do, by its very decision.

A peer looks every few seconds at whether to move; unless the swarm is stuck, it may do so only in its turn, a minute
in about twenty. To weigh it takes a tenth of a second of a processor where there are 256 peers or more. So

- up to `FEW` peers, every look is taken;
- up to `LARGE`, each peer that has its turn looks once in it, at a moment drawn, and not some 17 times;
- beyond, `DRAWN` of all those that have their turn looks, once. Of 10,000 peers one in 500 looks that would, so that
  all but a few of the moves that such a swarm makes are missing. What that leaves out is counted.

While the swarm is stuck, because nobody holds or loads some layer, everybody looks as often as peers do (`WATCHING`
drawn ones, where there are more), but only if what peers hold is another than when it looked last.

Who has a turn is found out when it begins. Peers that are there from the beginning have held their layers for long.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from numpy.random import Generator

from molink.dht.records.records import PeerView
from molink.peer.memory.leases import Refused
from molink.routing.placement.rebalancing import (
    AT_ONCE,
    LOOK_EVERY_S,
    SETTLE_S,
    SETTLED,
    Move,
    having_turn,
    is_stuck,
    next_move,
    without_late_claims,
)
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.timeline import Timeline
from molink.simnet.swarm.members.bulletin import Bulletin
from molink.simnet.swarm.members.initial_placement import LARGE
from molink.simnet.swarm.members.member import Member, NotConserved

FEW = 30
DRAWN = 1
WATCHING = 200
LOOKS_IN_A_TURN = round(SETTLED.turn_s / (sum(LOOK_EVERY_S) / 2))


@dataclass(slots=True)
class Moves:
    """What came of looks at whether to move."""

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


class Moving:
    """Has members look, claim, drop and load. `changed` hears who has something else to announce."""

    def __init__(
        self,
        timeline: Timeline,
        model: ModelSpec,
        members: dict[str, Member],
        bulletin: Bulletin,
        moves: Moves,
        rng: Generator,
        changed: Callable[[Member], None],
    ) -> None:
        self.moves = moves
        self._timeline = timeline
        self._model = model
        self._members = members
        self._bulletin = bulletin
        self._rng = rng
        self._changed = changed
        self._in_turn: frozenset[str] = frozenset()
        """Those that look again and again in the present turn."""
        self._watching: set[str] = set()
        self._moving: set[str] = set()
        self._stuck = False
        self._seen: dict[str, tuple[object, ...]] = {}
        """What there was to see for a member when it looked last while the swarm was stuck."""

    def begin(self) -> None:
        """From now on members move."""
        self._bulletin.heard = self._heard
        self._heard()
        self._turn(0)

    def _heard(self) -> None:
        """What peers hold is another now, as far as the swarm knows."""
        stuck, before = is_stuck(self._views(), self._model), self._stuck
        self._stuck = stuck
        if not stuck:
            return
        living = [member for member in self._members.values() if member.alive]
        if not before or len(living) <= WATCHING:
            for member in self._some(living, WATCHING):
                self._watch(member)

    def _turn(self, number: int) -> None:
        """Another turn begins."""
        now_s = self._timeline.now_s
        peers = len(self._bulletin)
        turns = having_turn((view.peer_id for view in self._views()), now_s)
        those = [self._members[one] for one in turns if self._settled(self._members[one])]
        if peers <= FEW:
            self._in_turn = frozenset(member.peer_id for member in those)
            for member in those:
                self._watch(member)
        else:
            self._in_turn = frozenset()
            chosen = those if peers <= LARGE else self._some(those, DRAWN)
            self.moves.left_out += LOOKS_IN_A_TURN * len(those) - len(chosen)
            for member in chosen:
                at_s = float(self._rng.uniform(0.0, SETTLED.turn_s))
                self._timeline.call(at_s, lambda member=member: self._look(member))  # type: ignore[misc]
        following_s = (number + 1) * SETTLED.turn_s
        self._timeline.call_at(following_s, lambda: self._turn(number + 1))

    def _settled(self, member: Member) -> bool:
        """Whether it will have held its layers for long enough by the end of the turn."""
        ends_s = self._timeline.now_s + SETTLED.turn_s
        return member.alive and ends_s - member.held_since_s >= SETTLED.min_hold_s

    def _some(self, those: list[Member], most: int) -> list[Member]:
        if len(those) <= most:
            return those
        return [those[at] for at in sorted(self._rng.choice(len(those), most, replace=False).tolist())]

    def _watch(self, member: Member) -> None:
        """It looks from now on, for as long as there is a reason. What is left of the interval that it is in is a
        drawn part of one; longer intervals are met sooner."""
        if member.peer_id in self._watching:
            return
        self._watching.add(member.peer_id)
        least_s, most_s = LOOK_EVERY_S
        interval_s = (least_s**2 + float(self._rng.random()) * (most_s**2 - least_s**2)) ** 0.5
        self._timeline.call(interval_s * float(self._rng.random()), lambda: self._ring(member))

    def _ring(self, member: Member) -> None:
        in_turn = member.peer_id in self._in_turn
        if not member.alive or not (in_turn or self._stuck):
            self._watching.discard(member.peer_id)
            return
        if in_turn or self._news(member):
            self._look(member)
        self._timeline.call(float(self._rng.uniform(*LOOK_EVERY_S)), lambda: self._ring(member))

    def _news(self, member: Member) -> bool:
        now_s = self._timeline.now_s
        there = (self._bulletin.holdings, member.book.held, self._leased(member), self._settled(member))
        held_s = now_s - member.held_since_s
        news = self._seen.get(member.peer_id) != there and held_s >= AT_ONCE.min_hold_s
        if news:
            self._seen[member.peer_id] = there
        return news

    def _look(self, member: Member) -> None:
        if not member.alive or member.peer_id in self._moving or member.book.draining or member.book.loading:
            return
        now_s = self._timeline.now_s
        self.moves.looks += 1
        seen = self._others(member)
        move = self._next_move(member, seen, now_s)
        if move is None:
            return
        self.moves.told += 1
        self._moving.add(member.peer_id)
        self._intend(member, move.load, move.drop)
        wait_s = SETTLE_S if seen else 0.0
        self._timeline.call(wait_s, lambda: self._decide(member, move, seen, now_s))

    def _decide(self, member: Member, move: Move, seen: tuple[PeerView, ...], looked_s: float) -> None:
        """Others have heard what it is going to do: it does it if it would still choose so."""
        if not member.alive:
            self.moves.cut_short += 1
            return
        now_others = without_late_claims(self._others(member), seen, member.peer_id)
        again = self._next_move(member, now_others, looked_s)
        if again is None or member.book.loading or (again.load, again.drop) != (move.load, move.drop):
            self._call_off(member)
            return
        try:
            member.book.drop(*move.drop)
        except ValueError:  # a session has come
            self._call_off(member)
            return
        self._load(member, list(move.load))

    def _load(self, member: Member, left: list[Span]) -> None:
        """One span after another, unless sessions have taken the memory meanwhile."""
        if not member.alive:
            self.moves.cut_short += 1
            return
        while left:
            ordered = member.book.preload(left.pop(0), self._timeline.now_s)
            parts = () if isinstance(ordered, Refused) else ordered
            if parts:
                self._arrive(member, parts, left)
                self._changed(member)
                return
        minute = int(self._timeline.now_s // 60) + 1
        self.moves.made += 1
        self.moves.made_in[minute] += 1
        member.held_since_s = self._timeline.now_s
        self._rest(member)

    def _arrive(self, member: Member, parts: tuple[Span, ...], left: list[Span]) -> None:
        now_s = self._timeline.now_s
        times_s = [member.fetch_s((part,)) + member.load_s((part,)) for part in parts]
        for part, takes_s in zip(parts, times_s, strict=True):
            member.loads[part] = now_s + takes_s
            self._timeline.call(takes_s, lambda part=part: self._arrived(member, part))  # type: ignore[misc]
        self._timeline.call(max(times_s), lambda: self._load(member, left))

    def _arrived(self, member: Member, part: Span) -> None:
        if member.alive:
            member.arrived(part)
            self._changed(member)

    def _call_off(self, member: Member) -> None:
        self.moves.called_off += 1
        self._rest(member)

    def _rest(self, member: Member) -> None:
        self._moving.discard(member.peer_id)
        self._intend(member)

    def _intend(self, member: Member, load: tuple[Span, ...] = (), drop: tuple[Span, ...] = ()) -> None:
        member.promised, member.withheld = load, drop
        self._changed(member)

    def _next_move(self, member: Member, others: tuple[PeerView, ...], now_s: float) -> Move | None:
        member.book.expire(self._timeline.now_s)
        snapshot = Snapshot((*others, member.own_view()), self._model)
        return next_move(snapshot, member.peer_id, member.held_since_s, now_s, self._leased(member))

    def _leased(self, member: Member) -> tuple[Span, ...]:
        return tuple(lease.span for lease in member.book.leases)

    def _others(self, member: Member) -> tuple[PeerView, ...]:
        own, now_s = member.peer_id, self._timeline.now_s
        notices = self._bulletin.notices()
        return tuple(
            [one.view(now_s) for one in notices if one.facts.peer_id != own and one.expires_s > now_s]
        )

    def _views(self) -> Iterator[PeerView]:
        now_s = self._timeline.now_s
        return (notice.view(now_s) for notice in self._bulletin.notices() if notice.expires_s > now_s)
