"""Beam search over partial circuits, one hop at a time: level k holds partial circuits of k hops, of all starts.

A level is extended by every span that the table offers in some fifteen array operations, whatever the number of
labels, and a circuit has few hops. A search by layers or with a priority queue takes many small steps instead.
"""

from dataclasses import dataclass, field

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.circuit import Hop
from molink.routing.problem.spans import SpanTable
from molink.routing.search.bounds import LowerBounds
from molink.routing.search.labels import Labels, hops_of, machine_keys, scrambled

_ELEMENTS = 2**18
"""Labels times columns extended in one go: the working arrays of a step stay within processor caches."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Search graph: what a search runs on."""

    layers: int
    spans: SpanTable
    latency_ms: FloatArray
    """[machines, machines]"""
    bounds: LowerBounds
    linked: bool = True
    """False: links cost nothing, so that of two labels with the same machines one is enough."""


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam of a search: how many labels it keeps, and how it ranks them. It can miss what it drops, nothing else."""

    width: int
    """Labels of one level."""
    rest_weight: float = 1.8
    """How often the lower bound of what is left counts in the rank. Above 1, for partial circuits at different
    layers compete and the bound takes machines that are used already; measured on the testbeds."""
    back_weight: float = 0.2
    """How much of the way back to the start counts in the rank: the weight of the paper's penalty. Below 1, for
    the machines still to come can lead home. At the last hop the whole way counts, as cost."""
    gather: int = 0
    """So many closed circuits beside the best are reported."""


@dataclass(slots=True)
class Outcome:
    """Outcome of a search."""

    hops: tuple[Hop, ...] = ()
    """Empty: nothing."""
    cost: float = float("inf")
    reached: int = 0
    """The last layer boundary that any partial circuit reached."""
    complete: bool = True
    """Whether no label was dropped for the beam's sake, so that `hops` is the best there is, or there are
    none."""
    others: list[tuple[float, tuple[Hop, ...]]] = field(default_factory=list)
    """Cost and hops of further circuits, in no order."""


def search(graph: Graph, beam: Beam, below: float = float("inf")) -> Outcome:
    """The cheapest circuit of cost below `below` that the spans offer, within the beam."""
    run = _Run(graph, beam, below)
    labels = run.begin()
    while len(labels):
        labels = run.extend(labels)
    return run.outcome


class _Run:
    def __init__(self, graph: Graph, beam: Beam, below: float) -> None:
        self.graph, self.beam = graph, beam
        self.outcome = Outcome(cost=below)
        self._back_ms = np.ascontiguousarray(graph.latency_ms.T)
        self._keys = machine_keys(len(graph.latency_ms))
        self._by_machine = graph.spans.by_machine

    def begin(self) -> Labels:
        """Labels of one hop: every machine as the start."""
        spans, layers = self.graph.spans, self.graph.layers
        column = np.flatnonzero(np.isfinite(spans.cost[0]))
        machine, stop, cost = spans.machine[column], spans.stop[0, column], spans.cost[0, column]
        used = np.zeros((len(column), len(self.graph.latency_ms)), dtype=np.bool_)
        used[np.arange(len(column)), machine] = True
        path = (machine * (layers + 1) + stop)[:, None]
        labels = Labels(cost, machine, machine, stop, used, self._keys[machine], path)
        whole = stop == layers
        alone = np.flatnonzero(whole & (cost < self.outcome.cost))
        if alone.size:
            best = int(alone[np.argmin(cost[alone])])
            self._record(float(cost[best]), path[best])
        if not len(column):
            return labels
        self.outcome.reached = max(self.outcome.reached, int(stop.max()))
        bounds = self.graph.bounds
        rest = bounds.rest(machine, stop)
        of_two = cost + bounds.alone_ms[stop] + bounds.pair_ms[machine]
        lowest = np.minimum(of_two, cost + rest + (bounds.leave_ms + bounds.enter_ms)[machine])
        pending = np.flatnonzero(~whole & (lowest < self.outcome.cost))
        rank = cost[pending] + self.beam.rest_weight * rest[pending]
        return labels.take(pending[self._best(rank)])

    def extend(self, labels: Labels) -> Labels:
        """Close what reaches the last layer; the best of the others, one hop longer."""
        rows = max(1, _ELEMENTS // max(1, len(self.graph.spans.machine)))
        found = [
            self._candidates(labels, slice(index, index + rows)) for index in range(0, len(labels), rows)
        ]
        row, column, cost, rank, stop = (np.concatenate(parts) for parts in zip(*found, strict=True))
        if not row.size:
            return labels.take(row)
        self.outcome.reached = max(self.outcome.reached, int(stop.max()))
        if len(row) > 4 * self.beam.width:
            kept = np.argpartition(rank, 4 * self.beam.width)[: 4 * self.beam.width]
            row, column, cost, rank, stop = row[kept], column[kept], cost[kept], rank[kept], stop[kept]
            self.outcome.complete = False
        machine = self.graph.spans.machine[column]
        key = labels.key[row] ^ self._keys[machine]
        order = np.argsort(rank, kind="stable")
        place = machine * len(self._keys) + labels.start[row] if self.graph.linked else 0
        vertex = place * (self.graph.layers + 1) + stop
        alike = scrambled(key) ^ scrambled(~vertex.astype(np.uint64))
        # Of equal (machines used, last, start, stop), the cheapest is the first in order of rank.
        order = order[np.sort(np.unique(alike[order], return_index=True)[1])]
        if len(order) > self.beam.width:
            order = order[: self.beam.width]
            self.outcome.complete = False
        row, machine, stop = row[order], machine[order], stop[order]
        used = labels.used[row]
        used[np.arange(len(row)), machine] = True
        path = np.concatenate((labels.path[row], (machine * (self.graph.layers + 1) + stop)[:, None]), axis=1)
        return Labels(cost[order], labels.start[row], machine, stop, used, key[order], path)

    def _candidates(
        self, labels: Labels, part: slice
    ) -> tuple[IntArray, IntArray, FloatArray, FloatArray, IntArray]:
        """Row, column, cost, rank and stop of the extensions that are open and not proven too dear."""
        chosen, spans = labels.take(part), self.graph.spans
        links, back, used = self.graph.latency_ms[chosen.machine], self._back_ms[chosen.start], chosen.used
        if not self._by_machine:
            links, back, used = links[:, spans.machine], back[:, spans.machine], used[:, spans.machine]
        cost = spans.cost[chosen.stop]
        cost += links
        cost += chosen.cost[:, None]
        cost[used] = np.inf
        stop = spans.stop[chosen.stop]
        closing = stop == self.graph.layers
        self._close(chosen, cost, back, closing)
        bounds = self.graph.bounds
        lowest = cost + bounds.rest(chosen.start[:, None], stop)
        lowest += bounds.leave_ms[spans.machine]
        lowest += bounds.enter_ms[chosen.start][:, None]
        lowest[closing] = np.inf
        row, column = np.nonzero(lowest < self.outcome.cost)
        stops, costs = stop[row, column], cost[row, column]
        rest = bounds.rest(chosen.start[row], stops)
        rank = costs + self.beam.back_weight * back[row, column] + self.beam.rest_weight * rest
        return row + (part.start or 0), column, costs, rank, stops

    def _close(self, labels: Labels, cost: FloatArray, back: FloatArray, closing: IntArray) -> None:
        row, column = np.nonzero(closing)
        if not row.size:
            return
        total = cost[row, column] + back[row, column]
        best = int(np.argmin(total))
        if self.beam.gather:
            kept = np.argsort(total, kind="stable")[: self.beam.gather]
            for index in kept[np.isfinite(total[kept])]:
                path = self._closed(labels, int(row[index]), int(column[index]))
                self.outcome.others.append((float(total[index]), hops_of(path, self.graph.layers)))
        if total[best] < self.outcome.cost:
            self._record(float(total[best]), self._closed(labels, int(row[best]), int(column[best])))

    def _closed(self, labels: Labels, row: int, column: int) -> IntArray:
        code = int(self.graph.spans.machine[column]) * (self.graph.layers + 1) + self.graph.layers
        return np.append(labels.path[row], code)

    def _record(self, cost: float, path: IntArray) -> None:
        self.outcome.cost, self.outcome.hops = cost, hops_of(path, self.graph.layers)
        self.outcome.reached = self.graph.layers

    def _best(self, rank: FloatArray) -> IntArray:
        """The places of the lowest ranks, as many as the beam is wide."""
        if len(rank) > self.beam.width:
            self.outcome.complete = False
        return np.argsort(rank, kind="stable")[: self.beam.width]
