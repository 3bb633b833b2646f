"""A small exact integer program for layers that are alike: a node for each machine, a number of layers on it.

Between machines i and j: `link` if the circuit goes from i to j, `closing` if that is its way back from the
last machine to the first, and `done`, the number of layers run when the link is crossed (0 on the way back).
`done` grows by each machine's layers and falls to 0 once, so that links form one cycle: the single-commodity
flow formulation of Gavish and Graves (1978), with the layers as the commodity. It has 3 * machines**2 columns
where Table 1 of the paper has machines**2 * layers, and a linear relaxation close to the optimum: the paper's
testbeds of 21 machines are solved to proven optimality.

Circuits of one machine have no links; they are compared outside the program.
"""

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.baselines.highs import INFINITY, Entry, Program
from molink.routing.baselines.ilp import IlpOutcome, TimeLimitReached, best_single, impossible
from molink.routing.problem.circuit import Hop
from molink.routing.problem.problem import CircuitProblem, objective_ms
from molink.routing.problem.spans import SpanCosts


def solve_compact_ilp(
    problem: CircuitProblem, time_limit_s: float | None = None, seed: int = 0
) -> IlpOutcome:
    """The best circuit and a bound on all circuits, as `solve_ilp` gives them, for layers that are alike.

    Raises ValueError if layers differ in time, bytes, residency or willingness on any machine; NoCircuit if
    there is provably no circuit; TimeLimitReached if none was found in time.
    """
    _check_alike(problem)
    single = best_single(problem)
    known, bound = single, INFINITY if single is None else objective_ms(problem, single)
    nodes = _Nodes(problem)
    if len(nodes.machine) >= 2:
        solution = nodes.program(problem).solve(time_limit_s, seed)
        bound = min(bound, solution.bound)
        if solution.values is not None:
            found = nodes.hops(solution.values)
            known = min(single or found, found, key=lambda hops: objective_ms(problem, hops))
        elif single is None and not solution.infeasible:
            raise TimeLimitReached(solution.run_s if time_limit_s is None else time_limit_s, bound)
    return impossible(problem) if known is None else IlpOutcome.of(problem, known, bound)


def _check_alike(problem: CircuitProblem) -> None:
    load, _, _ = problem.cold_load_ms()
    tables = {
        "layer_ms": problem.layer_ms,
        "layer_bytes": problem.layer_bytes,
        "resident": problem.resident,
        "allowed": problem.allowed,
        "kv_bytes": problem.kv_bytes,
        "load_ms": load,
    }
    for name, table in tables.items():
        if table is not None and (table != table[..., :1]).any():
            raise ValueError(f"{name} must be the same for all layers, or use solve_ilp")


class _Nodes:
    """The machines that could have a layer, and the columns: links, closings, done, then layers."""

    def __init__(self, problem: CircuitProblem) -> None:
        self.layers = problem.layers
        capacity = _capacity(problem, np.zeros_like(problem.free_bytes))
        self.machine: IntArray = np.flatnonzero(capacity)
        self.capacity = capacity[self.machine]
        self.first_capacity = _capacity(problem, problem.cold_embed_bytes())[self.machine]
        self.last_capacity = _capacity(problem, problem.cold_head_bytes())[self.machine]
        count = len(self.machine)
        self.source, self.target = np.nonzero(~np.eye(count, dtype=np.bool_))
        links = len(self.source)
        self.link, self.closing, self.done = np.arange(3 * links).reshape(3, links)
        self.held = 3 * links + np.arange(count)

    def program(self, problem: CircuitProblem) -> Program:
        count, links, layers = len(self.machine), len(self.source), self.layers
        whole = np.ones(3 * links + count, dtype=np.bool_)
        whole[self.done] = False
        upper = np.ones(3 * links + count)
        upper[self.done], upper[self.held] = layers - 1, self.capacity
        program = Program(self._cost(problem), upper, whole)
        source, target, node = self.source, self.target, np.arange(count)
        program.add_rows(count, [(source, self.link, 1.0), (target, self.link, -1.0)], 0.0, 0.0)
        program.add_rows(count, [(source, self.link, 1.0)], 0.0, 1.0)
        program.add_rows(1, [(np.zeros(links, int), self.closing, 1.0)], 1.0, 1.0)
        program.add_rows(1, [(np.zeros(count, int), self.held, 1.0)], layers, layers)
        # A machine in the circuit has at least one layer and no more than fits beside embedding or head.
        fewer_first = (self.capacity - self.first_capacity)[target]
        fewer_last = (self.capacity - self.last_capacity)[source]
        program.add_rows(count, [(node, self.held, 1.0), (source, self.link, -1.0)], 0.0, INFINITY)
        within: list[Entry] = [(node, self.held, 1.0), (source, self.link, -self.capacity[source])]
        program.add_rows(count, [*within, (target, self.closing, fewer_first)], -INFINITY, 0.0)
        program.add_rows(count, [*within, (source, self.closing, fewer_last)], -INFINITY, 0.0)
        # Layers done grow by what each machine has; the way back carries none.
        grown: list[Entry] = [(source, self.done, 1.0), (target, self.done, -1.0), (node, self.held, -1.0)]
        program.add_rows(count, [*grown, (source, self.closing, layers)], 0.0, 0.0)
        each = np.arange(links)
        for factor, low, high in ((layers - 1.0, -INFINITY, 0.0), (1.0, 0.0, INFINITY)):
            entries: list[Entry] = [
                (each, self.done, 1.0),
                (each, self.link, -factor),
                (each, self.closing, factor),
            ]
            program.add_rows(links, entries, low, high)
        program.add_rows(links, [(each, self.closing, 1.0), (each, self.link, -1.0)], -INFINITY, 0.0)
        return program

    def _cost(self, problem: CircuitProblem) -> FloatArray:
        costs = SpanCosts(problem)
        source, target = self.machine[self.source], self.machine[self.target]
        cost = np.zeros(3 * len(source) + len(self.machine))
        cost[self.link] = problem.dense_latency_ms[source, target] + costs.penalty[target]
        cost[self.closing] = costs.embed[target] + costs.head[source]
        cost[self.held] = costs.layer_ms[self.machine, 0]
        return cost

    def hops(self, values: FloatArray) -> tuple[Hop, ...]:
        """The hops of a solution."""
        chosen = np.flatnonzero(values[self.link] > 0.5)
        following = dict(zip(self.source[chosen].tolist(), self.target[chosen].tolist(), strict=True))
        node = int(self.target[np.argmax(values[self.closing])])
        hops: list[Hop] = []
        while len(hops) < len(following):
            start = hops[-1].stop if hops else 0
            hops.append(Hop(int(self.machine[node]), start, start + round(values[self.held[node]])))
            node = following[node]
        return tuple(hops)


def _capacity(problem: CircuitProblem, extra: IntArray) -> IntArray:
    """[machines]: layers that fit beside so many bytes of embedding or head; 0 where not even those fit."""
    each = problem.cold_bytes()[:, 0]
    free = problem.free_bytes - extra
    most = np.where(each > 0, free // np.maximum(each, 1), problem.layers)
    if problem.kv_bytes is not None and problem.free_kv_bytes is not None and problem.kv_bytes[0] > 0:
        most = np.minimum(most, problem.free_kv_bytes // problem.kv_bytes[0])
    if problem.allowed is not None:
        most = np.where(problem.allowed[:, 0], most, 0)
    result: IntArray = np.where(free >= 0, np.minimum(most, problem.layers), 0)
    return result
