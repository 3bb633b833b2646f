"""Route planner: from a snapshot to the peers of a circuit and their layers."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from molink.routing.arrays import IntArray
from molink.routing.cost.cost import CostModel
from molink.routing.cost.terms import Demand
from molink.routing.plan import plan_circuit
from molink.routing.problem.circuit import Circuit, NoCircuit
from molink.routing.problem.problem import CircuitProblem, objective_ms
from molink.routing.problem.span_options import servable_layers
from molink.routing.routes.guessed_trips import TripShares
from molink.routing.routes.route import Route, RouteHop, route_of
from molink.routing.snapshot import PosedProblem, Snapshot

__all__ = ["Criteria", "Route", "RouteHop", "plan", "search_route"]

MOST_PASSES = 3
"""Searches where heads differ in what their guesses bring."""
ALIKE = 0.1
"""Trips whose lengths differ by no more than that are as good for telling what a head saves."""
MOST_ATTEMPTS = 8
"""Layers that are tried for a peer that is insisted on, a search for each."""


@dataclass(frozen=True, slots=True)
class Criteria:
    """Criteria of a plan: by what a circuit is chosen, and how hard it is searched for."""

    avoid: frozenset[str] = frozenset()
    """Peers that it must not have."""
    require: frozenset[str] = frozenset()
    """Peers that it must have."""
    cost: CostModel = field(default_factory=CostModel)
    algorithm: str = "augmented"
    """One of ALGORITHMS."""
    time_limit_s: float | None = None
    """For one search; None: the algorithm's own."""
    activation_codec: str = ""
    """That the session asks for; empty: none. The first token is predicted with it."""
    guesses: bool = False
    """Whether tokens may be guessed: then a circuit costs what its head's guesses leave of it."""

    def __post_init__(self) -> None:
        if self.avoid & self.require:
            raise ValueError(
                f"{', '.join(sorted(self.avoid & self.require))}: both to be avoided and required"
            )


def plan(
    snapshot: Snapshot,
    tokens: int,
    *,
    prompt_tokens: int | None = None,
    criteria: Criteria = Criteria(),
) -> Route:
    """The route for a session of at most `tokens` tokens, of which `prompt_tokens` are the prompt (None: half).

    The circuit whose terms (see `Term`) are least in sum, as far as the algorithm of `plan_circuit` finds it,
    without the peers to avoid and with all that are required. Loading counts with its time divided by
    `criteria.cost.load_amortisation_tokens`: a cold layer is taken only where the gain pays for it within so many
    tokens, or where there is no warm circuit. Equal snapshots give equal routes, in whatever order their peers
    are listed, unless the algorithm stops at a time limit.

    Raises:
        NoCircuit: with the missing layers and the memory that would do; or a required peer cannot take part.
        ValueError: a length is impossible, or a peer is both to be avoided and required.
    """
    posed = snapshot.pose(Demand.of(tokens, prompt_tokens), avoid=criteria.avoid, cost=criteria.cost)
    return search_route(posed, snapshot, criteria)


def search_route(posed: PosedProblem, snapshot: Snapshot, criteria: Criteria) -> Route:
    """As `plan`, for a problem that the snapshot has posed."""
    try:
        if criteria.guesses:
            return _search_with_guesses(posed, snapshot, criteria)
        circuit = _find(posed, criteria)
    except NoCircuit as error:
        detail = f"{error.detail} ({_in_view(snapshot, criteria.avoid, len(posed.views))})"
        raise NoCircuit(detail, error.missing_layers, error.missing_bytes) from None
    return route_of(posed, circuit.hops, snapshot, criteria.cost, criteria.activation_codec)


def _search_with_guesses(posed: PosedProblem, snapshot: Snapshot, criteria: Criteria) -> Route:
    """The search adds up what hops cost, and a head that guesses divides it. So it is told what each head would save
    of a trip as long as the one found before; where no head saves more than another, the first search is enough.
    Raises NoCircuit."""
    shares = TripShares.of(posed.views, snapshot, criteria.cost)
    best: Route | None = None
    trip_ms = 0.0
    for _ in range(MOST_PASSES if shares.differ else 1):
        shared = replace(posed, problem=shares.per_token(posed, trip_ms))
        route = route_of(
            posed,
            _find(shared, criteria).hops,
            snapshot,
            criteria.cost,
            criteria.activation_codec,
            guesses=True,
        )
        if best is None or route.objective_ms < best.objective_ms:
            best = route
        if abs(route.trip_ms - trip_ms) <= ALIKE * trip_ms:
            break
        trip_ms = route.trip_ms
    assert best is not None  # noqa: S101 (there is a first search)
    return best


def _find(posed: PosedProblem, criteria: Criteria) -> Circuit:
    """The best circuit that is found with every required peer.

    A peer is made indispensable by leaving it alone with a layer: no other may serve that one. Of several such
    layers the one with the best circuit is kept, peer after peer. Raises NoCircuit.
    """
    problem, owners = posed.problem, dict[int, int]()
    machines = {peer_id: machine for machine, peer_id in enumerate(posed.peer_ids)}
    if gone := sorted(criteria.require - machines.keys()):
        raise NoCircuit(f"a required peer is not usable: {', '.join(gone)}")
    best = plan_circuit(problem, criteria.algorithm, time_limit_s=criteria.time_limit_s)
    servable = servable_layers(problem)
    while lacking := criteria.require - {posed.peer_ids[hop.machine] for hop in best.hops}:
        peer_id = min(lacking)
        machine = machines[peer_id]
        layers = np.setdiff1d(np.flatnonzero(servable[machine]), list(owners))
        found = list(_attempts(problem, owners, machine, _spread(layers), criteria))
        if not found:
            raise NoCircuit(f"none was found that goes through {peer_id}, which is required")
        best, layer = min(found, key=lambda one: objective_ms(problem, one[0].hops))
        owners[layer] = machine
    return best


def _attempts(
    problem: CircuitProblem, owners: dict[int, int], machine: int, layers: list[int], criteria: Criteria
) -> Iterator[tuple[Circuit, int]]:
    """Circuits in which the machine has one of the layers, each with that layer."""
    for layer in layers:
        restricted = _reserved(problem, {**owners, layer: machine})
        try:
            yield plan_circuit(restricted, criteria.algorithm, time_limit_s=criteria.time_limit_s), layer
        except NoCircuit:
            continue


def _spread(layers: IntArray) -> list[int]:
    """At most MOST_ATTEMPTS of the layers, evenly spread, from the middle of each part."""
    places = (np.arange(MOST_ATTEMPTS) * 2 + 1) * len(layers) // (2 * MOST_ATTEMPTS)
    return [int(layer) for layer in np.unique(layers[places])] if len(layers) else []


def _reserved(problem: CircuitProblem, owners: dict[int, int]) -> CircuitProblem:
    """The same problem, with each of these layers served by one machine only."""
    shape = (problem.machines, problem.layers)
    allowed = np.ones(shape, dtype=np.bool_) if problem.allowed is None else np.array(problem.allowed)
    for layer, machine in owners.items():
        allowed[np.arange(problem.machines) != machine, layer] = False
    return replace(problem, allowed=allowed)


def _in_view(snapshot: Snapshot, avoid: frozenset[str], usable: int) -> str:
    views = [view for view in snapshot.peers if view.facts.model.model_hash == snapshot.model.model_hash]
    avoided = sum(view.peer_id in avoid for view in views)
    draining = sum(view.state.draining and view.peer_id not in avoid for view in views)
    verb = "is" if usable == 1 else "are"
    counts = f"{usable} of {len(views)} {'peer' if len(views) == 1 else 'peers'} of this model {verb} usable"
    reasons = [f"{draining} draining"] if draining else []
    reasons += [f"{avoided} avoided"] if avoided else []
    return f"{counts}: {', '.join(reasons)}" if reasons else counts
