"""Refined search within a given time: a wider beam search, then local search from what it found.

The beam search of `augmented` reports several circuits that differ. From each, the best change of its order of
machines is taken until none helps: turn, exchange, reverse, move, replace, insert or drop. Every change is
estimated by its links and by giving the layers to its fastest machines first, and the most promising are worked
out exactly, with the best split of the layers, which need not fill any machine. Then the best circuit is
disturbed at random and improved again, for as long as that is allowed to take. In problems so small that every
span can be tried, the search over all of them comes first, and mostly proves that nothing is better.

Time is counted as work, at the rate of a slow processor core, so that equal problems give equal circuits; a
caller that has a clock can pass it for a deadline that holds whatever the machine does.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.random import PCG64, Generator

from molink.routing.arrays import IntArray
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.problem import CircuitProblem, objective_ms
from molink.routing.problem.spans import EVERY_SPAN, SpanCosts, every_span_table
from molink.routing.search.augmented import circuit_of, find_augmented, graph_of, search_graph
from molink.routing.search.moves import neighbours
from molink.routing.search.pool import pool
from molink.routing.search.search import Beam, Graph, search
from molink.routing.search.splitting import Splitter

DEFAULT_LIMIT_S = 0.05
_WORK_PER_S = 2e6
"""Hops of estimated orders that count as a second; a step of improvement counts as `_STEP_WORK` more."""
_STEP_WORK = 1000.0
_POOL, _WIDTH, _GATHER = 320, 2048, 16
_STARTS = 3
"""Circuits of the search that are improved."""
_EXACT = 8
"""Changes that are worked out exactly at each step."""
_OUTSIDE = 48
"""Machines that may be brought in at each step, the ones nearest to the circuit."""
_FRUITLESS = 1
"""Disturbances without success after which the circuit counts as the best."""
_EVERY_SPAN_WIDTH = 4096


def plan_refined(
    problem: CircuitProblem,
    time_limit_s: float | None = None,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> Circuit:
    """The circuit of lowest objective found. Raises NoCircuit if there is none.

    Its search is wider than `augmented`'s, not built on it: that it is never worse is measured, not guaranteed.

    `time_limit_s` (default 0.05) limits the improvement, not the search before it; `clock` returns seconds and
    makes the limit one of elapsed time, too.
    """
    machines = pool(problem, _POOL)
    whole = len(machines) == problem.machines and problem.latency_ms is not None
    chosen = problem if whole else problem.subset(machines)
    limit_s = DEFAULT_LIMIT_S if time_limit_s is None else time_limit_s
    deadline = None if clock is None else clock() + limit_s
    budget = _Budget(limit_s * _WORK_PER_S, clock, deadline)
    costs = SpanCosts(chosen)
    graph = graph_of(chosen, costs)
    starts = _starts(chosen, costs, graph)
    if not starts:
        return circuit_of(problem, find_augmented(problem, machines))
    improvement = _Improvement(chosen, Splitter(chosen, costs, graph.latency_ms), budget)
    hops = improvement.run(starts, Generator(PCG64(seed)))
    return circuit_of(problem, tuple(Hop(int(machines[hop.machine]), hop.start, hop.stop) for hop in hops))


def _starts(problem: CircuitProblem, costs: SpanCosts, graph: Graph) -> list[tuple[Hop, ...]]:
    """Circuits to begin with, the best first, no two of the same machines."""
    found = search_graph(graph, width=_WIDTH, gather=_GATHER)
    circuits = [(found.cost, found.hops), *found.others] if found.hops else []
    if problem.machines * problem.layers <= EVERY_SPAN:
        every = Graph(graph.layers, every_span_table(problem, costs), graph.latency_ms, graph.bounds)
        best = search(every, Beam(_EVERY_SPAN_WIDTH), below=found.cost)
        if best.hops:
            circuits.append((best.cost, best.hops))
    distinct: dict[frozenset[int], tuple[Hop, ...]] = {}
    for _, hops in sorted(circuits, key=lambda circuit: circuit[0]):
        distinct.setdefault(frozenset(hop.machine for hop in hops), hops)
    return list(distinct.values())[:_STARTS]


@dataclass(slots=True)
class _Budget:
    work: float
    clock: Callable[[], float] | None
    deadline: float | None

    def allows(self) -> bool:
        """Whether there may be another step."""
        late = self.clock is not None and self.deadline is not None and self.clock() >= self.deadline
        return self.work > 0 and not late


class _Improvement:
    def __init__(self, problem: CircuitProblem, splitter: Splitter, budget: _Budget) -> None:
        self.problem, self.splitter, self.budget = problem, splitter, budget
        self._apart = splitter.latency_ms + splitter.latency_ms.T

    def run(self, starts: list[tuple[Hop, ...]], rng: Generator) -> tuple[Hop, ...]:
        """The best circuit reached from the starts; the first start if nothing is better."""
        best_hops, best = starts[0], objective_ms(self.problem, starts[0])
        best_order = np.array([hop.machine for hop in starts[0]])
        fruitless = 0
        for attempt in range(10**6):
            if attempt < len(starts):
                order = np.array([hop.machine for hop in starts[attempt]])
            elif fruitless < _FRUITLESS:
                order = self._disturbed(best_order, rng)
            else:
                break
            order, cost = self._improved(order)
            fruitless += attempt >= len(starts)
            if cost < best - 1e-12 * best:
                best, best_order, best_hops, fruitless = cost, order, self.splitter.hops(order), 0
            if not self.budget.allows():
                break
        return best_hops

    def _improved(self, order: IntArray) -> tuple[IntArray, float]:
        """The order after the best changes, one after the other, until none helps."""
        cost = float(self.splitter.exact_ms(order[None])[0])
        while self.budget.allows():
            self.budget.work -= _STEP_WORK
            change, lower = self._best_change(order, cost)
            if not lower < cost - 1e-12 * cost:
                break
            order, cost = change, lower
        return order, cost

    def _best_change(self, order: IntArray, cost: float) -> tuple[IntArray, float]:
        best, best_cost = order, cost
        for orders in neighbours(order, self._near(order)):
            self.budget.work -= orders.size
            estimate = self.splitter.estimate_ms(orders)
            few = np.argsort(estimate, kind="stable")[:_EXACT]
            few = few[estimate[few] < best_cost]
            if few.size:
                exact = self.splitter.exact_ms(orders[few])
                place = int(np.argmin(exact))
                if exact[place] < best_cost:
                    best, best_cost = orders[few[place]], float(exact[place])
        return best, best_cost

    def _near(self, order: IntArray) -> IntArray:
        if self.problem.machines <= _OUTSIDE:
            return np.arange(self.problem.machines)
        worth = self.splitter.nearness_ms(self._apart[order].min(axis=0))
        return np.argsort(worth, kind="stable")[:_OUTSIDE]

    def _disturbed(self, order: IntArray, rng: Generator) -> IntArray:
        """Two machines exchanged for others, one brought in, or a stretch moved, at random."""
        near = np.setdiff1d(self._near(order), order)
        changed = order.copy()
        kind = rng.integers(3)
        if near.size >= 2 and kind < 2:
            places = rng.choice(len(order), min(2, len(order)), replace=False)
            changed[places] = rng.choice(near, len(places), replace=False)
        if near.size > 2 and kind:
            rest = np.setdiff1d(near, changed)
            changed = np.insert(changed, rng.integers(len(changed) + 1), rng.choice(rest))
        return changed
