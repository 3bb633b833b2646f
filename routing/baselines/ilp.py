"""The integer program of the decentralized-scheduling paper (section 4.2, Table 1), solved with HiGHS.

x[l, i, j] says that machine i runs layer l and hands on to j, which runs the next one; after the last layer,
the first. Beyond the printed program:

- A row for each machine lets it be entered once. Table 1 allows a machine to be left and entered again, which
  a circuit here does not; where latencies keep to the triangle inequality and layers are alike that never
  pays.
- Embedding, head, weighted loading, penalties of hops and KV memory join the objective and the rows. Columns
  of layers that a machine cannot serve are left out.
- Rows of bytes are only as exact as the solver's tolerance. A solution in which a machine has more than fits
  is excluded by an exact row, and the program is solved again.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.baselines.highs import INFINITY, Program
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.greedy_fill import GreedyFill
from molink.routing.problem.problem import CircuitProblem, objective_ms
from molink.routing.problem.span_options import SpanOptions, servable_layers
from molink.routing.problem.spans import SpanCosts
from molink.routing.search.augmented import circuit_of, plan_augmented


@dataclass(frozen=True, slots=True)
class IlpOutcome:
    """A circuit and how far it can be from the best."""

    circuit: Circuit
    bound_ms: float
    """No circuit has a lower objective (`objective_ms`)."""
    gap: float
    """(objective - bound) / objective: 0 if the circuit is proven best."""

    @classmethod
    def of(cls, problem: CircuitProblem, hops: tuple[Hop, ...], bound_ms: float) -> "IlpOutcome":
        objective = objective_ms(problem, hops)
        bound = min(max(bound_ms, 0.0), objective)
        gap = (objective - bound) / objective if objective > 0 else 0.0
        return cls(circuit_of(problem, hops), bound, gap)


class TimeLimitReached(TimeoutError):
    """The time limit passed before the solver found a circuit; whether there is one is not known."""

    def __init__(self, time_limit_s: float, bound_ms: float) -> None:
        self.time_limit_s = time_limit_s
        self.bound_ms = bound_ms
        super().__init__(time_limit_s, bound_ms)

    def __str__(self) -> str:
        return (
            f"the integer program found no circuit within {self.time_limit_s:g} s, nor a proof that there is "
            "none: allow more time, or use the algorithm 'augmented'"
        )


def plan_ilp(problem: CircuitProblem, time_limit_s: float | None = None, seed: int = 0) -> Circuit:
    """The circuit of `solve_ilp`."""
    return solve_ilp(problem, time_limit_s, seed).circuit


def solve_ilp(problem: CircuitProblem, time_limit_s: float | None = None, seed: int = 0) -> IlpOutcome:
    """The best circuit by the program of Table 1, or the best one known when the limit passes (None: no
    limit).

    The program has machines**2 * layers columns; `solve_compact_ilp` proves the same much sooner where layers
    are alike. The limit counts the solver's run, not the building of the program. The seed is the solver's;
    with a limit the result depends on the speed of the computer. Raises NoCircuit if there is provably none,
    TimeLimitReached if none was found in time.
    """
    if not servable_layers(problem).any(axis=0).all():
        return impossible(problem)
    columns = _Columns(problem)
    program = columns.program(problem)
    fill = GreedyFill(problem)
    # What embedding and head share, the program counts twice: a machine that has both is tried apart.
    single = best_single(problem) if problem.shared_bytes else None
    known = INFINITY if single is None else objective_ms(problem, single)
    run_s = 0.0
    while True:
        left_s = None if time_limit_s is None else max(time_limit_s - run_s, 0.001)
        solution = program.solve(left_s, seed)
        run_s += solution.run_s
        if solution.infeasible:
            return impossible(problem) if single is None else IlpOutcome.of(problem, single, known)
        if solution.values is None and single is not None:
            return IlpOutcome.of(problem, single, min(solution.bound, known))
        if solution.values is None:
            raise TimeLimitReached(run_s if time_limit_s is None else time_limit_s, solution.bound)
        hops = columns.hops(solution.values)
        overfull = [hop for hop in hops if hop.stop > fill.greedy_stops(hop.start)[hop.machine]]
        if not overfull:
            if single is not None and known < objective_ms(problem, hops):
                hops = single
            return IlpOutcome.of(problem, hops, min(solution.bound, known))
        for hop in overfull:
            columns.exclude(program, hop)


def best_single(problem: CircuitProblem) -> tuple[Hop, ...] | None:
    """The best circuit of one machine."""
    options = SpanOptions(problem).options_at(0)
    whole = np.flatnonzero(options.stop == problem.layers)
    if not whole.size:
        return None
    return (Hop(int(options.machine[whole[np.argmin(options.cost[whole])]]), 0, problem.layers),)


def impossible(problem: CircuitProblem) -> IlpOutcome:
    """Raises NoCircuit with the shortfall.

    Should the search for the shortfall find a circuit, the solver was wrong within its tolerance, and the
    circuit is the answer.
    """
    return IlpOutcome.of(problem, plan_augmented(problem).hops, 0.0)


class _Columns:
    """The columns x[l, i, j], as parallel arrays."""

    def __init__(self, problem: CircuitProblem) -> None:
        self.layers, self.machines = problem.layers, problem.machines
        serves = servable_layers(problem).T
        layer, machine, following = np.nonzero(serves[:, :, None] & np.roll(serves, -1, axis=0)[:, None, :])
        self.layer: IntArray = layer
        self.machine: IntArray = machine
        self.following: IntArray = following
        self.entered: BoolArray = (machine != following) | (layer == problem.layers - 1)
        """Whether a hop begins with the following layer."""

    def program(self, problem: CircuitProblem) -> Program:
        layer, machine, following = self.layer, self.machine, self.following
        count, layers, machines = len(layer), self.layers, self.machines
        column, ones = np.arange(count), np.ones(count)
        program = Program(self._cost(problem), ones, np.ones(count, dtype=np.bool_))
        # (1) and (2): who is handed layer l + 1 runs it. With one layer both are the same columns.
        passed = (machine != following) | (layers > 1)
        program.add_rows(
            layers * machines,
            [
                ((layer * machines + following)[passed], column[passed], 1.0),
                (((layer - 1) % layers * machines + machine)[passed], column[passed], -1.0),
            ],
            0.0,
            0.0,
        )
        # (3): each layer is run once.
        program.add_rows(layers, [(layer, column, 1.0)], 1.0, 1.0)
        # (4): memory, in parts of what each machine has.
        for used, free in _memory(problem):
            program.add_rows(machines, [(machine, column, used[machine, layer] / free[machine])], 0.0, 1.0)
        program.add_rows(machines, [(following[self.entered], column[self.entered], 1.0)], 0.0, 1.0)
        return program

    def _cost(self, problem: CircuitProblem) -> FloatArray:
        costs = SpanCosts(problem)
        time = np.array(costs.layer_ms)
        time[:, 0] += costs.embed
        time[:, -1] += costs.head
        link = problem.dense_latency_ms[self.machine, self.following]
        cost = time[self.machine, self.layer] + np.where(self.machine == self.following, 0.0, link)
        cost += np.where(self.entered, costs.penalty[self.following], 0.0)
        return np.asarray(cost, dtype=np.float64)

    def hops(self, values: FloatArray) -> tuple[Hop, ...]:
        """The hops of a solution."""
        chosen = np.flatnonzero(values > 0.5)
        machine = self.machine[chosen[np.argsort(self.layer[chosen])]]
        begins = [0, *(np.flatnonzero(machine[1:] != machine[:-1]) + 1).tolist(), self.layers]
        return tuple(Hop(int(machine[start]), start, stop) for start, stop in pairwise(begins))

    def exclude(self, program: Program, hop: Hop) -> None:
        """Let the hop's machine not have all of the hop's layers."""
        within = (self.machine == hop.machine) & (hop.start <= self.layer) & (self.layer < hop.stop)
        column = np.flatnonzero(within)
        program.add_rows(1, [(np.zeros_like(column), column, 1.0)], 0.0, hop.stop - hop.start - 1.0)


def _memory(problem: CircuitProblem) -> list[tuple[FloatArray, FloatArray]]:
    """Returns what each layer takes [machines, layers] of what each machine has [machines]: weights, then KV cache."""
    weights = problem.cold_bytes().astype(np.float64)
    weights[:, 0] += problem.cold_embed_bytes()
    weights[:, -1] += problem.cold_head_bytes()
    rows = [(weights, np.maximum(problem.free_bytes, 1).astype(np.float64))]
    if problem.kv_bytes is not None and problem.free_kv_bytes is not None:
        kv = np.broadcast_to(problem.kv_bytes.astype(np.float64), weights.shape)
        rows.append((kv, np.maximum(problem.free_kv_bytes, 1).astype(np.float64)))
    return rows
