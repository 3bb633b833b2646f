"""Span options: which spans a machine may take from a given layer on, the greedy fill and a few stops beside it.

The greedy fill (decentralized-scheduling paper, section 4.3) runs as many consecutive layers as a machine has
memory, KV memory and willingness for. Where layers are resident two further stops are offered: the end of the
resident run, so that a warm machine need not load cold layers just because it has room, and the layers where
resident runs of other machines begin, so that overlapping warm spans can join.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from molink.routing.arrays import BoolArray, FloatArray, IntArray
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
        self.machines, self.layers = problem.machines, problem.layers
        load, load_embed, load_head = problem.cold_load_ms()
        self._cost = _prefix(problem.layer_ms + problem.load_weight * load)
        self._embed_cost = _given(problem.embed_ms, self.machines) + problem.load_weight * load_embed
        self._head_cost = _given(problem.head_ms, self.machines) + problem.load_weight * load_head
        self._penalty = _given(problem.hop_penalty_ms, self.machines)
        self._cold = _prefix(problem.cold_bytes())
        self._cold_embed, self._cold_head = problem.cold_embed_bytes(), problem.cold_head_bytes()
        self._cold_ends = problem.cold_ends_bytes()
        self._free = problem.free_bytes
        self._kv = np.concatenate(([0], np.cumsum(_given(problem.kv_bytes, self.layers).astype(np.int64))))
        self._free_kv = problem.free_kv_bytes
        self._willing_stop = None if problem.allowed is None else _run_stops(problem.allowed)
        self._resident_stop = None if problem.resident is None else _run_stops(problem.resident)
        self.joins = _joins(problem.resident)
        self._options: dict[int, LayerOptions] = {}

    def options_at(self, layer: int) -> LayerOptions:
        """The spans that can start at the layer; at layer 0 with the embedding's memory and time."""
        if layer not in self._options:
            self._options[layer] = self._compute(layer)
        return self._options[layer]

    def greedy_stops(self, layer: int) -> IntArray:
        """[machines]: where the greedy fill from the layer ends; `layer` itself where a machine cannot serve
        it."""
        budget = self._free - (self._cold_embed if layer == 0 else 0)
        taken = self._cold[:, layer:] - self._cold[:, layer, None]
        stops = layer - 1 + np.count_nonzero(taken <= budget[:, None], axis=1)
        if self._free_kv is not None:
            stops = np.minimum(
                stops, np.searchsorted(self._kv, self._kv[layer] + self._free_kv, side="right") - 1
            )
        if self._willing_stop is not None:
            stops = np.minimum(stops, self._willing_stop[:, layer])
        cold_head = self._cold_ends - self._cold_embed if layer == 0 else self._cold_head
        no_room_for_head = (stops == self.layers) & (taken[:, -1] + cold_head > budget)
        return np.maximum(np.where(no_room_for_head, self.layers - 1, stops), layer)

    def every_greedy_stop(self) -> IntArray:
        """[layers, machines]: `greedy_stops` of every layer."""
        layers, width = self.layers, self.layers + 1
        layer = np.arange(layers)[:, None]
        whole = self._cold[:, -1]
        before = self._cold[:, :layers].T
        budget = np.broadcast_to(self._free, before.shape).copy()
        budget[0] -= self._cold_embed
        # Bytes before a layer never decrease, so that all machines', far enough apart, are one ascending array.
        apart = np.arange(self.machines) * (int(whole.max(initial=0)) + 2)
        reach = np.clip(before + np.minimum(budget, whole), -1, whole) + apart
        stops = np.searchsorted((self._cold + apart[:, None]).ravel(), reach, side="right")
        stops -= np.arange(self.machines) * width + 1
        if self._free_kv is not None:
            lease = np.searchsorted(self._kv, self._kv[:layers, None] + self._free_kv, side="right") - 1
            stops = np.minimum(stops, lease)
        if self._willing_stop is not None:
            stops = np.minimum(stops, self._willing_stop.T)
        head = np.broadcast_to(self._cold_head, before.shape).copy()
        head[0] = self._cold_ends - self._cold_embed
        no_room_for_head = (stops == layers) & (whole - before + head > budget)
        every: IntArray = np.maximum(np.where(no_room_for_head, layers - 1, stops), layer)
        return every

    def resident_stops(self) -> IntArray:
        """[machines, layers]: where the resident run that starts at a layer ends; the layer itself if it is
        cold."""
        if self._resident_stop is None:
            return np.broadcast_to(np.arange(self.layers), (self.machines, self.layers))
        return self._resident_stop

    def wasted_layers(self, machine: IntArray, stop: IntArray) -> FloatArray:
        """[layers, columns]: memory that a span from each layer to `stop` leaves unused, in average layers, at
        most one."""
        average = max(1.0, float(self._cold[:, -1].max(initial=0)) / self.layers)
        taken = self._cold[machine, stop] - self._cold[machine, : self.layers].T
        waste: FloatArray = np.minimum((self._free[machine] - taken) / average, 1.0)
        return waste

    def _compute(self, layer: int) -> LayerOptions:
        greedy = self.greedy_stops(layer)
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


def _run_stops(table: BoolArray) -> IntArray:
    """[machines, layers]: where the run of True that starts at each layer ends; the layer itself if it is
    False."""
    machines, layers = table.shape
    stops = np.empty((machines, layers), dtype=np.int64)
    following = np.full(machines, layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        stops[:, layer] = np.where(table[:, layer], following, layer)
        following = stops[:, layer]
    return stops


def _joins(resident: BoolArray | None) -> tuple[int, ...]:
    if resident is None or resident.shape[1] < 2:
        return ()
    begins = np.count_nonzero(resident[:, 1:] & ~resident[:, :-1], axis=0)
    commonest = np.argsort(-begins, kind="stable")[:MOST_JOINS]
    return tuple(sorted(int(index) + 1 for index in commonest if begins[index]))


def _prefix(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums of the columns before each one, [machines, layers + 1]."""
    sums = np.zeros((table.shape[0], table.shape[1] + 1), dtype=table.dtype)
    np.cumsum(table, axis=1, out=sums[:, 1:])
    return sums


def _given(values: npt.NDArray[Any] | None, length: int) -> npt.NDArray[Any]:
    return np.zeros(length) if values is None else values
