"""Lower bounds on what a partial circuit still has to pay, to drop early what cannot win."""

import numpy as np

from molink.routing.arrays import FloatArray
from molink.routing.fills import Fills
from molink.routing.problem import CircuitProblem
from molink.routing.search import Bound

_TIGHT_MACHINES = 40
"""Machines up to which the bound per start is computed: it takes machines**3 steps a layer."""

_ROUNDING = 1 - 1e-12
"""Sums are rounded in another order here than in the search; no bound may pass the true cost for that."""


def completion_bound(problem: CircuitProblem, fills: Fills, remaining_ms: FloatArray) -> Bound:
    """No completion of a label at (stop, machine, start) costs less than this.

    The greater of two bounds: the fastest machines for the layers that are left with the least latency there
    can be on the way, and, in a swarm small enough, the cheapest completion that may use machines again.
    """
    out, into = _least_links(problem.latency_ms)
    if problem.machines > _TIGHT_MACHINES:
        return lambda stop, machine, start: remaining_ms[stop] + out[machine] + into[start]
    simple = remaining_ms[:, None, None] + (out[:, None] + into[None, :])
    tight = np.maximum(simple, _relaxed(problem, fills))
    return lambda stop, machine, start: tight[stop, machine, start]


def _relaxed(problem: CircuitProblem, fills: Fills) -> FloatArray:
    """[layers + 1, machines, starts]: the cheapest completion when only the last machine may not be taken
    again."""
    costs = np.full((problem.layers + 1, problem.machines, problem.machines), np.inf)
    costs[problem.layers] = problem.latency_ms
    links = np.array(problem.latency_ms)
    np.fill_diagonal(links, np.inf)
    for layer in range(problem.layers - 1, 0, -1):
        options = fills.at(layer)
        if options.machine.size:
            after = options.cost[:, None] + costs[options.stop, options.machine]
            after[options.machine[:, None] == np.arange(problem.machines)[None, :]] = np.inf
            costs[layer] = (links[:, options.machine, None] + after[None]).min(axis=1)
    return costs * _ROUNDING


def _least_links(latency: FloatArray) -> tuple[FloatArray, FloatArray]:
    """[machines] twice: lower bounds on the link that leaves each machine and on the one that arrives
    there."""
    if len(latency) < 2:
        return np.zeros(len(latency)), np.zeros(len(latency))
    others = np.array(latency)
    np.fill_diagonal(others, np.inf)
    return others.min(axis=1) * _ROUNDING, others.min(axis=0) * _ROUNDING
