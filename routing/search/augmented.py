"""The edge-augmented greedy search for the shortest cycle (decentralized-scheduling paper, sections 4.3 and
4.3.1).

One pass follows the partial circuits of all starts together. The paper's augmented edges, T(i, j) + T(j, s) -
T(i, s), telescope: a partial circuit is ranked by its cost plus the way back to its start, and at the last layer
that is the circuit's own length. Where this differs from the printed algorithm:

- The paper's penalty is written with T(s, j), the way out; the way that is left is j to s, which matters when
  latencies are asymmetric.
- The paper keeps one distance for each (layer, machine). Two partial circuits that meet there may have
  different starts, hence different ways back, and may have used different machines, hence different ways on;
  the cheaper one does not replace the other. Only among equal (machines used, last, start, layer) the cheapest
  stays.
- The printed loop reads the edges of `current_v`, not of the vertex just popped, and files the filled vertex
  under the start's index i. Here a label goes where its fill ends, on the machine that does it.
- Partial circuits are taken in order of their number of hops, not of their cost: all of a level in one step. As
  those of a level are at different layers, the rank has a part for the layers that are left, too, and the way
  back counts less than wholly before the end (`Beam`).
- A partial circuit is dropped only for a proven reason (a bound on what is left says it cannot beat what is
  known), or because the beam is full.

In a swarm of more than some hundred machines, the search runs on a pool of them (`pool`). If nothing is found,
it runs again on all with links and computation left out: each hop costs what its machine is still needed for
elsewhere and the memory that it leaves unused, so that scarce machines are saved and layers packed tightly. Only
then is NoCircuit raised.
"""

import numpy as np

from molink.routing.arrays import BoolArray, IntArray
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.greedy_fill import GreedyFill
from molink.routing.problem.problem import CircuitProblem, load_ms, tpot_ms
from molink.routing.problem.shortfall import shortfall
from molink.routing.problem.span_options import servable_layers
from molink.routing.problem.spans import SpanCosts, SpanTable, span_table
from molink.routing.search.bounds import LowerBounds, bounds_of
from molink.routing.search.pool import pool
from molink.routing.search.search import Beam, Graph, Outcome, search

_QUICK = Beam(width=32)
_WIDTH = 640
_ELEMENTS = 2**17
"""Labels times machines of a level: in large swarms the beam is narrower."""
_POOL = 256
"""Machines that the search looks at."""
_RESCUE_ELEMENTS, _PROVEN_ELEMENTS = 2**16, 2**11
"""Labels times machines of a level when any circuit will do: some 3,000 labels for 21 machines. Fewer where it
is proven that there is none, and the question is only how far the machines get."""


def plan_augmented(problem: CircuitProblem) -> Circuit:
    """A circuit of low TPOT (weighted loading and penalties included); raises NoCircuit if there is none."""
    return circuit_of(problem, find_augmented(problem, pool(problem, _POOL)))


def plan_below(problem: CircuitProblem, below_ms: float) -> Circuit | None:
    """As `plan_augmented`, if the objective of what it finds is below so much; None otherwise. What is not is dropped
    early, so that the search is short where there is no such circuit."""
    machines = pool(problem, _POOL)
    hops = _found(problem, machines, below_ms)
    return circuit_of(problem, hops) if hops else None


def circuit_of(problem: CircuitProblem, hops: tuple[Hop, ...]) -> Circuit:
    """The hops with what they take."""
    return Circuit(hops, tpot_ms(problem, hops), load_ms(problem, hops))


def find_augmented(problem: CircuitProblem, machines: IntArray) -> tuple[Hop, ...]:
    """The search on some of the machines, and if that finds nothing on all; raises NoCircuit."""
    return _found(problem, machines) or _rescue(problem)


def _found(problem: CircuitProblem, machines: IntArray, below_ms: float = float("inf")) -> tuple[Hop, ...]:
    chosen = problem if len(machines) == problem.machines else problem.subset(machines)
    graph = graph_of(chosen, SpanCosts(chosen))
    found = search_graph(graph, below_ms=below_ms) if graph.bounds.feasible else Outcome()
    return tuple(Hop(int(machines[hop.machine]), hop.start, hop.stop) for hop in found.hops)


def graph_of(problem: CircuitProblem, costs: SpanCosts) -> Graph:
    """The problem as the search sees it."""
    latency_ms = problem.dense_latency_ms
    bounds = bounds_of(problem, costs, latency_ms)
    return Graph(problem.layers, span_table(problem, costs), latency_ms, bounds)


def search_graph(
    graph: Graph, *, width: int = _WIDTH, gather: int = 0, below_ms: float = float("inf")
) -> Outcome:
    """The cheapest circuit of cost below `below_ms`. A quick search first: what it finds lets the other drop most of
    what it would look at, or is proven to be the best, and then there is no other."""
    quick = search(graph, _QUICK, below_ms)
    if quick.complete and not gather:
        return quick
    width = max(64, min(width, _ELEMENTS // max(1, len(graph.spans.machine))))
    best = search(graph, Beam(width, gather=gather), below=quick.cost)
    if not best.hops:
        best.hops, best.cost = quick.hops, quick.cost
    return best


def _rescue(problem: CircuitProblem) -> tuple[Hop, ...]:
    """Any circuit at all, sparing what is scarce; raises NoCircuit with how far machines get otherwise."""
    servable = servable_layers(problem)
    able = np.flatnonzero(servable.any(axis=1))
    if not able.size:
        raise shortfall(problem, 0)
    chosen, servable = _without_links(problem, able), servable[able]
    costs = SpanCosts(chosen)
    spans = span_table(chosen, costs)
    price = _scarcity(chosen, spans, servable)
    layers, machines = chosen.layers, chosen.machines
    left = np.arange(layers, -1, -1, dtype=np.float64)[None]
    nothing = np.zeros(machines)
    graph = Graph(
        layers,
        price,
        np.zeros((machines, machines)),
        LowerBounds(left, nothing, nothing, left[0], nothing),
        linked=False,
    )
    possible = servable.any(axis=0).all() and bounds_of(chosen, costs, graph.latency_ms).feasible
    elements = _RESCUE_ELEMENTS if possible else _PROVEN_ELEMENTS
    found = search(graph, Beam(max(8, elements // len(spans.machine)), rest_weight=1.0, back_weight=0.0))
    if not found.hops:
        raise shortfall(problem, found.reached)
    return tuple(Hop(int(able[hop.machine]), hop.start, hop.stop) for hop in found.hops)


def _without_links(problem: CircuitProblem, machines: IntArray) -> CircuitProblem:
    if len(machines) == problem.machines and problem.latency_ms is not None:
        return problem
    return problem.subset(machines, linked=False)


def _scarcity(problem: CircuitProblem, spans: SpanTable, servable: BoolArray) -> SpanTable:
    """The spans at the price of the layers that their machine could have served elsewhere."""
    share = servable / np.maximum(1, np.count_nonzero(servable, axis=0))
    needed_later = np.zeros((problem.layers + 1, problem.machines))
    needed_later[:-1] = np.cumsum(share[:, ::-1], axis=1)[:, ::-1].T
    price = needed_later[spans.stop, spans.machine]
    price += GreedyFill(problem).wasted_layers(spans.machine, spans.stop)
    price[~np.isfinite(spans.cost)] = np.inf
    return SpanTable(spans.machine, spans.stop, price)
