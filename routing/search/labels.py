"""Partial circuits as parallel arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.problem.circuit import Hop

Keys = npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class Labels:
    """Partial circuits of equally many hops, each covering the layers [0, stop)."""

    cost: FloatArray
    """[labels]: milliseconds of the objective so far."""
    start: IntArray
    """[labels]: the machine of the first hop."""
    machine: IntArray
    """[labels]: the machine of the last hop."""
    stop: IntArray
    """[labels]"""
    used: BoolArray
    """[labels, machines]"""
    key: Keys
    """[labels]: equal for equal sets of used machines."""
    path: IntArray
    """[labels, hops]: machine * (layers + 1) + stop of each hop."""

    def __len__(self) -> int:
        return len(self.cost)

    def take(self, index: IntArray | slice) -> "Labels":
        """The chosen ones, in that order."""
        return Labels(
            self.cost[index],
            self.start[index],
            self.machine[index],
            self.stop[index],
            self.used[index],
            self.key[index],
            self.path[index],
        )


def hops_of(path: IntArray, layers: int) -> tuple[Hop, ...]:
    """The hops that a row of `Labels.path` stands for."""
    hops: list[Hop] = []
    begin = 0
    for code in path.tolist():
        machine, stop = divmod(code, layers + 1)
        hops.append(Hop(machine, begin, stop))
        begin = stop
    return tuple(hops)


def machine_keys(machines: int) -> Keys:
    """Numbers whose exclusive or identifies a set of machines: for certain up to 64, beyond with odds of
    2**64 to 1."""
    if machines <= 64:
        return np.left_shift(np.uint64(1), np.arange(machines, dtype=np.uint64))
    return scrambled(np.arange(1, machines + 1, dtype=np.uint64))


def scrambled(values: Keys) -> Keys:
    """SplitMix64 (Steele, Lea and Flood, 2014) of each: different for different numbers, and evenly spread."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
