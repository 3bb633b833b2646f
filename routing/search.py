"""Label-setting over (layer, machine, start), one layer after the other, vectorised over labels and machines.

Each hop moves to a later layer, so taking the layers in order settles every label before it is extended, and
no priority queue is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.circuit import Hop
from molink.routing.fills import Options
from molink.routing.labels import Labels, SettledLabels, machine_keys, place_in_run

_ELEMENTS = 2**18
"""Labels times options extended in one go: the working arrays of a step stay within processor caches."""

Bound = Callable[[IntArray, IntArray, IntArray], FloatArray]
"""(stop, machine, start) of labels to a lower bound on all that each still has to pay."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """What a search runs on."""

    layers: int
    machines: int
    options: Callable[[int], Options]
    latency_ms: FloatArray
    """[machines, machines]"""
    completion_ms: Bound


@dataclass(frozen=True, slots=True)
class Limits:
    """How many labels a search keeps. What it drops beyond them is the only thing it can miss."""

    per_vertex: int
    """Labels of one (layer, machine, start) that differ in the set of machines used."""
    per_layer: int
    """Labels of one layer: the ones of lowest cost with the way back to their start."""
    starts: int
    """Labels of one hop that end at one layer, counted apart: without a link yet they would crowd out all
    others."""


@dataclass(slots=True)
class Outcome:
    """What a search found."""

    hops: tuple[Hop, ...] = ()
    """Empty: nothing."""
    cost: float = float("inf")
    reached: int = 0
    """The last layer boundary that any partial circuit reached."""
    complete: bool = True
    """Whether no label was dropped for the limits' sake, so that `hops` is the best there is, or there are
    none."""


def search(graph: Graph, limits: Limits, below: float = float("inf")) -> Outcome:
    """The cheapest circuit of cost below `below` that the options offer, within the limits."""
    run = _Run(graph, limits, below)
    run.begin()
    for layer in range(1, graph.layers):
        run.extend_layer(layer)
    return run.outcome


class _Run:
    def __init__(self, graph: Graph, limits: Limits, below: float) -> None:
        self.graph, self.limits = graph, limits
        self.outcome = Outcome(cost=below)
        self._starts = Labels.of(0)
        self._waiting: list[list[Labels]] = [[] for _ in range(graph.layers)]
        self._sizes = [0] * graph.layers
        self._worst = np.full(graph.layers + 1, np.inf)
        self._worst[graph.layers] = -np.inf  # Nothing waits at the end: what arrives there is a circuit.
        self._settled = SettledLabels(graph.machines)
        self._back_ms = np.ascontiguousarray(graph.latency_ms.T)
        self._keys = machine_keys(graph.machines)

    def begin(self) -> None:
        """Labels of one hop: every machine as the start."""
        options = self.graph.options(0)
        self._starts = starts = Labels.of(len(options.machine))
        starts.cost[:] = starts.rank[:] = options.cost
        starts.machine[:] = starts.start[:] = options.machine
        starts.used_key[:] = self._keys[options.machine]
        starts.stop[:] = options.stop
        whole = np.flatnonzero(options.stop == self.graph.layers)
        if whole.size:
            best = whole[np.argmin(options.cost[whole])]
            self._record(float(options.cost[best]), (Hop(int(options.machine[best]), 0, self.graph.layers),))

    def extend_layer(self, layer: int) -> None:
        """Settle the labels that end at the layer, and extend them by every option there."""
        labels = self._select(layer)
        if not len(labels):
            return
        self.outcome.reached = max(self.outcome.reached, layer)
        first = self._settled.add(labels)
        options = self.graph.options(layer)
        if not options.machine.size:
            return
        rows = max(1, _ELEMENTS // len(options.machine))
        for index in range(0, len(labels), rows):
            self._extend(labels.take(slice(index, index + rows)), first + index, options)

    def _extend(self, labels: Labels, first: int, options: Options) -> None:
        """Put every option after every label; `first` is the first label's settled index."""
        machine, start = options.machine, labels.start
        cost = self.graph.latency_ms[labels.machine[:, None], machine[None, :]]
        cost += options.cost
        cost += labels.cost[:, None]
        cost[self._settled.used(first, len(labels))[:, machine]] = np.inf
        rank = cost + self._back_ms[start[:, None], machine[None, :]]
        self._close(labels, first, rank, options)
        row, column = np.nonzero(rank < self._worst[options.stop])
        lowest = cost[row, column] + self.graph.completion_ms(
            options.stop[column], machine[column], start[row]
        )
        promising = np.flatnonzero(lowest < self.outcome.cost)
        promising = promising[np.argsort(options.stop[column[promising]], kind="stable")]
        row, column = row[promising], column[promising]
        extended = Labels.of(len(row))
        extended.cost[:], extended.rank[:] = cost[row, column], rank[row, column]
        extended.machine[:], extended.start[:] = machine[column], start[row]
        extended.used_key[:] = labels.used_key[row] ^ self._keys[machine[column]]
        extended.stop[:], extended.parent[:] = options.stop[column], row + first
        self._file(extended)

    def _close(self, labels: Labels, first: int, rank: FloatArray, options: Options) -> None:
        last = np.flatnonzero(options.stop == self.graph.layers)
        if not last.size:
            return
        closed = rank[:, last]
        row, column = divmod(int(np.argmin(closed)), len(last))
        if closed[row, column] < self.outcome.cost:
            tail = Hop(int(options.machine[last[column]]), int(labels.stop[row]), self.graph.layers)
            self._record(float(closed[row, column]), (*self._settled.hops(first + row), tail))

    def _record(self, cost: float, hops: tuple[Hop, ...]) -> None:
        if cost < self.outcome.cost:
            self.outcome.cost, self.outcome.hops, self.outcome.reached = cost, hops, self.graph.layers

    def _file(self, labels: Labels) -> None:
        """Let labels, in order of where they end, wait there."""
        if not len(labels):
            return
        ends = labels.stop
        edges = [0, *(np.flatnonzero(ends[1:] != ends[:-1]) + 1).tolist(), len(ends)]
        for begin, end in pairwise(edges):
            layer = int(ends[begin])
            self._waiting[layer].append(labels.take(slice(begin, end)))
            self._sizes[layer] += end - begin
            if self._sizes[layer] > 4 * self.limits.per_layer:
                self._thin(layer)

    def _thin(self, layer: int) -> None:
        """Bound what waits: twice what will be kept, so that duplicates rarely cost a place."""
        labels = Labels.join(self._waiting[layer])
        kept = labels.take(np.argsort(labels.rank, kind="stable")[: 2 * self.limits.per_layer])
        self._waiting[layer], self._sizes[layer] = [kept], len(kept)
        self._worst[layer] = kept.rank[-1]
        self.outcome.complete = False

    def _select(self, layer: int) -> Labels:
        """The labels that end at the layer and are worth extending; what waited is forgotten."""
        here = np.flatnonzero(self._starts.stop == layer)
        starts = self._cheapest(self._promising(self._starts.take(here)), self.limits.starts)
        if not self._waiting[layer]:
            return starts
        others = self._undominated(self._promising(Labels.join(self._waiting[layer])))
        self._waiting[layer] = []
        return Labels.join((starts, self._cheapest(others, self.limits.per_layer)))

    def _promising(self, labels: Labels) -> Labels:
        lowest = labels.cost + self.graph.completion_ms(labels.stop, labels.machine, labels.start)
        return labels.take(np.flatnonzero(lowest < self.outcome.cost))

    def _undominated(self, labels: Labels) -> Labels:
        """Of equal (machine, start, used machines) the cheapest, and of equal (machine, start) the few
        cheapest."""
        vertex = labels.machine * self.graph.machines + labels.start
        order = np.lexsort((labels.rank, labels.used_key, vertex))
        vertex, key = vertex[order], labels.used_key[order]
        distinct = np.ones(len(order), dtype=np.bool_)
        distinct[1:] = (vertex[1:] != vertex[:-1]) | (key[1:] != key[:-1])
        order, vertex = order[distinct], vertex[distinct]
        by_rank = np.lexsort((labels.rank[order], vertex))
        kept = by_rank[place_in_run(vertex[by_rank]) < self.limits.per_vertex]
        self.outcome.complete &= len(kept) == len(by_rank)
        return labels.take(order[kept])

    def _cheapest(self, labels: Labels, count: int) -> Labels:
        self.outcome.complete &= len(labels) <= count
        return labels.take(np.argsort(labels.rank, kind="stable")[:count])
