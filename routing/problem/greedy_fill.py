"""Greedy fill (decentralized-scheduling paper, section 4.3): as many consecutive layers as a machine has memory, KV
memory and willingness for."""

from typing import Any

import numpy as np
import numpy.typing as npt

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.problem.problem import CircuitProblem


class GreedyFill:
    """Greedy fill of a problem's machines."""

    def __init__(self, problem: CircuitProblem) -> None:
        self.machines, self.layers = problem.machines, problem.layers
        self._cold = prefix_sums(problem.cold_bytes())
        self._cold_embed, self._cold_head = problem.cold_embed_bytes(), problem.cold_head_bytes()
        self._cold_ends = problem.cold_ends_bytes()
        self._free = problem.free_bytes
        self._kv = np.concatenate(([0], np.cumsum(given(problem.kv_bytes, self.layers).astype(np.int64))))
        self._free_kv = problem.free_kv_bytes
        self._willing_stop = None if problem.allowed is None else run_stops(problem.allowed)

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

    def wasted_layers(self, machine: IntArray, stop: IntArray) -> FloatArray:
        """[layers, columns]: memory that a span from each layer to `stop` leaves unused, in average layers, at
        most one."""
        average = max(1.0, float(self._cold[:, -1].max(initial=0)) / self.layers)
        taken = self._cold[machine, stop] - self._cold[machine, : self.layers].T
        waste: FloatArray = np.minimum((self._free[machine] - taken) / average, 1.0)
        return waste


def run_stops(table: BoolArray) -> IntArray:
    """[machines, layers]: where the run of True that starts at each layer ends; the layer itself if it is
    False."""
    machines, layers = table.shape
    stops = np.empty((machines, layers), dtype=np.int64)
    following = np.full(machines, layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        stops[:, layer] = np.where(table[:, layer], following, layer)
        following = stops[:, layer]
    return stops


def prefix_sums(table: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Sums of the columns before each one, [machines, layers + 1]."""
    sums = np.zeros((table.shape[0], table.shape[1] + 1), dtype=table.dtype)
    np.cumsum(table, axis=1, out=sums[:, 1:])
    return sums


def given(values: npt.NDArray[Any] | None, length: int) -> npt.NDArray[Any]:
    """The values, or zeros where a problem has none."""
    return np.zeros(length) if values is None else values
