"""A swarm in virtual time: its members, its gateways, and what comes to them. The owner of everything in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from numpy.random import Generator, default_rng

from molink.dht.membership.neighbours import link_counts
from molink.peer.memory.lease_gate import DRAIN_S
from molink.shards.spec import ModelSpec
from molink.simnet.core.request_load import Request, arrivals
from molink.simnet.core.timeline import Timeline
from molink.simnet.core.traces import TraceRequest
from molink.simnet.swarm.members.accounts import MINUTE_S, Accounts
from molink.simnet.swarm.members.announcing import AnnouncementDriver
from molink.simnet.swarm.members.bulletin import Bulletin, Notice
from molink.simnet.swarm.members.initial_placement import InitialPlacement
from molink.simnet.swarm.members.member import Member, NotConserved
from molink.simnet.swarm.members.moving import MoveSchedule
from molink.simnet.swarm.members.placing import MoveCounts, VirtualPlacementDriver
from molink.simnet.swarm.members.traffic import ControlTraffic
from molink.simnet.swarm.population.places import Places
from molink.simnet.swarm.population.reach import SwarmReach
from molink.simnet.swarm.population.volunteers import Volunteer
from molink.simnet.swarm.sessions.context import SessionContext
from molink.simnet.swarm.sessions.gateway import SimulatedGateway
from molink.simnet.swarm.sessions.lifecycle import Lifecycle
from molink.simnet.swarm.sessions.relaying import Relaying
from molink.simnet.swarm.settings import SwarmSettings

LOOK_EVERY_S = 1.0
"""A peer that leaves looks so often whether it is still needed."""


@dataclass(frozen=True, slots=True, eq=False)
class WorldSetup:
    """The setup of a world: its model, its first volunteers, its gateways and its requests."""

    model: ModelSpec
    places: Places
    volunteers: Sequence[Volunteer]
    """Those that are there when it begins."""
    gateway_ids: tuple[str, ...]
    trace: Sequence[TraceRequest]
    recruit: Callable[[], Volunteer] | None = None
    """Draws newcomers; None: nobody comes."""
    reach: SwarmReach | None = None
    """Who relays for whom; None: everybody can be dialled."""


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

    setup: WorldSetup
    settings: SwarmSettings
    report: Callable[[str], None] = lambda _: None
    timeline: Timeline = field(default_factory=Timeline)
    bulletin: Bulletin = field(default_factory=Bulletin)
    traffic: ControlTraffic = field(default_factory=ControlTraffic)
    accounts: Accounts = field(default_factory=Accounts)
    members: dict[str, Member] = field(default_factory=dict)
    minutes: list[Minute] = field(default_factory=list)
    gateways: tuple[SimulatedGateway, ...] = ()
    moves: MoveCounts = field(default_factory=MoveCounts)
    relaying: Relaying | None = None
    """What relays carry; None: everybody can be dialled."""

    def run(self) -> None:
        """Until the last session has ended. Raises NotConserved if anything in it was lost or came twice."""
        seeds = default_rng(self.settings.seed).spawn(4)
        announcing = AnnouncementDriver(self.timeline, self.bulletin, self.traffic, seeds[0])
        reach = self.setup.reach
        if reach is not None:
            self.relaying = Relaying(reach, self.setup.model)
        context = SessionContext(
            self.timeline,
            self.setup.model,
            self.members,
            self.setup.places,
            self.accounts,
            announcing.changed,
            self.relaying,
            self.settings.speculation,
        )
        lifecycle = Lifecycle(context, seeds[1], partners=self.settings.partners)
        placement = (
            InitialPlacement(self.setup.model)
            if reach is None
            else InitialPlacement(self.setup.model, reach.offers)
        )
        placing = VirtualPlacementDriver(
            self.timeline, self.setup.model, self.bulletin, self.moves, placement, announcing.changed
        )
        churning = _Churn(self, announcing, lifecycle, placement, placing, seeds[2])
        self.report(f"{len(self.setup.volunteers):,} volunteers choose their layers")
        churning.populate()
        MoveSchedule(self.timeline, self.members, self.bulletin, placing, seeds[3]).begin()
        self.gateways = tuple(self._gateway(gateway_id) for gateway_id in self.setup.gateway_ids)
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
            book, copies = member.book, len(member.copies) + len(member.book.copies)
            if member.alive and (member.decoding or member.prefilling or copies or book.leases):
                raise NotConserved(
                    f"{member.peer_id} has {len(book.leases)} leases, {len(member.decoding)} sessions "
                    f"and {copies} copies when all have ended"
                )

    def _gateway(self, gateway_id: str) -> SimulatedGateway:
        def pull(since_s: float) -> dict[str, Notice]:
            copied = self.bulletin.copy()
            newer = sum(notice.at_s > since_s for notice in copied.values())
            self.traffic.pulled(len(copied), newer, len(copied), self.timeline.now_s)
            return copied

        places = self.setup.places
        return SimulatedGateway(
            gateway_id,
            self.setup.model,
            pull,
            lambda peer_id: places.rtt_ms(gateway_id, peer_id),
            guesses=self.settings.speculation is not None,
        )

    def _requests(self) -> list[Request]:
        settings, found = self.settings, []
        first = settings.seed % len(self.setup.trace)
        for request in arrivals(self.setup.trace, settings.rate_rps, settings.duration_s, first):
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

    def _minute(self, announcing: AnnouncementDriver) -> None:
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
            done, hours = now_s / self.settings.duration_s, f"{self.settings.duration_s / 3600:g} h"
            passed = f"{100 * done:.0f} % of {hours}" if done < 1 else f"{hours} are over"
            self.report(
                f"{passed}: {announcing.living:,} peers, {self.accounts.arrived:,} sessions, "
                f"{self.accounts.open} of them open"
            )
        self.timeline.call(MINUTE_S, lambda: self._minute(announcing))


class _Churn:
    """Churn: draws who joins and who leaves, and when."""

    def __init__(
        self,
        world: SwarmWorld,
        announcing: AnnouncementDriver,
        lifecycle: Lifecycle,
        placement: InitialPlacement,
        placing: VirtualPlacementDriver,
        rng: Generator,
    ) -> None:
        self._world = world
        self._announcing = announcing
        self._lifecycle = lifecycle
        self._placement = placement
        self._placing = placing
        self._rng = rng

    def populate(self) -> None:
        """Those that are there from the beginning; how long each has been is of no matter to exponential stays."""
        members = self._placement.place_all(self._world.setup.volunteers)
        self._announcing.living = len(members)
        self._announcing.settled(
            self._world.settings.churn.arrivals_per_s(len(members)) if self._world.setup.recruit else 0.0,
            link_counts((member.volunteer.facts for member in members), "").copies,
        )
        for member in members:
            self._world.members[member.peer_id] = member
            self._announcing.begin(member)
            self._stay(member)

    def next_arrival(self) -> None:
        """Newcomers come at random, as many as go."""
        world, recruit = self._world, self._world.setup.recruit
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
        world = self._world
        member = Member(volunteer, world.setup.model)
        world.members[member.peer_id] = member
        world.accounts.joined += 1
        self._announcing.living += 1
        self._announcing.join(member)
        self._placing.join(member)
        self._stay(member)

    def _stay(self, member: Member) -> None:
        if member.volunteer.stay_s < float("inf"):
            self._world.timeline.call(member.volunteer.stay_s, lambda: self._go(member))

    def _go(self, member: Member) -> None:
        """It crashes; or it says that it leaves, and goes when its sessions are elsewhere or have had the time."""
        if member.volunteer.crashes:
            self._gone(member)
            return
        member.book.gate.drain()
        self._announcing.changed(member)
        self._lifecycle.peer_leaves(member, DRAIN_S)
        self._go_empty(member, self._world.timeline.now_s + DRAIN_S)

    def _go_empty(self, member: Member, deadline_s: float) -> None:
        timeline = self._world.timeline
        member.book.expire(timeline.now_s)
        if member.book.leases and timeline.now_s < deadline_s:
            timeline.call(LOOK_EVERY_S, lambda: self._go_empty(member, deadline_s))
        else:
            self._gone(member)

    def _gone(self, member: Member) -> None:
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
        if self._world.setup.reach is not None:
            self._stay_elsewhere(self._world.setup.reach, member.peer_id)

    def _stay_elsewhere(self, reach: SwarmReach, lost: str) -> None:
        """Those that stayed at a relay that is gone."""
        for peer_id in reach.gone(lost):
            other = self._world.members[peer_id]
            volunteer = reach.moved(other.volunteer, lost) if other.alive else None
            if volunteer is not None:
                other.volunteer = volunteer
                self._announcing.facts_changed(other)
