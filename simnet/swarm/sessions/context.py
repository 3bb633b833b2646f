"""The context of simulated sessions: the swarm as those that drive them see it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from molink.routing import Route
from molink.shards.spec import ModelSpec
from molink.simnet.core.guessing import SimulatedSpeculation
from molink.simnet.core.timeline import Timeline
from molink.simnet.swarm.members.accounts import Accounts
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.population.places import Places
from molink.simnet.swarm.sessions.generation import DIALS_RTT, SimulatedGeneration, Stepping
from molink.simnet.swarm.sessions.relaying import Relaying
from molink.simnet.swarm.sessions.step_cost import SimulatedHop, link_ms


@dataclass(frozen=True, slots=True, eq=False)
class SessionContext:
    """The context that the parts of a session's life share; each of its things has its own owner."""

    timeline: Timeline
    model: ModelSpec
    members: dict[str, Member]
    """All that have ever been there, by peer id."""
    places: Places
    accounts: Accounts
    changed: Callable[[Member], None]
    """Hears whose load is another now."""
    relaying: Relaying | None = None
    """What relays carry; None: everybody can be dialled."""
    speculation: SimulatedSpeculation | None = None
    """None: nothing is guessed."""
    running: dict[int, SimulatedGeneration] = field(default_factory=dict)
    """Sessions that have not ended, by number."""
    successors: dict[int, Stepping] = field(default_factory=dict)
    """Of some of them those that are computed anew elsewhere, by number."""
    links: set[frozenset[str]] = field(default_factory=set)
    """Pairs of peers that have dialled each other."""

    @property
    def now_s(self) -> float:
        return self.timeline.now_s

    def stepping(self, number: int) -> Stepping:
        """What steps under that number."""
        return self.successors.get(number) or self.running[number]

    def renumber(self, one: SimulatedGeneration, number: int) -> None:
        """The session is what was its successor from now on, and has its number."""
        del self.successors[number]
        self.running[number] = self.running.pop(one.number)
        one.record.successor = number

    def members_of(self, one: SimulatedGeneration) -> list[Member]:
        """The peers of its circuit, in order."""
        return [self.members[hop.peer_id] for hop in one.hops]

    def dialled_s(self, hops: Sequence[SimulatedHop], at: int) -> float:
        """Seconds until that hop has links to the next one and the previous one: nothing where they stand."""
        own = hops[at].peer_id
        others = (hops[(at + 1) % len(hops)].peer_id, hops[at - 1].peer_id)
        lacking = [one for one in others if one != own and frozenset((own, one)) not in self.links]
        return DIALS_RTT * max((self.places.rtt_ms(own, one) for one in lacking), default=0.0) / 1000

    def link(self, hops: Sequence[SimulatedHop]) -> None:
        """The hops of a circuit have dialled their neighbours."""
        following = (*hops[1:], hops[0])
        self.links.update(
            frozenset((hop.peer_id, after.peer_id)) for hop, after in zip(hops, following, strict=True)
        )

    def hops_of(self, route: Route) -> tuple[SimulatedHop, ...]:
        """The route's hops with the true ways between them."""
        count = len(route.hops)
        following = (*route.hops[1:], route.hops[0])
        return tuple(
            SimulatedHop(
                hop.peer_id,
                hop.span,
                link_ms(self.places.rtt_ms(hop.peer_id, after.peer_id)) if count > 1 else 0.0,
                self.members[hop.peer_id].volunteer.uplink_mbps,
                self.relaying.offer(hop.peer_id, after.peer_id) if self.relaying and count > 1 else None,
            )
            for hop, after in zip(route.hops, following, strict=True)
        )
