"""Layer split for given orders of machines: estimated for many at once, and exact by dynamic programming.

For a fixed order the best split is a dynamic programme over layer boundaries: the cheapest way to have the first
k machines do the layers before a boundary. A machine's span may begin anywhere from the layer where its fill
just reaches the boundary, so each step is a minimum over a window, answered from minima over powers of two.
"""

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.circuit import Hop
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import most_layers
from molink.routing.problem.spans import SpanCosts


class Splitter:
    """Orders are rows of machines [orders, hops], all different in a row, the first one starting the model."""

    def __init__(self, problem: CircuitProblem, costs: SpanCosts, latency_ms: FloatArray) -> None:
        self.layers, self.costs, self.latency_ms = problem.layers, costs, latency_ms
        self._most = most_layers(problem)
        self._unit = costs.layer_ms.min(axis=1)
        self._low = self._first_layers(costs.greedy_stop)
        self._lengths = np.maximum(1, np.arange(problem.layers + 2)).astype(np.float64)
        self._power = np.log2(self._lengths).astype(np.int64)

    def links_ms(self, orders: IntArray) -> FloatArray:
        """[orders]: all links of each, back to its first machine included."""
        if orders.shape[1] == 1:
            return np.zeros(len(orders))
        total: FloatArray = self.latency_ms[orders, np.roll(orders, -1, axis=1)].sum(axis=1)
        return total

    def estimate_ms(self, orders: IntArray) -> FloatArray:
        """[orders]: what each would cost if every machine were at its fastest on any layer and could hold as
        many as it ever could; never more than the truth. Infinite where even so they are too few."""
        costs, hops = self.costs, orders.shape[1]
        unit, most = self._unit[orders], self._most[orders]
        by_speed = np.argsort(unit, axis=1)
        unit, most = np.take_along_axis(unit, by_speed, axis=1), np.take_along_axis(most, by_speed, axis=1)
        left = self.layers - hops
        held = np.minimum(np.cumsum(most - 1, axis=1), left)
        total: FloatArray = (np.diff(held, axis=1, prepend=0) * unit).sum(axis=1) + unit.sum(axis=1)
        total += self.links_ms(orders) + costs.penalty[orders].sum(axis=1)
        total += costs.embed[orders[:, 0]] + costs.head[orders[:, -1]]
        total[held[:, -1] < left] = np.inf
        return total

    def nearness_ms(self, apart_ms: FloatArray) -> FloatArray:
        """[machines]: what a layer costs there with the share of links of so many milliseconds there and back."""
        shares = (apart_ms + 2 * self.costs.penalty) / (2 * np.maximum(1, self._most))
        worth: FloatArray = np.where(self._most > 0, self._unit + shares, np.inf)
        return worth

    def exact_ms(self, orders: IntArray) -> FloatArray:
        """[orders]: the objective with the best split; infinite where no split fits."""
        return self._tables(orders)[-1][:, self.layers] + self.links_ms(orders)

    def hops(self, order: IntArray) -> tuple[Hop, ...]:
        """The best split of an order whose exact cost is finite."""
        tables = [table[0] for table in self._tables(order[None])]
        stops = [self.layers]
        for index in range(len(order) - 1, 0, -1):
            begin = np.arange(stops[-1])
            cost = tables[index - 1][begin] + self._span_ms(int(order[index]), begin, stops[-1])
            stops.append(int(np.argmin(cost)))
        stops.append(0)
        ends = stops[::-1]
        return tuple(Hop(int(machine), ends[at], ends[at + 1]) for at, machine in enumerate(order))

    def _span_ms(self, machine: int, begin: IntArray, stop: int) -> FloatArray:
        cost = self.costs.before[stop, machine] - self.costs.before[begin, machine]
        if stop == self.layers:
            cost = cost + self.costs.head[machine]
        return np.where(begin >= self._low[stop, machine], cost, np.inf)

    def _tables(self, orders: IntArray) -> list[FloatArray]:
        """For each hop [orders, layers + 1]: the least computation of the layers before a boundary."""
        costs, layers = self.costs, self.layers
        first = orders[:, 0]
        boundary = np.arange(layers + 1)
        table = costs.before.T[first] + (costs.embed + costs.penalty)[first][:, None]
        table[:, layers] += costs.head[first]
        table[boundary[None, :] > costs.greedy_stop[0][first][:, None]] = np.inf
        table[:, 0] = np.inf
        tables = [table]
        for machine in orders.T[1:]:
            before = costs.before.T[machine]
            following = self._window_min(table - before, self._low.T[machine]) + before
            following += costs.penalty[machine][:, None]
            following[:, layers] += costs.head[machine]
            table = following
            tables.append(table)
        return tables

    def _window_min(self, values: FloatArray, low: IntArray) -> FloatArray:
        """[orders, layers + 1]: for each boundary the least value from `low` to the one before it."""
        rows, width = values.shape
        minima = [values]
        step = 1
        while 2 * step < width:
            wider = np.full_like(values, np.inf)
            wider[:, :-step] = np.minimum(minima[-1][:, :-step], minima[-1][:, step:])
            minima.append(wider)
            step *= 2
        boundary = np.arange(width)
        length = boundary - low
        power = self._power[np.maximum(length, 1)]
        flat = np.concatenate(minima, axis=1).ravel()
        base = np.arange(rows)[:, None] * (width * len(minima)) + power * width
        end = np.maximum(boundary - (1 << power), 0)
        best: FloatArray = np.minimum(flat.take(base + np.minimum(low, width - 1)), flat.take(base + end))
        best[length < 1] = np.inf
        return best

    def _first_layers(self, greedy: IntArray) -> IntArray:
        """[layers + 1, machines]: the first layer from which a fill reaches each boundary, the boundary itself if
        none does. A fill that begins later ends no earlier."""
        layers, machines = greedy.shape
        low = np.empty((layers + 1, machines), dtype=np.int64)
        reach = np.maximum.accumulate(greedy[1:], axis=0) if layers > 1 else greedy[1:]
        for boundary in range(layers + 1):
            short = np.count_nonzero(reach < boundary, axis=0) + 1
            low[boundary] = np.minimum(short, boundary)
        return low
