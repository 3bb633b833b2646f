"""The context of simulated sessions: the swarm as those that drive them see it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from molink.routing import Route
from molink.shards.spec import ModelSpec
from molink.simnet.core.timeline import Timeline
from molink.simnet.swarm.members.accounts import Accounts
from molink.simnet.swarm.members.member import Member
from molink.simnet.swarm.population.places import Places
from molink.simnet.swarm.sessions.generation import SimulatedGeneration
from molink.simnet.swarm.sessions.relaying import Relaying
from molink.simnet.swarm.sessions.step_cost import COST, SimulatedHop, link_ms


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
    running: dict[int, SimulatedGeneration] = field(default_factory=dict)
    """Sessions that have not ended, by number."""

    @property
    def now_s(self) -> float:
        return self.timeline.now_s

    def members_of(self, one: SimulatedGeneration) -> list[Member]:
        """The peers of its circuit, in order."""
        return [self.members[hop.peer_id] for hop in one.hops]

    def hops_of(self, route: Route) -> tuple[SimulatedHop, ...]:
        """The route's hops with the true ways between them."""
        count = len(route.hops)
        following = (*route.hops[1:], route.hops[0])
        return tuple(
            SimulatedHop(
                hop.peer_id,
                hop.span,
                link_ms(self.places.rtt_ms(hop.peer_id, after.peer_id)) if count > 1 else 0.0,
                self._sent_at_mbps(hop.peer_id, after.peer_id)
                if count > 1
                else self._uplink_mbps(hop.peer_id),
            )
            for hop, after in zip(route.hops, following, strict=True)
        )

    def _uplink_mbps(self, peer_id: str) -> float | None:
        return self.members[peer_id].volunteer.uplink_mbps

    def _sent_at_mbps(self, sender: str, receiver: str) -> float | None:
        """What the link carries: the sender's uplink, or its share of a relay if that is less."""
        uplink_mbps = self._uplink_mbps(sender)
        share_mbps = None if self.relaying is None else self.relaying.share_mbps(sender, receiver)
        if share_mbps is None:
            return uplink_mbps
        return min(share_mbps, uplink_mbps or COST.unknown_bandwidth_mbps)
