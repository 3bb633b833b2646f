"""The swarm as a client sees it, JSON-ready: for the gateway, and for whoever asks."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from molink.client.api.running_sessions import RunningSessions
from molink.dht.records.description import describe_swarm
from molink.dht.records.records import PeerView
from molink.routing import NoCircuit, choose_partners
from molink.routing.cost.terms import Demand
from molink.routing.routes.planner import plan
from molink.routing.routes.shortlist import narrowed
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec

PROBED_TOKENS: Final = 64
"""Length of the session for which a circuit is looked for."""
PLANNED_EVERY_S: Final = 1.0
"""At most so often a circuit is looked for because somebody asks how the swarm is."""
PLANNED_FOR_S: Final = 10.0
"""What was found holds for so long in a swarm of the same peers with the same layers."""


@dataclass(frozen=True, slots=True)
class PlannedCircuit:
    """Planned circuit: what a generation would get now."""

    hops: tuple[Mapping[str, Any], ...] = ()
    predicted_tpot_ms: float | None = None
    reason: str = ""
    """Why there is none; empty: there is one."""


class SwarmOverview:
    """Overview of a swarm for one model, which plans seldom however often it is asked."""

    def __init__(
        self, spec: ModelSpec, views: Callable[[], Sequence[PeerView]], sessions: RunningSessions
    ) -> None:
        """`views` has the verified view of the swarm."""
        self._spec = spec
        self._views = views
        self._sessions = sessions
        self._planning = asyncio.Lock()
        self._planned = PlannedCircuit()
        self._planned_of: frozenset[tuple[object, ...]] | None = None
        """What of the swarm that was planned for."""
        self._planned_s = 0.0

    async def describe(self) -> dict[str, Any]:
        """Describes peers without their addresses, links, circuits in use, and what a generation would get now."""
        views = self._views()
        planned = await self._newest_planned(views)
        described = describe_swarm(views)
        return described | {
            "ready": not planned.reason,
            "reason": planned.reason,
            "model": self._spec.name,
            "circuits": self._sessions.describe(),
            "planned": {"hops": list(planned.hops), "predicted_tpot_ms": planned.predicted_tpot_ms}
            if planned.hops
            else None,
            "links": [
                {"from": view.peer_id, "to": link.peer_id, "rtt_ms": link.rtt_ms}
                for view in views
                for link in view.facts.links
            ],
            "peers": [self._public(peer) for peer in described["peers"]],
        }

    def _public(self, peer: Mapping[str, Any]) -> dict[str, Any]:
        """What whoever asks may know of a peer: where it is dialled is for members of the swarm."""
        known = {name: value for name, value in peer.items() if name != "addresses"}
        return known | {"tokens_served": self._sessions.tokens_served[peer["peer_id"]]}

    async def _newest_planned(self, views: Sequence[PeerView]) -> PlannedCircuit:
        clock = asyncio.get_running_loop().time
        async with self._planning:
            swarm = frozenset(map(_relevant, views))
            age_s = clock() - self._planned_s
            is_same = swarm == self._planned_of
            if self._planned_of is None or age_s > (PLANNED_FOR_S if is_same else PLANNED_EVERY_S):
                self._planned = await asyncio.to_thread(planned_circuit, views, self._spec)
                self._planned_of, self._planned_s = swarm, clock()
            return self._planned


def planned_circuit(views: Sequence[PeerView], spec: ModelSpec) -> PlannedCircuit:
    """Plans the circuit that a generation would get now, with who would keep copies of its hops."""
    served = tuple(view for view in views if view.facts.model.model_hash == spec.model_hash)
    demand = Demand.of(PROBED_TOKENS)
    try:
        snapshot = narrowed(Snapshot(served, spec), demand)
        route = plan(snapshot, PROBED_TOKENS)
        partners = choose_partners(snapshot, route, demand)
    except NoCircuit as error:
        return PlannedCircuit(reason=str(error))
    hops = tuple(
        {
            "peer_id": hop.peer_id,
            "start": hop.span.start,
            "stop": hop.span.stop,
            "warm": not hop.cold_spans,
            "partner": partner.peer_id,
            "copy_form": None if partner.cost is None else partner.cost.form.name.lower(),
            "no_partner": partner.reason,
            "predicted_compute_ms": round(hop.compute_ms, 3),
            "predicted_link_ms": round(hop.link_ms, 3),
        }
        for hop, partner in zip(route.hops, partners, strict=True)
    )
    return PlannedCircuit(hops, route.tpot_ms)


def _relevant(view: PeerView) -> tuple[object, ...]:
    """What of a peer a newly planned circuit could depend on soon: not its load, which changes all the time."""
    state = view.state
    return view.peer_id, view.facts.model.model_hash, state.spans, state.draining, view.answers
