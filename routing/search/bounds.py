"""Lower bounds on what a partial circuit still has to pay (branch and bound), to drop early what cannot win.

Every further machine is entered by one link and left by another. Half of the cheapest such pair belongs to the
machine, whatever its neighbours turn out to be; the other halves belong to them. So a machine that takes up to n
layers costs at least its fastest layer time plus an n-th of its share for each of them, and what is left cannot
cost less than the layers that remain at the lowest of these prices, each machine no further than it could reach.
"""

from dataclasses import dataclass

import numpy as np

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import most_layers
from molink.routing.problem.spans import SpanCosts

_MACHINES_APART = 64
"""Up to so many machines there is a table for each start, in which the start takes no further layers."""
_ROUNDING = 1 - 1e-12
"""Sums are rounded in another order here than in the search; no bound may pass the true cost for that."""


@dataclass(frozen=True, slots=True, eq=False)
class LowerBounds:
    """Parts of a lower bound, and with them of an estimate."""

    rest_ms: FloatArray
    """[starts or 1, layers + 1]: the layers from each one on, with the share of links of the machines that do
    them. Infinite where memory cannot do."""
    leave_ms: FloatArray
    """[machines]: half the least link that leaves it."""
    enter_ms: FloatArray
    """[machines]: half the least link that arrives."""
    alone_ms: FloatArray
    """[layers + 1]: the layers from each one on, on one machine and without links."""
    pair_ms: FloatArray
    """[machines]: the cheapest way to another machine and back from there: the links of a circuit of two, whose
    machines are each other's neighbour on both sides, which `rest_ms` leaves out."""
    feasible: bool = True
    """False: no circuit exists, for memory can never do."""

    def rest(self, start: IntArray, stop: IntArray) -> FloatArray:
        """`rest_ms` of labels and where their extensions stop; the shapes broadcast."""
        row = start * self.rest_ms.shape[1] if len(self.rest_ms) > 1 else 0
        rest: FloatArray = self.rest_ms.ravel().take(row + stop)
        return rest


def bounds_of(problem: CircuitProblem, costs: SpanCosts, latency_ms: FloatArray) -> LowerBounds:
    """The bounds of a problem."""
    machines, layers = problem.machines, problem.layers
    visit, leave, enter = _least_links(latency_ms)
    most = most_layers(problem)
    able = np.flatnonzero(most > 0)
    price = costs.layer_ms[able].min(axis=1) + (visit[able] + costs.penalty[able]) / most[able]
    order = np.argsort(price, kind="stable")
    able, count, price = able[order], most[able][order], price[order]
    held, spent = _running(count), _running(count * price)
    left = layers - np.arange(layers + 1)
    if machines > _MACHINES_APART:
        rest = np.interp(left, held, spent, right=np.inf)[None]
    else:
        rest = np.empty((machines, layers + 1))
        rest[:] = np.interp(left, held, spent, right=np.inf)
        for place, machine in enumerate(able):  # Without a machine, the later ones move up.
            others = np.delete(held, place + 1), np.delete(spent, place + 1)
            others[0][place + 1 :] -= count[place]
            others[1][place + 1 :] -= count[place] * price[place]
            rest[machine] = np.interp(left, *others, right=np.inf)
    unit, penalty = costs.layer_ms[able].min(axis=1), costs.penalty[able]
    whole = unit[:, None] * left + penalty[:, None]
    alone = np.where(count[:, None] >= left, whole, np.inf).min(axis=0, initial=np.inf)
    if machines:
        rest[:, :-1] += costs.head.min()
        alone[:-1] += costs.head.min()
    both = latency_ms + latency_ms.T
    np.fill_diagonal(both, np.inf)
    pair = both.min(axis=1, initial=np.inf)
    rest, leave, enter, alone, pair = (each * _ROUNDING for each in (rest, leave, enter, alone, pair))
    return LowerBounds(rest, leave, enter, alone, pair, bool(held[-1] >= layers))


def _least_links(latency_ms: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """[machines] three times: half of the cheapest way in from one machine and out to another, half of the
    cheapest way out, and in."""
    machines = len(latency_ms)
    if machines < 3:  # With two machines, both links run between them.
        others = latency_ms[::-1].diagonal()[::-1] if machines == 2 else np.zeros(machines)
        back = others[::-1]
        return (others + back) / 2, others / 2, back / 2
    apart = np.array(latency_ms)
    np.fill_diagonal(apart, np.inf)
    leave, enter = np.partition(apart, 1, axis=1)[:, :2], np.partition(apart, 1, axis=0)[:2]
    same = apart.argmin(axis=1) == apart.argmin(axis=0)
    visit = leave[:, 0] + enter[0]
    visit[same] = np.minimum(leave[:, 0] + enter[1], leave[:, 1] + enter[0])[same]
    return visit / 2, leave[:, 0] / 2, enter[0] / 2


def _running(values: FloatArray | IntArray) -> FloatArray:
    return np.concatenate(([0.0], np.cumsum(values)))
