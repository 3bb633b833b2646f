"""The edge-augmented greedy search for the shortest cycle (decentralized-scheduling paper, sections 4.3 and
4.3.1).

One pass follows the partial circuits of all starts together. A partial circuit from start s at machine i is
ranked by its cost plus T(i, s), its way back: the sum of the paper's augmented edges, T(i, j) + T(j, s) -
T(i, s), telescopes to exactly that, and at the last layer it is the circuit's own length. Where this differs
from the printed algorithm:

- The paper's penalty is written with T(s, j), the way out; the way that is left is j to s, which matters when
  latencies are asymmetric.
- The paper keeps one distance for each (layer, machine). Two partial circuits that meet there may have
  different starts, hence different ways back, and may have used different machines, hence different ways on;
  the cheaper one does not replace the other. Labels are kept per (layer, machine, start), and there several
  that differ in the set of machines used; among equal sets the cheapest stays. `Limits` bounds them.
- The printed loop reads the edges of `current_v`, not of the vertex just popped, and files the filled vertex
  under the start's index i. Here a label goes where its fill ends, on the machine that does it.
- A partial circuit is dropped only for a proven reason (a bound on what is left says it cannot beat what is
  known), or for the limits.

If nothing is found within the limits, the search runs again with links and computation left out: each hop
costs what its machine is still needed for elsewhere and the memory that it leaves unused, so that scarce
machines are saved and layers packed tightly. Only then is NoCircuit raised.
"""

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.bounds import completion_bound
from molink.routing.circuit import Circuit, Hop
from molink.routing.fills import Fills, Options, remaining_ms, servable_layers
from molink.routing.problem import CircuitProblem, load_ms, tpot_ms
from molink.routing.search import Graph, Limits, Outcome, search
from molink.routing.shortfall import shortfall

_RESCUE_ELEMENTS = 2**16
"""Labels times machines of a layer when any circuit will do: some 3,000 labels for 21 machines."""


def plan_augmented(problem: CircuitProblem) -> Circuit:
    """A circuit of low TPOT (weighted loading included); raises NoCircuit if there is none."""
    hops = _find(problem)
    return Circuit(hops, tpot_ms(problem, hops), load_ms(problem, hops))


def _find(problem: CircuitProblem) -> tuple[Hop, ...]:
    fills = Fills(problem)
    remaining = remaining_ms(problem)
    if np.isfinite(remaining[0]) and servable_layers(problem).any(axis=0).all():
        bound = completion_bound(problem, fills, remaining)
        graph = Graph(problem.layers, problem.machines, fills.at, problem.latency_ms, bound)
        quick = search(graph, Limits(per_vertex=1, per_layer=16, starts=64))
        best = search(graph, _limits(problem.machines), below=quick.cost)
        hops = best.hops or quick.hops
        if hops:
            return hops
    rescue = _rescue(problem, fills)
    if rescue.hops:
        return rescue.hops
    raise shortfall(problem, rescue.reached)


def _limits(machines: int) -> Limits:
    labels = min(512, max(64, 2**18 // machines))
    return Limits(per_vertex=4, per_layer=labels, starts=max(labels, 2**20 // machines))


def _rescue(problem: CircuitProblem, fills: Fills) -> Outcome:
    """Any circuit at all, sparing what is scarce. Its `reached` says how far machines can get otherwise."""
    if not problem.machines:
        return Outcome()
    servable = servable_layers(problem)
    share = servable / np.maximum(1, np.count_nonzero(servable, axis=0))
    needed_later = np.zeros((problem.machines, problem.layers + 1))
    needed_later[:, :-1] = np.cumsum(share[:, ::-1], axis=1)[:, ::-1]
    nothing = np.zeros((problem.machines, problem.machines))

    def options(layer: int) -> Options:
        offered = fills.at(layer)
        price = needed_later[offered.machine, offered.stop] + fills.wasted_layers(layer, offered)
        return Options(offered.machine, offered.stop, price)

    def no_bound(stop: IntArray, _machine: IntArray, _start: IntArray) -> FloatArray:
        return np.zeros(len(stop))

    graph = Graph(problem.layers, problem.machines, options, nothing, no_bound)
    labels = max(32, _RESCUE_ELEMENTS // problem.machines)
    return search(graph, Limits(per_vertex=labels, per_layer=labels, starts=labels))
