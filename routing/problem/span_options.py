"""Span options: which spans a machine may take from a given layer on, the greedy fill and a few stops beside it.

Where layers are resident two further stops are offered: the end of the resident run, so that a warm machine need not
load cold layers just because it has room, and the layers where resident runs of other machines begin, so that
overlapping warm spans can join.
"""

from dataclasses import dataclass

import numpy as np

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.problem.greedy_fill import GreedyFill, given, prefix_sums, run_stops
from molink.routing.problem.problem import CircuitProblem

MOST_JOINS = 8
"""Layers where other machines' resident runs begin that are offered as stops: the ones where most runs begin.
In a placed swarm runs begin at few layers; each further stop costs as much search time as doubling the greedy
fill's share."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerOptions:
    """Span options at one layer, as parallel arrays [options]."""

    machine: IntArray
    stop: IntArray
    cost: FloatArray
    """Milliseconds: computation, embedding and head where they apply, weighted loading, and the hop's penalty."""


class SpanOptions:
    """Span options of a problem by starting layer, computed when first asked for and kept."""

    def __init__(self, problem: CircuitProblem) -> None:
        self.fill = GreedyFill(problem)
        self.machines, self.layers = problem.machines, problem.layers
        load, load_embed, load_head = problem.cold_load_ms()
        self._cost = prefix_sums(problem.layer_ms + problem.load_weight * load)
        self._embed_cost = given(problem.embed_ms, self.machines) + problem.load_weight * load_embed
        self._head_cost = given(problem.head_ms, self.machines) + problem.load_weight * load_head
        self._penalty = given(problem.hop_penalty_ms, self.machines)
        self._resident_stop = None if problem.resident is None else run_stops(problem.resident)
        self.joins = _joins(problem.resident)
        self._options: dict[int, LayerOptions] = {}

    def options_at(self, layer: int) -> LayerOptions:
        """The spans that can start at the layer; at layer 0 with the embedding's memory and time."""
        if layer not in self._options:
            self._options[layer] = self._compute(layer)
        return self._options[layer]

    def resident_stops(self) -> IntArray:
        """[machines, layers]: where the resident run that starts at a layer ends; the layer itself if it is
        cold."""
        if self._resident_stop is None:
            return np.broadcast_to(np.arange(self.layers), (self.machines, self.layers))
        return self._resident_stop

    def _compute(self, layer: int) -> LayerOptions:
        greedy = self.fill.greedy_stops(layer)
        machine = np.flatnonzero(greedy > layer)
        machines, stops = [machine], [greedy[machine]]
        if self._resident_stop is not None:
            warm = self._resident_stop[:, layer]
            for stop in (warm, *(np.full(self.machines, join) for join in self.joins if join > layer)):
                offered = (layer < stop) & (stop < greedy)
                if stop is not warm:
                    offered &= stop != warm
                machine = np.flatnonzero(offered)
                machines.append(machine)
                stops.append(stop[machine])
        chosen, stop = np.concatenate(machines), np.concatenate(stops)
        cost = self._cost[chosen, stop] - self._cost[chosen, layer] + self._penalty[chosen]
        if layer == 0:
            cost = cost + self._embed_cost[chosen]
        cost = cost + np.where(stop == self.layers, self._head_cost[chosen], 0.0)
        return LayerOptions(chosen, stop, np.maximum(cost, 0.0))


def remaining_ms(problem: CircuitProblem) -> FloatArray:
    """[layers + 1]: a lower bound on the computation of the layers from each one on; infinite where memory
    cannot do.

    The fastest machines, each at its fastest layer and for as many layers as it could hold at most, whatever
    their order. Infinity at layer 0 proves that there is no circuit.
    """
    count = most_layers(problem)
    unit = problem.layer_ms.min(axis=1) if problem.machines else np.zeros(0)
    order = np.argsort(unit, kind="stable")
    held = np.concatenate(([0], np.cumsum(count[order])))
    spent = np.concatenate(([0.0], np.cumsum(count[order] * unit[order])))
    wanted = problem.layers - np.arange(problem.layers + 1)
    bound = np.interp(wanted, held, spent, right=np.inf)
    # Rounding in the sums must never let the bound pass the true cost.
    bound = bound * (1 - 1e-12)
    if problem.head_ms is not None and problem.machines:
        bound[:-1] += problem.head_ms.min()
    return np.asarray(bound, dtype=np.float64)


def most_layers(problem: CircuitProblem) -> IntArray:
    """[machines]: an upper bound on the number of layers that a machine could have in a circuit."""
    servable = servable_layers(problem)
    most: IntArray = np.count_nonzero(servable, axis=1)
    warm = 0 if problem.resident is None else np.count_nonzero(servable & problem.resident, axis=1)
    smallest = int(problem.layer_bytes.min())
    if smallest > 0:
        most = np.minimum(most, warm + problem.free_bytes // smallest)
    if problem.kv_bytes is not None and problem.free_kv_bytes is not None and problem.kv_bytes.min() > 0:
        most = np.minimum(most, problem.free_kv_bytes // int(problem.kv_bytes.min()))
    return most


def servable_layers(problem: CircuitProblem) -> BoolArray:
    """[machines, layers]: layers that a machine could serve if it had to serve nothing else."""
    needed = np.array(problem.cold_bytes())
    if problem.layers == 1:
        needed[:, 0] += problem.cold_ends_bytes()
    else:
        needed[:, 0] += problem.cold_embed_bytes()
        needed[:, -1] += problem.cold_head_bytes()
    servable: BoolArray = needed <= problem.free_bytes[:, None]
    if problem.kv_bytes is not None and problem.free_kv_bytes is not None:
        servable &= problem.kv_bytes[None, :] <= problem.free_kv_bytes[:, None]
    return servable if problem.allowed is None else servable & problem.allowed


def _joins(resident: BoolArray | None) -> tuple[int, ...]:
    if resident is None or resident.shape[1] < 2:
        return ()
    begins = np.count_nonzero(resident[:, 1:] & ~resident[:, :-1], axis=0)
    commonest = np.argsort(-begins, kind="stable")[:MOST_JOINS]
    return tuple(sorted(int(index) + 1 for index in commonest if begins[index]))
