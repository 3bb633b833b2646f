"""The balanced partition (MoLink system paper, section 3.1.2): as few machines as will do, near one another,
with layers in proportion to their speed.

Of the paper's rules: machines are filtered by GPU type; those with several GPUs go first, for they run tensor
parallel; then those with the lowest latency. Machines that are alike get equal shares, others shares in
proportion to their measured speed, as far as memory allows. Every machine is tried as the head, and the
circuit of lowest TPOT is taken, which includes the head's own network and the embedding's time. The processor
of a head is not known here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.problem import CircuitProblem, tpot_ms
from molink.routing.problem.span_options import servable_layers
from molink.routing.problem.spans import SpanCosts
from molink.routing.search.augmented import circuit_of, plan_augmented


@dataclass(frozen=True, slots=True)
class MachineKind:
    """Kind of a machine: what it computes with."""

    gpu_type: str
    gpu_count: int = 1

    def __post_init__(self) -> None:
        if self.gpu_count < 1:
            raise ValueError(f"gpu_count must be at least 1, got {self.gpu_count}")


def plan_balanced(
    problem: CircuitProblem,
    kinds: Sequence[MachineKind] | None = None,
    *,
    gpu_type: str | None = None,
    gpus: int = 1,
) -> Circuit:
    """A circuit over machines with at least so many GPUs in all, more only where memory asks for it.

    `kinds` are the machines', in order; None: one GPU each, all of one type. With `gpu_type` only machines
    of that type are taken. If no balanced circuit fits (machines willing to serve few layers only), the
    augmented search answers; it raises NoCircuit if there is no circuit. Raises ValueError for kinds of
    another length than the machines, or fewer than one GPU.
    """
    if kinds is None:
        kinds = (MachineKind("any"),) * problem.machines
        if gpu_type is not None:
            raise ValueError("gpu_type needs the kinds of the machines")
    if len(kinds) != problem.machines:
        raise ValueError(f"kinds must name {problem.machines} machines, got {len(kinds)}")
    if gpus < 1:
        raise ValueError(f"gpus must be at least 1, got {gpus}")
    if gpu_type is not None:
        of_type = np.array([kind.gpu_type == gpu_type for kind in kinds], dtype=np.bool_)
        willing = np.True_ if problem.allowed is None else problem.allowed
        allowed = np.broadcast_to(of_type[:, None] & willing, (problem.machines, problem.layers))
        problem = replace(problem, allowed=allowed)
    counts = np.array([kind.gpu_count for kind in kinds], dtype=np.int64)
    hops = _best_of_all_heads(problem, counts, gpus)
    if not hops:
        return plan_augmented(problem)
    return circuit_of(problem, hops)


def _best_of_all_heads(problem: CircuitProblem, counts: IntArray, gpus: int) -> tuple[Hop, ...]:
    """The hops of lowest TPOT among those of fewest machines; none if nothing fits."""
    stages = _Stages(problem)
    order = _Neighbourhood(problem, counts)
    best: tuple[Hop, ...] = ()
    most = problem.machines
    for head in range(problem.machines):
        hops = stages.share(order.around(head, most), counts, gpus)
        if hops and (not best or (len(hops), tpot_ms(problem, hops)) < (len(best), tpot_ms(problem, best))):
            best, most = hops, len(hops)
    return best


class _Neighbourhood:
    """Machines that could serve anything, in order of preference beside a head."""

    def __init__(self, problem: CircuitProblem, counts: IntArray) -> None:
        self.counts = counts
        self.useful = servable_layers(problem).any(axis=1)
        self.latency_ms = problem.dense_latency_ms

    def around(self, head: int, most: int) -> Iterator[int]:
        """The head and up to `most` - 1 more: of those with most GPUs, the one by which the way on and back to
        the head is shortest."""
        free: BoolArray = np.array(self.useful)
        last = head
        for _ in range(most):
            yield last
            free[last] = False
            others = np.flatnonzero(free)
            if not others.size:
                return
            others = others[self.counts[others] == self.counts[others].max()]
            way = self.latency_ms[last, others] + self.latency_ms[others, head]
            last = int(others[np.argmin(way)])


class _Stages:
    """Splits the layers over machines in a given order."""

    def __init__(self, problem: CircuitProblem) -> None:
        self.layers = problem.layers
        self.stops = SpanCosts(problem).greedy_stop.T
        spent = np.concatenate((np.zeros((problem.machines, 1)), problem.layer_ms.cumsum(axis=1)), axis=1)
        # Where computing takes no time, all machines are alike.
        self.spent_ms = (
            spent if spent[:, -1].any() else np.broadcast_to(np.arange(self.layers + 1.0), spent.shape)
        )

    def share(self, order: Iterator[int], counts: IntArray, gpus: int) -> tuple[Hop, ...]:
        """Hops over the first machines in the order that have so many GPUs together and fit all layers; none
        if all of them do not.

        Minimises the sum of (layers x time) of all machines: without limits of memory each then takes the same
        time, layers in proportion to speed, and equal machines have equal shares.
        """
        least = np.full(self.layers + 1, np.inf)
        least[0] = 0.0
        chosen: list[int] = []
        begins: list[IntArray] = []
        for machine in order:
            total = least[:-1, None] + self._cost(machine)
            begins.append(total.argmin(axis=0))
            least = total.min(axis=0)
            chosen.append(machine)
            if np.isfinite(least[-1]) and counts[chosen].sum() >= gpus:
                return self._hops(chosen, begins)
            if not np.isfinite(least).any():
                break
        return ()

    def _cost(self, machine: int) -> FloatArray:
        """[layers, layers + 1]: (layers x time) of the machine's span by start and stop, infinite where it does
        not fit."""
        start, stop = np.arange(self.layers)[:, None], np.arange(self.layers + 1)[None, :]
        time = self.spent_ms[machine][None, :] - self.spent_ms[machine][:-1, None]
        return np.where(
            (start < stop) & (stop <= self.stops[machine][:, None]), (stop - start) * time, np.inf
        )

    def _hops(self, chosen: list[int], begins: list[IntArray]) -> tuple[Hop, ...]:
        hops: list[Hop] = []
        stop = self.layers
        for machine, begin in zip(reversed(chosen), reversed(begins), strict=True):
            start = int(begin[stop])
            hops.insert(0, Hop(machine, start, stop))
            stop = start
        return tuple(hops)
