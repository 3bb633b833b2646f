"""Several circuits at once: a swarm covered with disjoint ones, and spares for one that stands.

What a set of circuits is worth, by objective (the paper leaves throughput to future work, section 6):

- `latency`: one token at a time goes around each circuit, 1000 / tpot_ms tokens per second. Few and short circuits
  on fast machines win; a machine that would only slow them down stays out.
- `throughput`: circuits are pipelined, with as many micro-batches as keep the slowest hop busy, 1000 / (its
  milliseconds) tokens per second. Every machine that fits somewhere takes load off others, and layers are shared
  out evenly, as far as the limit on TPOT allows.
"""

import heapq
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from molink.routing.arrays import IntArray
from molink.routing.baselines.flow import check_objective, throughput_bound
from molink.routing.circuits.disjoint_circuits import DisjointCircuits, find_among
from molink.routing.plan import plan_circuit
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import most_layers

_SMALL = 100
"""Machines up to which several ways to begin are tried and all pairs of circuits may be cut anew."""
_SEARCHES = 150
"""Searches spent on improvement, at any size: what begins well in a large swarm has little to gain."""


@dataclass(frozen=True, slots=True)
class CircuitPlan:
    """Disjoint circuits, best first, and how good any set of them could be. Iterates over its circuits."""

    circuits: tuple[Circuit, ...]
    objective: str
    tokens_per_s: float
    """Of all circuits together, as the objective counts."""
    bound_tokens_per_s: float
    """No set of disjoint circuits makes more (`throughput_bound`)."""

    @property
    def gap(self) -> float:
        """The part of the bound that is not reached, 0 to 1: at most so much is lost to the optimum."""
        if self.tokens_per_s >= self.bound_tokens_per_s:
            return 0.0
        return 1.0 - self.tokens_per_s / self.bound_tokens_per_s

    def __iter__(self) -> Iterator[Circuit]:
        return iter(self.circuits)

    def __len__(self) -> int:
        return len(self.circuits)

    def __getitem__(self, index: int) -> Circuit:
        return self.circuits[index]


def plan_circuits(
    problem: CircuitProblem, objective: str = "latency", max_tpot_ms: float | None = None
) -> CircuitPlan:
    """Disjoint circuits (each machine in at most one) of a high total of tokens per second.

    No circuit takes longer than `max_tpot_ms`; there are none if that cannot be met. Raises NoCircuit with the
    shortfall if there is no circuit at all, and ValueError for an unknown objective or a limit that is not above 0.
    """
    check_objective(objective, max_tpot_ms)
    bound = throughput_bound(problem, objective, max_tpot_ms)
    limit = float("inf") if max_tpot_ms is None else max_tpot_ms
    disjoint = DisjointCircuits(problem, objective == "throughput", limit, _SEARCHES)
    everyone = range(problem.machines)
    begun = [disjoint.pack(everyone)]
    if problem.machines <= _SMALL:
        begun += [disjoint.pack(everyone, outermost_first=True)]
    best = max(begun, key=disjoint.rate)
    if not best:
        best = _single(problem, limit)
    disjoint.searches = _SEARCHES
    circuits = sorted(disjoint.improve(best), key=lambda one: (one.tpot_ms, one.hops[0].machine))
    return CircuitPlan(tuple(circuits), objective, disjoint.rate(circuits), bound)


def alternatives(problem: CircuitProblem, circuit: Circuit, k: int) -> tuple[Circuit, ...]:
    """The `k` best other circuits found that each do without some machine of `circuit`, in order of TPOT.

    The best circuit without each one of its machines, then, from the quickest of these on, without one of its
    machines too, and so on (after Lawler's ranking of solutions). Fewer than `k` if there are no more. For the loss
    of a certain machine: `spare_without`. Raises ValueError if k is negative.
    """
    if k < 0:
        raise ValueError(f"k must not be negative, got {k}")
    around = _surroundings(problem, circuit)
    found: dict[tuple[Hop, ...], Circuit] = {}
    queue: list[tuple[float, int, frozenset[int], Circuit]] = [(0.0, 0, frozenset(), circuit)]
    seen: set[frozenset[int]] = set()
    for _ in range(k):
        if not queue:
            break
        _, _, without, parent = heapq.heappop(queue)
        for hop in parent.hops:
            excluded = without | {hop.machine}
            if excluded in seen:
                continue
            seen.add(excluded)
            spare = find_among(problem, np.setdiff1d(around, list(excluded))) if without else None
            spare = spare or spare_without(problem, excluded)
            if spare is not None and spare.hops not in found:
                found[spare.hops] = spare
                around = np.union1d(around, [other.machine for other in spare.hops])
                heapq.heappush(queue, (spare.tpot_ms, len(seen), excluded, spare))
    return tuple(sorted(found.values(), key=lambda one: one.tpot_ms)[:k])


def spare_without(problem: CircuitProblem, machines: Collection[int]) -> Circuit | None:
    """The best circuit found that does without the machines; None without one."""
    return find_among(problem, np.setdiff1d(np.arange(problem.machines), list(machines)))


def _surroundings(problem: CircuitProblem, circuit: Circuit) -> IntArray:
    """The circuit's machines and those that could take a place in it with the least detour and computation."""
    used, every = np.array([hop.machine for hop in circuit.hops]), np.arange(problem.machines)
    if problem.machines <= _SMALL:
        return every
    apart = (problem.links.block(used, every) + problem.links.block(every, used).T).min(axis=0)
    pace = problem.layer_ms.mean(axis=1) * problem.layers / len(used)
    nearest = np.argsort(np.where(most_layers(problem) > 0, apart + pace, np.inf), kind="stable")
    return np.union1d(nearest[:_SMALL], used)


def _single(problem: CircuitProblem, limit_ms: float) -> list[Circuit]:
    """Searches the whole where packing found nothing; raises NoCircuit if there is no circuit."""
    circuit = plan_circuit(problem)
    return [circuit] if circuit.tpot_ms <= limit_ms else []
