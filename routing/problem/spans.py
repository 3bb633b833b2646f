"""The spans that a search may choose, as tables over layers: one row answers for every machine at once.

The same offers as `span_options.SpanOptions`, laid out for a search that extends partial circuits at different layers
in one step. Each column is a machine with one way of choosing where its span ends.
"""

from dataclasses import dataclass

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.greedy_fill import GreedyFill
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import SpanOptions

EVERY_SPAN = 144
"""Machines times layers up to which all spans are tried."""


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """[layers, columns]: where a span of the column's machine ends that starts at a layer, and its cost."""

    machine: IntArray
    """[columns]"""
    stop: IntArray
    """[layers, columns]: the layer itself where nothing is offered."""
    cost: FloatArray
    """[layers, columns]: milliseconds of the objective, without links; infinite where nothing is offered."""

    @property
    def by_machine(self) -> bool:
        """Whether column and machine are the same."""
        return len(self.machine) == 0 or (
            int(self.machine[-1]) == len(self.machine) - 1 and bool((np.diff(self.machine) == 1).all())
        )


def span_table(problem: CircuitProblem, costs: "SpanCosts") -> SpanTable:
    """Greedy fills, and where layers are resident the stops beside them: in a small swarm all of them,
    so that no circuit of the others is found or missed for where a newcomer's layers begin."""
    if costs.options is not None and problem.machines * problem.layers <= EVERY_SPAN:
        return every_span_table(problem, costs)
    if costs.options is None:
        machine = np.arange(problem.machines)
        stop = costs.greedy_stop[: problem.layers]
        return SpanTable(machine, stop, costs.of(machine, stop))
    return _joining_table(problem, costs, costs.options)


def every_span_table(problem: CircuitProblem, costs: "SpanCosts") -> SpanTable:
    """Every span that fits, for problems so small that all can be tried."""
    machines, layers = problem.machines, problem.layers
    machine = np.repeat(np.arange(machines), layers)
    length = np.tile(np.arange(1, layers + 1), machines)
    layer = np.arange(layers)[:, None]
    stop = np.minimum(layer + length, layers + 1)
    greedy = costs.greedy_stop[:layers, machine]
    stop = np.where(stop <= greedy, stop, layer)
    return SpanTable(machine, stop, costs.of(machine, stop))


class SpanCosts:
    """Costs and reach of spans, for every machine and layer."""

    def __init__(self, problem: CircuitProblem) -> None:
        machines, layers = problem.machines, problem.layers
        load, load_embed, load_head = problem.cold_load_ms()
        weight = problem.load_weight
        self.layer_ms = problem.layer_ms if weight == 0 else problem.layer_ms + weight * load
        """[machines, layers]: computation and weighted loading."""
        self.before = np.zeros((layers + 1, machines))
        """[layers + 1, machines]: the cost of all layers before each one."""
        np.cumsum(self.layer_ms.T, axis=0, out=self.before[1:])
        nothing = np.zeros(machines)
        penalty = nothing if problem.hop_penalty_ms is None else problem.hop_penalty_ms
        self.penalty: FloatArray = penalty
        self.embed = weight * load_embed + (nothing if problem.embed_ms is None else problem.embed_ms)
        self.head = weight * load_head + (nothing if problem.head_ms is None else problem.head_ms)
        self.options = None if problem.resident is None else SpanOptions(problem)
        """Where layers are resident."""
        self.greedy_stop = (
            _greedy_stops(problem) if self.options is None else self.options.fill.every_greedy_stop()
        )
        """[layers, machines]: `GreedyFill.every_greedy_stop`."""

    def of(self, machine: IntArray, stop: IntArray) -> FloatArray:
        """[layers, columns]: the cost of a column's span from each layer; infinite where the span is empty."""
        layers = len(stop)
        cost: FloatArray = self.before[stop, machine]
        cost -= self.before[:layers].take(machine, axis=1)
        np.maximum(cost, 0.0, out=cost)
        cost += self.penalty[machine]
        cost[0] += self.embed[machine]
        cost[stop == layers] += np.broadcast_to(self.head[machine], stop.shape)[stop == layers]
        cost[stop <= np.arange(layers)[:, None]] = np.inf
        return cost


def _greedy_stops(problem: CircuitProblem) -> IntArray:
    layers = problem.layers
    if problem.allowed is not None or not problem.machines:
        return GreedyFill(problem).every_greedy_stop()
    held = np.concatenate(([0], np.cumsum(problem.layer_bytes)))
    budget = np.broadcast_to(problem.free_bytes, (layers, problem.machines)).copy()
    head = np.broadcast_to(problem.cold_head_bytes(), budget.shape).copy()
    budget[0] -= problem.cold_embed_bytes()
    head[0] = problem.cold_ends_bytes() - problem.cold_embed_bytes()
    stop = np.searchsorted(held, held[:layers, None] + budget, side="right") - 1
    whole = (held[layers] - held[:layers, None]) + head > budget
    stop[whole & (stop == layers)] = layers - 1
    if problem.kv_bytes is not None and problem.free_kv_bytes is not None:
        kv = np.concatenate(([0], np.cumsum(problem.kv_bytes)))
        lease = np.searchsorted(kv, kv[:layers, None] + problem.free_kv_bytes, side="right") - 1
        stop = np.minimum(stop, lease)
    return np.maximum(stop, np.arange(layers)[:, None])


def _joining_table(problem: CircuitProblem, costs: SpanCosts, span_options: SpanOptions) -> SpanTable:
    """A column for each machine's greedy fill, one for the end of its resident run, one for each join."""
    layers, every = problem.layers, np.arange(problem.machines)
    layer = np.arange(layers)[:, None]
    greedy, warm = costs.greedy_stop, span_options.resident_stops().T
    stops = [greedy]
    for beside in (warm, *(np.full_like(greedy, join) for join in span_options.joins)):
        offered = (layer < beside) & (beside < greedy)
        if beside is not warm:
            offered &= beside != warm
        stops.append(np.where(offered, beside, layer))
    machine, stop = np.tile(every, len(stops)), np.concatenate(stops, axis=1)
    useful = np.array((stop > layer).any(axis=0))
    useful[: problem.machines] = True
    machine, stop = machine[useful], stop[:, useful]
    return SpanTable(machine, stop, costs.of(machine, stop))
