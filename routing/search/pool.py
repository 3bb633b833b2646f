"""Candidate pool: which machines of a large swarm a search need look at.

A circuit that is worth having is made of machines that are fast, have room, and are near each other. A machine
near an anchor costs, for each layer that it takes, its layer time and the share of a link between it and the
anchor; the layers of the model at the lowest of these prices are what a circuit around the anchor would cost,
give or take how its machines lie towards each other. The pool is filled from the neighbourhoods of the anchors
in order of that estimate. Machines that are dear wherever they stand are no anchors and in nobody's
neighbourhood. Beside these, every layer keeps the best few machines that may serve it, and that hold it.

This is a heuristic: what a circuit loses for want of a machine outside the pool is measured, not bounded.
"""

import numpy as np

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.problem.problem import CircuitProblem
from molink.routing.problem.span_options import most_layers, servable_layers

_ANCHORS = 768
"""Machines that are looked at as anchors and as neighbours of anchors."""
_NEIGHBOURS = 48
"""Machines around an anchor that are looked at."""
_KEPT_PER_LAYER = 4
_SAMPLE = 64
"""Machines whose links among each other say what a link is like."""


def pool(problem: CircuitProblem, count: int, shares: FloatArray | None = None) -> IntArray:
    """Some `count` machines in ascending order; all, if there are no more than that. With `shares`, [machines], a
    circuit costs that part of what it would cost otherwise if the machine is its head."""
    every = np.arange(problem.machines)
    if problem.machines <= count:
        return every
    most = most_layers(problem)
    able = np.flatnonzero(most > 0)
    if len(able) <= count:
        return able
    most = most[able]
    unit = problem.layer_ms[able].min(axis=1)
    if problem.hop_penalty_ms is not None:
        unit = unit + problem.hop_penalty_ms[able] / most
    part = np.ones(len(able))
    if shares is not None:
        part = np.where(servable_layers(problem)[able, 0], shares[able], 1.0)
    likely = _likely(problem, able, unit, most, part)
    near = _around_anchors(problem, able[likely], unit[likely], most[likely], count, part[likely])
    if problem.resident is None and problem.allowed is None:
        return np.sort(near)
    return np.union1d(near, _by_layer(problem, able[np.argsort(unit, kind="stable")]))


def _likely(
    problem: CircuitProblem, able: IntArray, unit: FloatArray, most: IntArray, part: FloatArray
) -> IntArray:
    """The machines that are cheap for a layer, and as a head, if links are like the nearest ones in the swarm, or like
    those of the middle, in turns."""
    sample = able[:: max(1, len(able) // _SAMPLE)]
    links = problem.links.block(sample, sample)[~np.eye(len(sample), dtype=np.bool_)]
    ranks = []
    for link_ms in np.quantile(links, (0.02, 0.2, 0.5)):
        price = unit + link_ms / most
        for each in (price,) if part.min() == 1 else (price, price * part):
            rank = np.empty(len(able), dtype=np.int64)
            rank[np.argsort(each, kind="stable")] = np.arange(len(able))
            ranks.append(rank)
    return np.argsort(np.min(ranks, axis=0), kind="stable")[:_ANCHORS]


def _around_anchors(
    problem: CircuitProblem,
    machine: IntArray,
    unit: FloatArray,
    most: IntArray,
    count: int,
    part: FloatArray,
) -> IntArray:
    links = problem.links.block(machine, machine)
    price = unit + (links + links.T) / (2 * most)
    width = min(_NEIGHBOURS, len(machine))
    nearest = np.argpartition(price, width - 1, axis=1)[:, :width]
    prices = np.take_along_axis(price, nearest, axis=1)
    order = np.argsort(prices, axis=1, kind="stable")
    nearest, prices = np.take_along_axis(nearest, order, axis=1), np.take_along_axis(prices, order, axis=1)
    held = np.minimum(np.cumsum(most[nearest], axis=1), problem.layers)
    taken = np.diff(held, axis=1, prepend=0)
    estimate = (taken * prices).sum(axis=1) + (problem.layers - held[:, -1]) * prices[:, -1]
    # Rank by rank around the best anchors: the first neighbours of many before the last of a few.
    anchors = np.argsort(estimate * part, kind="stable")
    place = np.arange(len(machine))[:, None] + np.arange(width)[None, :] * 4
    wanted = np.full(len(machine), np.iinfo(np.int64).max)
    np.minimum.at(wanted, nearest[anchors].ravel(), place.ravel())
    return machine[np.argsort(wanted, kind="stable")[:count]]


def _by_layer(problem: CircuitProblem, order: IntArray) -> IntArray:
    """For each layer the first few in the order that can serve it, and that hold it."""
    servable = servable_layers(problem)[order]
    tables: list[BoolArray] = [servable]
    if problem.resident is not None:
        tables.append(servable & problem.resident[order])
    kept = [(table & (np.cumsum(table, axis=0) <= _KEPT_PER_LAYER)).any(axis=1) for table in tables]
    return order[np.any(kept, axis=0)]
