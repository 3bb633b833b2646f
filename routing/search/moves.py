"""Neighbourhood of local search: the orders of machines that one change makes."""

from functools import lru_cache

import numpy as np

from molink.routing.arrays import IntArray


def neighbours(order: IntArray, machines: IntArray) -> tuple[IntArray, ...]:
    """Orders [orders, hops], by length: with a machine dropped; rearranged or one replaced; one inserted.

    `machines` are the ones that may be brought in.
    """
    outside = np.setdiff1d(machines, order)
    hops = len(order)
    changed = [order[rearrangements(hops)]]
    if outside.size:
        replaced = np.tile(order, (hops * len(outside), 1))
        replaced[np.arange(len(replaced)), np.repeat(np.arange(hops), len(outside))] = np.tile(outside, hops)
        changed.append(replaced)
    result = [np.concatenate(changed)]
    if hops > 1:
        result.append(order[drops(hops)])
    if outside.size:
        place = np.repeat(np.arange(hops + 1), len(outside))
        inserted = np.append(order, -1)[insertions(hops)][place]
        inserted[np.arange(len(place)), place] = np.tile(outside, hops + 1)
        result.append(inserted)
    return tuple(result)


@lru_cache(maxsize=128)
def rearrangements(hops: int) -> IntArray:
    """Turns of the circle, exchanges of two places, reversals of a stretch, and moves of a stretch of up to
    three elsewhere; as indices into an order."""
    every = list(range(hops))
    found = {tuple(every[turn:] + every[:turn]) for turn in range(1, hops)}
    for first in range(hops):
        for last in range(first + 1, hops):
            swapped = every.copy()
            swapped[first], swapped[last] = last, first
            found.add(tuple(swapped))
            found.add((*every[:first], *every[first : last + 1][::-1], *every[last + 1 :]))
    for length in (1, 2, 3):
        for first in range(hops - length + 1):
            stretch, rest = every[first : first + length], every[:first] + every[first + length :]
            for place in range(len(rest) + 1):
                found.add((*rest[:place], *stretch, *rest[place:]))
    found.discard(tuple(every))
    table = np.array(sorted(found), dtype=np.int64).reshape(-1, hops)
    table.setflags(write=False)
    return table


@lru_cache(maxsize=128)
def drops(hops: int) -> IntArray:
    """[hops, hops - 1]: all places but one."""
    table = np.array([[at for at in range(hops) if at != left] for left in range(hops)], dtype=np.int64)
    table.setflags(write=False)
    return table


@lru_cache(maxsize=128)
def insertions(hops: int) -> IntArray:
    """[hops + 1, hops + 1]: all places with the one past the end put before each."""
    table = np.array([[*range(at), hops, *range(at, hops)] for at in range(hops + 1)], dtype=np.int64)
    table.setflags(write=False)
    return table
