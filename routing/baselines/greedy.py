"""The greedy heuristic shortest path (decentralized-scheduling paper, section 4.3, Algorithm 2): one search for
each start, the shortest way of greedily filled machines to the last layer, and back.

Each hop ends at a later layer, so layers are taken in order in place of a priority queue, and many starts
together in one array. Where the printed algorithm slips, and what is right:

- It keeps one distance for each vertex (layer, machine), though what a label can still do depends on the
  machines that it has used, and the cheaper label may have used those that the way on needs. Several labels
  of a vertex are kept that differ in the set of machines used, and of equal sets the cheapest. Their number is
  the only thing for which this search can miss the best greedy circuit.
- The main loop reads the edges of `current_v`, not of `last_v`, the vertex just taken from the queue.
- After the fill loop the vertex is filed as (current_l, i) with i the start's index; it is (current_l,
  current_m), the machine that was filled.
- A label that ends at layer K is queued again, and would go on to layer 1 of another machine.

Labels that provably cannot beat the best circuit known are dropped, which changes no result.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import SpanOptions, remaining_ms, servable_layers
from molink.routing.search.augmented import circuit_of, plan_augmented
from molink.routing.search.labels import machine_keys

_SEVERAL_LABELS = 8
"""Labels of a vertex in a small swarm."""

_SMALL_SWARM = 64
"""Machines up to which vertices have several labels; beyond, one: time is better spent on more starts."""

_BLOCK_LABELS = 2**21
"""Labels of the starts that are searched together: some 60 MB."""

_ELEMENTS = 2**18
"""Labels times machines extended in one go: the working arrays stay within processor caches."""

_LINKS_PER_S = 5e7
"""Extensions of a label by a machine that count as one second of a time limit; with 1,000 machines a core does
some 5 to 7 * 10**7 in a second."""


def plan_greedy(problem: CircuitProblem, time_limit_s: float | None = None) -> Circuit:
    """The circuit of lowest TPOT (weighted loading included) that the greedy search finds.

    A time limit is kept by counting work at a fixed rate, not by a clock, so that equal problems give equal
    circuits; a slow computer takes longer. The most promising starts are searched first; those for which no
    time is left are left out. If no start gets through all layers, the augmented search answers; it raises NoCircuit if
    there is no circuit.
    """
    remaining = remaining_ms(problem)
    if np.isfinite(remaining[0]) and servable_layers(problem).any(axis=0).all():
        search = _Search(problem, remaining)
        starts = _promising_starts(problem, search.latency_ms)
        most = max(1, _BLOCK_LABELS // (problem.layers * problem.machines * search.labels))
        for first in range(0, len(starts), most):
            if time_limit_s is not None and search.links > time_limit_s * _LINKS_PER_S:
                break
            search.run(starts[first : first + most])
        if search.hops:
            return circuit_of(problem, search.hops)
    return plan_augmented(problem)


def _promising_starts(problem: CircuitProblem, latency_ms: FloatArray) -> IntArray:
    """Machines that can start a circuit, the fast and well connected first."""
    near = np.sort(latency_ms + latency_ms.T, axis=1)[:, : 1 + problem.machines // 10]
    promise = problem.layer_ms.sum(axis=1) + near.sum(axis=1)
    order = np.argsort(promise, kind="stable")
    starts: IntArray = order[servable_layers(problem)[order, 0]]
    return starts


def _least_ways(latency_ms: FloatArray) -> FloatArray:
    """[machines, machines]: no way from one to the other, over whatever others, takes less (Floyd-Warshall)."""
    least = np.array(latency_ms)
    np.fill_diagonal(least, 0.0)
    for machine in range(len(least)):
        np.minimum(least, least[:, machine, None] + least[machine], out=least)
    # Sums are rounded in another order in the search; no bound may pass the true cost for that.
    return least * (1 - 1e-12)


@dataclass(slots=True, eq=False)
class _Block:
    """The labels of some starts, in arrays [layers, starts, machines, labels of a vertex]."""

    starts: IntArray
    cost: FloatArray
    key: npt.NDArray[np.uint64]
    """Equal for equal sets of used machines."""
    parent_layer: npt.NDArray[np.int32]
    """Where the label that this one extends ends; 0: this is a first hop."""
    parent_slot: npt.NDArray[np.int32]
    """That label's place: machine * labels + label."""

    @classmethod
    def of(cls, starts: IntArray, layers: int, machines: int, labels: int) -> "_Block":
        shape = (layers, len(starts), machines, labels)
        parent_layer, parent_slot = np.zeros((2, *shape), dtype=np.int32)
        return cls(starts, np.full(shape, np.inf), np.zeros(shape, np.uint64), parent_layer, parent_slot)

    def part(self, rows: slice) -> "_Block":
        """The labels of some of the starts, as views."""
        return _Block(
            self.starts[rows],
            self.cost[:, rows],
            self.key[:, rows],
            self.parent_layer[:, rows],
            self.parent_slot[:, rows],
        )

    def insert(
        self,
        stop: int,
        machine: IntArray,
        cost: FloatArray,
        key: npt.NDArray[np.uint64],
        layer: int,
        slot: IntArray,
    ) -> None:
        """File labels [starts, machines], one of each start at each of the machines: in place of the label with
        equal used machines, or else of the costliest, if they are cheaper."""
        costs = self.cost[stop][:, machine]
        equal = (self.key[stop][:, machine] == key[:, :, None]) & np.isfinite(costs)
        label = np.where(equal.any(axis=2), equal.argmax(axis=2), costs.argmax(axis=2))
        cheaper = cost < np.take_along_axis(costs, label[:, :, None], axis=2)[:, :, 0]
        row, column = np.nonzero(cheaper)
        at = (stop, row, machine[column], label[cheaper])
        self.cost[at], self.key[at] = cost[cheaper], key[cheaper]
        self.parent_layer[at], self.parent_slot[at] = layer, slot[cheaper]


class _Search:
    def __init__(self, problem: CircuitProblem, remaining: FloatArray) -> None:
        self.problem, self.span_options = problem, SpanOptions(problem)
        self.labels = _SEVERAL_LABELS if problem.machines <= _SMALL_SWARM else 1
        self.latency_ms = problem.dense_latency_ms
        self.remaining_ms, self.back_ms = remaining, _least_ways(self.latency_ms)
        self.keys = machine_keys(problem.machines)
        self.cost, self.hops = float("inf"), tuple[Hop, ...]()
        self.links = 0

    def run(self, starts: IntArray) -> None:
        """Search from some starts."""
        problem = self.problem
        block = _Block.of(starts, problem.layers, problem.machines, self.labels)
        self._begin(block)
        for layer in range(1, problem.layers):
            slots, costs = self._active(block, layer)
            rows = max(1, _ELEMENTS // max(1, slots.shape[1] * problem.machines))
            for first in range(0, len(starts) if slots.size else 0, rows):
                some = slice(first, first + rows)
                self._extend(block.part(some), layer, slots[some], costs[some])

    def _begin(self, block: _Block) -> None:
        options = self.span_options.options_at(0)
        for machine, stop, cost in zip(options.machine, options.stop, options.cost, strict=True):
            if stop == self.problem.layers:
                if cost < self.cost and machine in block.starts:
                    self.cost, self.hops = float(cost), (Hop(int(machine), 0, int(stop)),)
            else:
                row = np.flatnonzero(block.starts == machine)
                block.cost[stop, row, machine, 0] = cost
                block.key[stop, row, machine, 0] = self.keys[machine]

    def _active(self, block: _Block, layer: int) -> tuple[IntArray, FloatArray]:
        """[starts, places] twice: slots of the labels that end here and may still win, and their cost, with
        infinity where a start has fewer."""
        cost = block.cost[layer].reshape(len(block.starts), -1)
        row, slot = np.nonzero(np.isfinite(cost))
        lowest = cost[row, slot] + self.remaining_ms[layer]
        lowest += self.back_ms[slot // self.labels, block.starts[row]]
        kept = lowest < self.cost
        row, slot = row[kept], slot[kept]
        counts = np.bincount(row, minlength=len(block.starts))
        place = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        slots = np.zeros((len(block.starts), int(counts.max())), dtype=np.int64)
        costs = np.full(slots.shape, np.inf)
        slots[row, place], costs[row, place] = slot, cost[row, slot]
        return slots, costs

    def _extend(self, block: _Block, layer: int, slots: IntArray, costs: FloatArray) -> None:
        """Put every option at the layer after every label; each start keeps its best arrivals at each
        machine."""
        options, problem = self.span_options.options_at(layer), self.problem
        if not options.machine.size:
            return
        machines, column = np.unique(options.machine, return_inverse=True)
        self.links += slots.size * len(machines)
        arrival = self.latency_ms[:, machines][slots // self.labels]
        arrival += costs[:, :, None]
        self._bar_used(block, layer, slots, machines, arrival)
        keys = np.take_along_axis(block.key[layer].reshape(len(slots), -1), slots, axis=1)
        closes = options.stop == problem.layers
        for turn in range(min(self.labels, slots.shape[1])):
            place = arrival.argmin(axis=1)
            cost = np.take_along_axis(arrival, place[:, None, :], axis=1)[:, 0]
            if turn == 0 and closes.any():
                self._close(block, layer, slots, place[:, column[closes]], cost[:, column[closes]])
            slot = np.take_along_axis(slots, place, axis=1)
            key = np.take_along_axis(keys, place, axis=1) ^ self.keys[machines]
            for stop in np.unique(options.stop[~closes]).tolist():
                here = np.flatnonzero(options.stop == stop)
                at = column[here]
                total = cost[:, at] + options.cost[here]
                block.insert(stop, options.machine[here], total, key[:, at], layer, slot[:, at])
            np.put_along_axis(arrival, place[:, None, :], np.inf, axis=1)

    def _bar_used(
        self, block: _Block, layer: int, slots: IntArray, machines: IntArray, arrival: FloatArray
    ) -> None:
        """Make `arrival` [starts, places, machines] infinite where a label has used the machine."""
        column = np.full(self.problem.machines, -1)
        column[machines] = np.arange(len(machines))
        row, place = np.indices(slots.shape).reshape(2, -1)
        slot, at = slots.ravel(), np.full(slots.size, layer)
        while len(row):
            used = column[slot // self.labels]
            offered = used >= 0
            arrival[row[offered], place[offered], used[offered]] = np.inf
            vertex = (at, row, slot // self.labels, slot % self.labels)
            at, slot = block.parent_layer[vertex], block.parent_slot[vertex]
            more = at > 0
            row, place, slot, at = row[more], place[more], slot[more], at[more]

    def _close(self, block: _Block, layer: int, slots: IntArray, place: IntArray, cost: FloatArray) -> None:
        """Take the best circuit whose last hop is one of the layer's options that end the model, if it beats
        what is known; `place` and `cost` are of the best arrivals there, [starts, such options]."""
        options = self.span_options.options_at(layer)
        last = np.flatnonzero(options.stop == self.problem.layers)
        machine = options.machine[last]
        total = cost + options.cost[last] + self.latency_ms[machine[None, :], block.starts[:, None]]
        row, column = divmod(int(np.argmin(total)), len(last))
        if not total[row, column] < self.cost:
            return
        self.cost = float(total[row, column])
        hops = [Hop(int(machine[column]), layer, self.problem.layers)]
        slot = int(slots[row, place[row, column]])
        while hops[0].start > 0:
            stop, (node, label) = hops[0].start, divmod(slot, self.labels)
            start = int(block.parent_layer[stop, row, node, label])
            slot = int(block.parent_slot[stop, row, node, label])
            hops.insert(0, Hop(node, start, stop))
        self.hops = tuple(hops)
