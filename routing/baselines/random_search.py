"""Random search (decentralized-scheduling paper, section 5.2): random orders of the machines, each taking as
many of the layers that are left as fit."""

import numpy as np
from numpy.random import PCG64, Generator

from molink.routing.arrays import FloatArray, IntArray
from molink.routing.problem.circuit import Circuit, Hop
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.spans import SpanCosts
from molink.routing.search.augmented import circuit_of, plan_augmented

_ELEMENTS = 2**22
"""Samples times machines that are drawn in one go."""


def plan_random(problem: CircuitProblem, samples: int = 4096, seed: int = 0) -> Circuit:
    """The circuit of lowest TPOT (weighted loading included) among so many random orders.

    A machine that cannot serve the next layer is passed over. Equal seeds give equal circuits. If no sample
    gets through all layers, the augmented search answers; it raises NoCircuit if there is no circuit.
    """
    if not problem.machines:
        return plan_augmented(problem)
    spans = SpanCosts(problem)
    last = np.full((1, problem.machines), problem.layers)
    stops = np.concatenate((spans.greedy_stop, last))
    costs = spans.of(np.arange(problem.machines), spans.greedy_stop)
    costs = np.concatenate((costs, np.zeros_like(last)))
    latency_ms = problem.dense_latency_ms
    generator = Generator(PCG64(seed))
    best_cost, best_order = np.inf, np.zeros(0, dtype=np.int64)
    rows = max(1, _ELEMENTS // problem.machines)
    for first in range(0, samples, rows):
        orders = np.tile(np.arange(problem.machines), (min(rows, samples - first), 1))
        orders = generator.permuted(orders, axis=1)
        cost = _costs(latency_ms, orders, stops, costs)
        index = int(np.argmin(cost))
        if cost[index] < best_cost:
            best_cost, best_order = float(cost[index]), orders[index]
    if not np.isfinite(best_cost):
        return plan_augmented(problem)
    return circuit_of(problem, _hops(best_order, stops))


def _costs(latency_ms: FloatArray, orders: IntArray, stops: IntArray, costs: FloatArray) -> FloatArray:
    """[samples]: what the circuit of each order costs, infinite where it does not reach the last layer.

    `stops` and `costs` of the greedy fills are [layers + 1, machines]; after the last layer nothing is taken.
    """
    layers = len(stops) - 1
    samples = len(orders)
    layer, cost = np.zeros(samples, dtype=np.int64), np.zeros(samples)
    first, last = np.full(samples, -1), np.full(samples, -1)
    for machine in orders.T:
        stop = stops[layer, machine]
        taken = stop > layer
        cost += np.where(taken, costs[layer, machine], 0.0)
        cost += np.where(taken & (last >= 0), latency_ms[last, machine], 0.0)
        first = np.where(taken & (first < 0), machine, first)
        last = np.where(taken, machine, last)
        layer = stop
        if (layer == layers).all():
            break
    cost += np.where(first != last, latency_ms[last, first], 0.0)
    return np.where(layer == layers, cost, np.inf)


def _hops(order: IntArray, stops: IntArray) -> tuple[Hop, ...]:
    hops: list[Hop] = []
    layer = 0
    for machine in order.tolist():
        stop = int(stops[layer, machine])
        if stop > layer:
            hops.append(Hop(machine, layer, stop))
            layer = stop
    return tuple(hops)
