"""One-way latencies between machines: a matrix, or predictions from network coordinates with measured exceptions.

The coordinate form is for swarms too large for a matrix: 10,000 machines have 100 million ordered pairs. A
prediction is the distance between the positions plus the heights of both ends (Dabek, Cox, Kaashoek and Morris,
"Vivaldi: A Decentralized Network Coordinate System", 2004, section 5.4), here in one-way milliseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from molink.routing.arrays import FloatArray, IntArray, float_array

Measured = Mapping[tuple[int, int], float] | tuple[Any, Any, Any]
"""(source, target) to one-way milliseconds, or the three as parallel sequences; one direction each. Of two
values for one pair the later counts."""


class OneWayLatencies(Protocol):
    """One-way milliseconds between machines; 0 from a machine to itself."""

    def block(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """[rows, columns]: from each of the rows to each of the columns, which are all different."""
        ...

    def pairs(self, rows: IntArray, columns: IntArray) -> FloatArray:
        """From rows[i] to columns[i] for every i; the arrays have one shape, which is the result's too."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class MatrixLinks:
    """Latencies of which every one is known."""

    latency_ms: FloatArray
    """[machines, machines], row = from; the diagonal is ignored."""

    def block(self, rows: IntArray, columns: IntArray) -> FloatArray:
        block = self.latency_ms[rows[:, None], columns[None, :]]
        block[rows[:, None] == columns[None, :]] = 0.0
        return block

    def pairs(self, rows: IntArray, columns: IntArray) -> FloatArray:
        values: FloatArray = np.where(rows == columns, 0.0, self.latency_ms[rows, columns])
        return values


@dataclass(frozen=True, slots=True, eq=False)
class CoordinateLinks:
    """Latencies predicted from coordinates, but for the measured ones. Memory grows with machines plus
    measurements."""

    positions: FloatArray
    """[machines, dimensions], in one-way milliseconds."""
    heights_ms: FloatArray
    """[machines]"""
    first: IntArray
    """[machines + 1]: where each machine's measurements begin in the two arrays below."""
    targets: IntArray
    """[measurements]: ascending for each source."""
    measured_ms: FloatArray
    """[measurements]"""

    @classmethod
    def of(cls, positions: object, heights_ms: object, measured: Measured | None) -> "CoordinateLinks":
        """Checked copies; raises ValueError naming `positions`, `heights_ms` or `measured`."""
        heights = float_array("heights_ms", heights_ms, (np.size(np.asarray(heights_ms)),))
        machines = len(heights)
        try:
            places = np.array(positions, dtype=np.float64)
        except (ValueError, TypeError) as error:
            raise ValueError(f"positions is not an array of numbers: {error}") from error
        if places.ndim != 2 or len(places) != machines:
            raise ValueError(f"positions must have the shape ({machines}, dimensions), got {places.shape}")
        if not np.isfinite(places).all():
            raise ValueError("positions must be finite, got NaN or infinity")
        source, target, one_way_ms = _measurements(measured, machines)
        keys = source * machines + target
        order = np.argsort(keys, kind="stable")
        latest = np.ones(len(order), dtype=np.bool_)
        latest[:-1] = keys[order[1:]] != keys[order[:-1]]
        order = order[latest]
        first = np.searchsorted(source[order], np.arange(machines + 1))
        columns = (places, heights, first, target[order], one_way_ms[order])
        for column in columns:
            column.setflags(write=False)
        return cls(*columns)

    def block(self, rows: IntArray, columns: IntArray) -> FloatArray:
        result = self._predicted(rows[:, None], columns[None, :])
        place = np.full(len(self.heights_ms), -1)
        place[columns] = np.arange(len(columns))
        counts = self.first[rows + 1] - self.first[rows]
        row = np.repeat(np.arange(len(rows)), counts)
        entry = np.arange(len(row)) + np.repeat(self.first[rows] - np.cumsum(counts) + counts, counts)
        column = place[self.targets[entry]]
        among = column >= 0
        result[row[among], column[among]] = self.measured_ms[entry[among]]
        result[rows[:, None] == columns[None, :]] = 0.0
        return result

    def pairs(self, rows: IntArray, columns: IntArray) -> FloatArray:
        result = self._predicted(rows, columns)
        if self.targets.size:
            machines = len(self.heights_ms)
            sources = np.repeat(np.arange(machines), np.diff(self.first))
            keys, wanted = sources * machines + self.targets, rows * machines + columns
            entry = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            result = np.where(keys[entry] == wanted, self.measured_ms[entry], result)
        return np.where(rows == columns, 0.0, result)

    def _predicted(self, rows: IntArray, columns: IntArray) -> FloatArray:
        distance = np.zeros(np.broadcast_shapes(rows.shape, columns.shape))
        for axis in self.positions.T:  # One dimension at a time: no array of differences in all of them.
            distance += (axis[rows] - axis[columns]) ** 2
        np.sqrt(distance, out=distance)
        distance += self.heights_ms[rows]
        distance += self.heights_ms[columns]
        return distance


def _measurements(measured: Measured | None, machines: int) -> tuple[IntArray, IntArray, FloatArray]:
    if measured is None:
        measured = {}
    if isinstance(measured, Mapping):
        pairs = np.array(list(measured), dtype=np.int64).reshape(-1, 2)
        ends: tuple[Any, Any, Any] = (pairs[:, 0], pairs[:, 1], list(measured.values()))
    else:
        ends = measured
    if len(ends) != 3:
        raise ValueError("measured must be a mapping of pairs or (sources, targets, one_way_ms)")
    count = len(ends[2])
    one_way_ms = float_array("measured", ends[2], (count,))
    source, target = (np.asarray(end) for end in ends[:2])
    for end in (source, target):
        if end.shape != (count,) or (count and end.dtype.kind not in "iu"):
            raise ValueError(f"measured must name as many sources and targets as latencies ({count})")
        if count and (int(end.min()) < 0 or int(end.max()) >= machines):
            raise ValueError(f"measured must name machines from 0 to {machines - 1}")
    return source.astype(np.int64), target.astype(np.int64), one_way_ms
