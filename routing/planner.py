"""From a snapshot to a route: the circuit in terms of peers, with what each hop is predicted to take."""

from dataclasses import dataclass

from molink.routing.circuit import Circuit, NoCircuit
from molink.routing.cost import CostModel
from molink.routing.plan import plan_circuit
from molink.routing.problem import CircuitProblem
from molink.routing.snapshot import Snapshot
from molink.shards.spec import Span, missing_spans


@dataclass(frozen=True, slots=True)
class RouteHop:
    """A span on a peer, and the predicted milliseconds of one decode step there."""

    peer_id: str
    span: Span
    cold_spans: tuple[Span, ...]
    """Layers of the span that the peer must load first; with layer 0 the embedding, with the last layer the
    head."""
    compute_ms: float
    """All layers of the span, with the embedding on the first hop and the head on the last."""
    link_ms: float
    """To the next hop, from the last one back to the first; 0 if the circuit has one hop."""


@dataclass(frozen=True, slots=True)
class Route:
    """A circuit over peers: hops in order."""

    hops: tuple[RouteHop, ...]
    tpot_ms: float
    """The sum of all hops' compute_ms and link_ms."""
    load_s: float
    """Seconds until the slowest peer has loaded what is cold, all loading side by side; 0 if all is warm."""

    @property
    def peer_ids(self) -> tuple[str, ...]:
        return tuple(hop.peer_id for hop in self.hops)

    @property
    def warm(self) -> bool:
        """Whether the route can serve at once."""
        return not any(hop.cold_spans for hop in self.hops)


def plan(
    snapshot: Snapshot,
    tokens: int,
    *,
    avoid: frozenset[str] = frozenset(),
    cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
) -> Route:
    """The route for a session of at most `tokens` tokens, prompt and generation together.

    Loading counts with its time divided by `cost.load_amortisation_tokens`: a cold layer is taken only where
    the gain in TPOT pays for it within so many tokens, or where there is no warm circuit. Equal snapshots
    give equal routes, in whatever order their peers are listed. Raises NoCircuit with the missing layers and
    the memory that would do, and ValueError if `tokens` is below 1.
    """
    problem, peer_ids = snapshot.problem(tokens, avoid=avoid, cost=cost)
    try:
        circuit = plan_circuit(problem)
    except NoCircuit as error:
        detail = f"{error.detail} ({_in_view(snapshot, avoid, len(peer_ids))})"
        raise NoCircuit(detail, error.missing_layers, error.missing_bytes) from None
    return _route(problem, circuit, peer_ids, snapshot)


def _route(problem: CircuitProblem, circuit: Circuit, peer_ids: tuple[str, ...], snapshot: Snapshot) -> Route:
    held = {view.peer_id: view.state.spans for view in snapshot.usable()}
    hops = []
    following = circuit.hops[1:] + circuit.hops[:1]
    for hop, after in zip(circuit.hops, following, strict=True):
        peer_id = peer_ids[hop.machine]
        compute_ms = float(problem.layer_ms[hop.machine, hop.start : hop.stop].sum())
        if hop.start == 0 and problem.embed_ms is not None:
            compute_ms += float(problem.embed_ms[hop.machine])
        if hop.stop == problem.layers and problem.head_ms is not None:
            compute_ms += float(problem.head_ms[hop.machine])
        link_ms = float(problem.latency_ms[hop.machine, after.machine]) if len(circuit.hops) > 1 else 0.0
        hops.append(RouteHop(peer_id, hop.span, missing_spans(hop.span, held[peer_id]), compute_ms, link_ms))
    return Route(tuple(hops), circuit.tpot_ms, circuit.load_ms / 1000.0)


def _in_view(snapshot: Snapshot, avoid: frozenset[str], usable: int) -> str:
    views = [view for view in snapshot.peers if view.facts.model.model_hash == snapshot.model.model_hash]
    avoided = sum(view.peer_id in avoid for view in views)
    draining = sum(view.state.draining and view.peer_id not in avoid for view in views)
    counts = f"{usable} of {len(views)} peers of this model are usable"
    reasons = [f"{draining} draining"] if draining else []
    reasons += [f"{avoided} avoided"] if avoided else []
    return f"{counts}: {', '.join(reasons)}" if reasons else counts
