"""When members look at whether to move to other layers; `placing.py` does what comes of it.

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

from collections.abc import Iterator

from numpy.random import Generator

from molink.dht.records.records import PeerView
from molink.routing.placement.rebalancing import (
    AT_ONCE,
    LOOK_EVERY_S,
    SETTLED,
    having_turn,
    is_stuck,
)
from molink.simnet.core.timeline import Timeline
from molink.simnet.swarm.members.bulletin import Bulletin
from molink.simnet.swarm.members.initial_placement import LARGE
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.members.placing import VirtualPlacementDriver

FEW = 30
DRAWN = 1
WATCHING = 200
LOOKS_IN_A_TURN = round(SETTLED.turn_s / (sum(LOOK_EVERY_S) / 2))


class MoveSchedule:
    """Schedules when members look at whether to move."""

    def __init__(
        self,
        timeline: Timeline,
        members: dict[str, Member],
        bulletin: Bulletin,
        placing: VirtualPlacementDriver,
        rng: Generator,
    ) -> None:
        self._timeline = timeline
        self._members = members
        self._bulletin = bulletin
        self._placing = placing
        self._rng = rng
        self._in_turn: frozenset[str] = frozenset()
        """Those that look again and again in the present turn."""
        self._watching: set[str] = set()
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
        stuck, before = is_stuck(self._views(), self._placing.model), self._stuck
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
            self._placing.moves.left_out += LOOKS_IN_A_TURN * len(those) - len(chosen)
            for member in chosen:
                at_s = float(self._rng.uniform(0.0, SETTLED.turn_s))
                self._timeline.call(at_s, lambda member=member: self._placing.look(member))  # type: ignore[misc]
        following_s = (number + 1) * SETTLED.turn_s
        self._timeline.call_at(following_s, lambda: self._turn(number + 1))

    def _settled(self, member: Member) -> bool:
        """Whether it will have held its layers for long enough by the end of the turn."""
        ends_s = self._timeline.now_s + SETTLED.turn_s
        return member.alive and ends_s - member.placement.held_since_s >= SETTLED.min_hold_s

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
            self._placing.look(member)
        self._timeline.call(float(self._rng.uniform(*LOOK_EVERY_S)), lambda: self._ring(member))

    def _news(self, member: Member) -> bool:
        now_s = self._timeline.now_s
        leased = tuple(lease.span for lease in member.book.leases)
        there = (self._bulletin.holdings, member.book.held, leased, self._settled(member))
        held_s = now_s - member.placement.held_since_s
        news = self._seen.get(member.peer_id) != there and held_s >= AT_ONCE.min_hold_s
        if news:
            self._seen[member.peer_id] = there
        return news

    def _views(self) -> Iterator[PeerView]:
        now_s = self._timeline.now_s
        return (notice.view(now_s) for notice in self._bulletin.notices() if notice.expires_s > now_s)
