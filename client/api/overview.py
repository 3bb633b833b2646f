"""The swarm as a client sees it, JSON-ready: for the gateway, and for whoever asks."""

from collections.abc import Sequence

from molink.dht.records.description import describe_swarm
from molink.dht.records.records import PeerView
from molink.routing import NoCircuit, choose_partners
from molink.routing.cost.terms import Demand
from molink.routing.routes.planner import plan
from molink.routing.routes.shortlist import narrowed
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec

PROBED_TOKENS = 64
"""Length of the session for which a circuit is looked for."""


def overview(views: Sequence[PeerView], spec: ModelSpec) -> dict[str, object]:
    """Peers, their spans and links, and the circuit that a generation would get now, with who would keep copies."""
    served = tuple(view for view in views if view.facts.model.model_hash == spec.model_hash)
    circuit: list[dict[str, object]] = []
    reason = ""
    tpot_ms: float | None = None
    try:
        snapshot = narrowed(Snapshot(served, spec), Demand.of(PROBED_TOKENS))
        route = plan(snapshot, PROBED_TOKENS)
        partners = choose_partners(snapshot, route, Demand.of(PROBED_TOKENS))
        circuit = [
            {
                "peer_id": hop.peer_id,
                "start": hop.span.start,
                "stop": hop.span.stop,
                "warm": not hop.cold_spans,
                "partner": partner.peer_id,
                "copy_form": None if partner.cost is None else partner.cost.form.name.lower(),
                "no_partner": partner.reason,
            }
            for hop, partner in zip(route.hops, partners, strict=True)
        ]
        tpot_ms = route.tpot_ms
    except NoCircuit as error:
        reason = str(error)
    links = [
        {"from": view.peer_id, "to": link.peer_id, "rtt_ms": link.rtt_ms}
        for view in views
        for link in view.facts.links
    ]
    return {
        "ready": not reason,
        "reason": reason,
        "model": spec.name,
        "circuits": [{"hops": circuit, "predicted_tpot_ms": tpot_ms}] if circuit else [],
        "links": links,
        **describe_swarm(views),
    }
