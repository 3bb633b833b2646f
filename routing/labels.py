"""Partial circuits as columns of one array, and the ones already extended."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.circuit import Hop

_COST, _RANK, _MACHINE, _START, _USED_KEY, _STOP, _PARENT = range(7)


class Labels:
    """Partial circuits, each covering layers [0, stop), as parallel arrays [labels] that are views of one
    table.

    One table, because selecting, joining and sorting labels are most of what a search does, and each costs
    one call.
    """

    __slots__ = ("table",)

    def __init__(self, table: IntArray) -> None:
        self.table = table

    @classmethod
    def of(cls, count: int) -> "Labels":
        """So many labels, all fields 0."""
        return cls(np.zeros((7, count), dtype=np.int64))

    @classmethod
    def join(cls, parts: Sequence["Labels"]) -> "Labels":
        return cls(np.concatenate([part.table for part in parts], axis=1))

    def take(self, index: npt.NDArray[Any] | slice) -> "Labels":
        return Labels(np.ascontiguousarray(self.table[:, index]))

    def put(self, first: int, labels: "Labels") -> None:
        """Overwrite labels from the index `first` on."""
        self.table[:, first : first + len(labels)] = labels.table

    def _column(self, index: int) -> IntArray:
        column: IntArray = self.table[index]
        return column

    def __len__(self) -> int:
        return int(self.table.shape[1])

    @property
    def cost(self) -> FloatArray:
        """Milliseconds so far."""
        return self._column(_COST).view(np.float64)

    @property
    def rank(self) -> FloatArray:
        """Cost and the way back from `machine` to `start`: the telescoped penalty."""
        return self._column(_RANK).view(np.float64)

    @property
    def machine(self) -> IntArray:
        """The machine of the last hop."""
        return self._column(_MACHINE)

    @property
    def start(self) -> IntArray:
        """The machine of the first hop."""
        return self._column(_START)

    @property
    def used_key(self) -> npt.NDArray[np.uint64]:
        """Equal for equal sets of used machines."""
        return self._column(_USED_KEY).view(np.uint64)

    @property
    def stop(self) -> IntArray:
        """Where the last hop ends."""
        return self._column(_STOP)

    @property
    def parent(self) -> IntArray:
        """The settled label that the last hop extends."""
        return self._column(_PARENT)


class SettledLabels:
    """Labels that were extended, with the machines that each uses. Index 0 is the empty circuit."""

    def __init__(self, machines: int) -> None:
        self._labels = Labels.of(1)
        self._used = np.zeros((1, machines), dtype=np.bool_)
        self._count = 1

    def add(self, labels: Labels) -> int:
        """Settle labels; returns the index of the first."""
        first, stop = self._count, self._count + len(labels)
        if stop > len(self._labels):
            more = max(stop, 2 * len(self._labels)) - len(self._labels)
            self._labels = Labels.join((self._labels, Labels.of(more)))
            self._used = np.concatenate((self._used, np.zeros((more, self._used.shape[1]), dtype=np.bool_)))
        self._labels.put(first, labels)
        self._used[first:stop] = self._used[labels.parent]
        self._used[np.arange(first, stop), labels.machine] = True
        self._count = stop
        return first

    def used(self, first: int, count: int) -> BoolArray:
        """[count, machines]: the machines that the labels use."""
        return self._used[first : first + count]

    def hops(self, index: int) -> tuple[Hop, ...]:
        """The hops of a label, in order."""
        hops: list[Hop] = []
        while index > 0:
            machine, stop = int(self._labels.machine[index]), int(self._labels.stop[index])
            index = int(self._labels.parent[index])
            hops.append(Hop(machine, int(self._labels.stop[index]), stop))
        return tuple(reversed(hops))


def machine_keys(machines: int) -> npt.NDArray[np.uint64]:
    """Numbers whose exclusive or identifies a set of machines: for certain up to 64, beyond with odds of
    2**64 to 1."""
    if machines <= 64:
        return np.left_shift(np.uint64(1), np.arange(machines, dtype=np.uint64))
    # SplitMix64 (Steele, Lea and Flood, 2014) of the machine's index.
    mixed = np.arange(1, machines + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def place_in_run(values: IntArray) -> IntArray:
    """The position of each of the sorted values among its equals."""
    index = np.arange(len(values))
    begins = np.ones(len(values), dtype=np.bool_)
    begins[1:] = values[1:] != values[:-1]
    return index - np.maximum.accumulate(np.where(begins, index, 0))
