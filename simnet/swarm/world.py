"""A swarm in virtual time: its members, its gateways, and what comes to them. The owner of everything in it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numpy.random import Generator, default_rng

from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.request_load import Request, arrivals
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.traces import TraceRequest
from molink.simnet.swarm.members.accounts import MINUTE_S, Accounts
from molink.simnet.swarm.members.announcing import Announcing
from molink.simnet.swarm.members.bulletin import Bulletin, Notice
from molink.simnet.swarm.members.initial_placement import Settling
from molink.simnet.swarm.members.member import Member, NotConserved
from molink.simnet.swarm.members.moving import Moves, Moving
from molink.simnet.swarm.members.traffic import ControlTraffic
from molink.simnet.swarm.population.places import Places
from molink.simnet.swarm.population.volunteers import Volunteer
from molink.simnet.swarm.sessions.gateway import Gateway
from molink.simnet.swarm.sessions.lifecycle import Lifecycle
from molink.simnet.swarm.settings import SwarmSettings


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Who is in a world."""

    model: ModelSpec
    places: Places
    volunteers: Sequence[Volunteer]
    """Those that are there when it begins."""
    gateway_ids: tuple[str, ...]
    trace: Sequence[TraceRequest]
    recruit: Callable[[], Volunteer] | None = None
    """Draws newcomers; None: nobody comes."""


@dataclass(frozen=True, slots=True)
class Minute:
    """The swarm at the end of a minute."""

    minute: int
    peers: int
    announced: int
    """Peers in the tables: those that crashed among them, until what they said expires."""
    open_sessions: int
    traffic_kbit_s: dict[str, float]


@dataclass(slots=True, eq=False)
class SwarmWorld:
    """One run. `report` hears how far it is."""

    cast: Cast
    settings: SwarmSettings
    report: Callable[[str], None] = lambda _: None
    timeline: Timeline = field(default_factory=Timeline)
    bulletin: Bulletin = field(default_factory=Bulletin)
    traffic: ControlTraffic = field(default_factory=ControlTraffic)
    accounts: Accounts = field(default_factory=Accounts)
    members: dict[str, Member] = field(default_factory=dict)
    minutes: list[Minute] = field(default_factory=list)
    gateways: tuple[Gateway, ...] = ()
    moves: Moves = field(default_factory=Moves)

    def run(self) -> None:
        """Until the last session has ended. Raises NotConserved if anything in it was lost or came twice."""
        seeds = default_rng(self.settings.seed).spawn(4)
        announcing = Announcing(self.timeline, self.bulletin, self.traffic, seeds[0])
        lifecycle = Lifecycle(
            self.timeline, self.cast.model, self.members, self.cast.places, self.accounts, seeds[1],
            announcing.changed, partners=self.settings.partners,
        )  # fmt: skip
        settling = Settling(self.cast.model)
        churning = _Churning(self, announcing, lifecycle, settling, seeds[2])
        self.report(f"{len(self.cast.volunteers):,} volunteers choose their layers")
        churning.populate()
        moving = Moving(
            self.timeline,
            self.cast.model,
            self.members,
            self.bulletin,
            self.moves,
            seeds[3],
            announcing.changed,
        )
        moving.begin()
        self.gateways = tuple(self._gateway(gateway_id) for gateway_id in self.cast.gateway_ids)
        self._minute(announcing)
        self._next_request(lifecycle, self._requests())
        churning.next_arrival()
        while self.timeline.now_s < self.settings.duration_s or self.accounts.open:
            self.timeline.step()
        self.check()

    def check(self) -> None:
        """Raises NotConserved unless every session has ended once and every lease has been returned."""
        self.accounts.check()
        self.moves.check()
        for member in self.members.values():
            if member.alive and (member.decoding or member.prefilling or member.copies or member.book.leases):
                raise NotConserved(
                    f"{member.peer_id} has {len(member.book.leases)} leases, {len(member.decoding)} sessions "
                    f"and {len(member.copies)} copies when all have ended"
                )

    def _gateway(self, gateway_id: str) -> Gateway:
        def pull(since_s: float) -> dict[str, Notice]:
            copied = self.bulletin.copy()
            newer = sum(notice.at_s > since_s for notice in copied.values())
            self.traffic.pulled(len(copied), newer, len(copied), self.timeline.now_s)
            return copied

        places = self.cast.places
        return Gateway(gateway_id, self.cast.model, pull, lambda peer_id: places.rtt_ms(gateway_id, peer_id))

    def _requests(self) -> list[Request]:
        settings, found = self.settings, []
        first = settings.seed % len(self.cast.trace)
        for request in arrivals(self.cast.trace, settings.rate_rps, settings.duration_s, first):
            if request.arrival_s >= settings.duration_s:
                break
            found.append(request)
        return found[::-1]

    def _next_request(self, lifecycle: Lifecycle, left: list[Request]) -> None:
        """`left` is in reverse; gateways take requests in turns."""
        if not left:
            return
        request = left.pop()

        def come() -> None:
            gateway = self.gateways[request.number % len(self.gateways)]
            lifecycle.begin(request, gateway, self.settings.timeout_s)
            self._next_request(lifecycle, left)

        self.timeline.call_at(request.arrival_s, come)

    def _minute(self, announcing: Announcing) -> None:
        """Counts the minute that ends, and what all peers do in the one that begins."""
        now_s = self.timeline.now_s
        announcing.keep_up(MINUTE_S)
        minute = round(now_s / MINUTE_S)
        if minute:
            self.minutes.append(
                Minute(
                    minute, announcing.living, len(self.bulletin), self.accounts.open,
                    dict(self.traffic.kbit_s(minute - 1)),
                )
            )  # fmt: skip
            done = min(1.0, now_s / self.settings.duration_s)
            self.report(
                f"{100 * done:.0f} % of {self.settings.duration_s / 3600:g} h: {announcing.living:,} peers, "
                f"{self.accounts.arrived:,} sessions, {self.accounts.open} of them open"
            )
        self.timeline.call(MINUTE_S, lambda: self._minute(announcing))


class _Churning:
    """Who comes and goes."""

    def __init__(
        self,
        world: SwarmWorld,
        announcing: Announcing,
        lifecycle: Lifecycle,
        settling: Settling,
        rng: Generator,
    ) -> None:
        self._world = world
        self._announcing = announcing
        self._lifecycle = lifecycle
        self._settling = settling
        self._rng = rng

    def populate(self) -> None:
        """Those that are there from the beginning; how long each has been is of no matter to exponential stays."""
        members = self._settling.settle(self._world.cast.volunteers)
        self._announcing.living = len(members)
        self._announcing.settled(
            self._world.settings.churn.arrivals_per_s(len(members)) if self._world.cast.recruit else 0.0
        )
        for member in members:
            self._world.members[member.peer_id] = member
            self._announcing.begin(member)
            self._stay(member)

    def next_arrival(self) -> None:
        """Newcomers come at random, as many as go."""
        world, recruit = self._world, self._world.cast.recruit
        per_s = world.settings.churn.arrivals_per_s(world.settings.peers)
        if recruit is None or per_s == 0:
            return
        wait_s = float(self._rng.exponential(1 / per_s))
        if world.timeline.now_s + wait_s >= world.settings.duration_s:
            return

        def come() -> None:
            self._join(recruit())
            self.next_arrival()

        world.timeline.call(wait_s, come)

    def _join(self, volunteer: Volunteer) -> None:
        world, now_s = self._world, self._world.timeline.now_s
        member = Member(volunteer, world.cast.model)
        world.members[member.peer_id] = member
        world.accounts.joined += 1
        self._announcing.living += 1
        span, ready_s = self._settling.newcomer_span(member, world.bulletin, now_s)
        ordered = () if span is None else member.book.preload(span, now_s)
        parts = ordered if isinstance(ordered, tuple) else ()
        member.held_since_s = math.inf if parts else now_s
        for part in parts:
            member.loads[part] = now_s + ready_s
            world.timeline.call(ready_s, lambda part=part: self._ready(member, part))  # type: ignore[misc]
        self._announcing.join(member)
        self._stay(member)

    def _ready(self, member: Member, part: Span) -> None:
        if member.alive:
            member.arrived(part)
            member.held_since_s = self._world.timeline.now_s
            self._announcing.changed(member)

    def _stay(self, member: Member) -> None:
        if member.volunteer.stay_s < float("inf"):
            self._world.timeline.call(member.volunteer.stay_s, lambda: self._go(member))

    def _go(self, member: Member) -> None:
        told = not member.volunteer.crashes
        member.alive = False
        self._announcing.living -= 1
        accounts = self._world.accounts
        if told:
            accounts.left += 1
        else:
            accounts.crashed += 1
        self._announcing.gone(member, told=told)
        self._lifecycle.peer_gone(member, told=told)
