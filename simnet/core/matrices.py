"""Matrices of round-trip times between regions: the bundled one, and files of the user's own.

The format is a comma-separated table: a header row whose first cell is ignored and whose others name the
regions to which it goes, then a row for each region from which it goes, named in its first cell; the cells are
round-trip milliseconds, and the diagonal is the round trip within a region.
"""

import csv
import io
import math
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from molink.routing.arrays import FloatArray, float_array

BUNDLED = "aws21_rtt_ms.csv"
_LONGEST_RTT_MS = 1e6
"""A quarter of an hour: what is longer is another unit or another kind of file."""


Latencies = tuple[tuple[float, ...], ...]
"""One-way milliseconds from each machine to each; 0 on the diagonal."""


class MatrixError(ValueError):
    """The text is no such matrix; the message is one sentence that names file, row and column."""


@dataclass(frozen=True, slots=True, eq=False)
class RttMatrix:
    """Round-trip times between regions, complete and in both directions.

    Raises:
        ValueError: the table has another shape, or numbers that are no times.
    """

    regions: tuple[str, ...]
    rtt_ms: FloatArray
    """[regions, regions] milliseconds, row = from; the diagonal is the round trip within a region."""

    def __post_init__(self) -> None:
        count = len(self.regions)
        if count == 0 or len(set(self.regions)) != count:
            raise ValueError("regions must be at least one, each with a name of its own")
        object.__setattr__(self, "rtt_ms", float_array("rtt_ms", self.rtt_ms, (count, count)))


@cache
def bundled_matrix() -> RttMatrix:
    """Between 21 AWS regions; `data/PROVENANCE.md` says where it comes from."""
    text = files("molink.simnet").joinpath("data", BUNDLED).read_text(encoding="utf-8")
    return parse_matrix(text, BUNDLED)


def read_matrix(path: Path) -> RttMatrix:
    """The matrix in a file; raises MatrixError if it cannot be read or holds something else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise MatrixError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise MatrixError(f"{path} is no text in UTF-8: byte {error.start} is out of place") from error
    return parse_matrix(text, str(path))


def latencies_between(matrix: RttMatrix, machines: int) -> Latencies:
    """One-way latencies of machines, one in each region by turns: half of the mean round trip of both directions."""
    one_way_ms = (matrix.rtt_ms + matrix.rtt_ms.T) / 4
    regions = len(matrix.regions)
    return tuple(
        tuple(float(one_way_ms[a % regions, b % regions]) if a != b else 0.0 for b in range(machines))
        for a in range(machines)
    )


def mean_link_ms(latencies: Latencies) -> float:
    """The mean latency of a circuit's links, from each machine to the next and from the last to the first."""
    hops = len(latencies)
    return sum(latencies[hop][(hop + 1) % hops] for hop in range(hops)) / hops


def parse_matrix(text: str, name: str) -> RttMatrix:
    """The matrix that `text` holds; `name` is what errors call the file. Blank lines are left out.

    Rows may come in another order than the columns. Raises MatrixError naming file, row and column.
    """
    lines = _rows(text, name)
    if not lines:
        raise MatrixError(f"{name} is empty: it needs a header row and a row for each region")
    regions = _regions(lines[0][1], f"{name}, row {lines[0][0]}")
    found: dict[str, list[float]] = {}
    for number, cells in lines[1:]:
        where = f"{name}, row {number}"
        region = cells[0]
        if region not in regions:
            raise MatrixError(f"{where}: the header has no column {region!r}")
        if region in found:
            raise MatrixError(f"{where}: region {region!r} has a row already")
        if len(cells) != len(regions) + 1:
            raise MatrixError(
                f"{where} ({region}) has {len(cells) - 1} values, the header {len(regions)} regions"
            )
        found[region] = [
            _round_trip_ms(cell, f"{where} ({region}), column {column} ({regions[column - 2]})")
            for column, cell in enumerate(cells[1:], start=2)
        ]
    missing = [region for region in regions if region not in found]
    if missing:
        raise MatrixError(f"{name} has no row for region {missing[0]!r}, which its header names")
    return RttMatrix(regions, np.array([found[region] for region in regions]))


def _rows(text: str, name: str) -> list[tuple[int, list[str]]]:
    """The lines that hold something, each with its number in the file."""
    reader = csv.reader(io.StringIO(text), strict=True)
    lines = []
    try:
        for cells in reader:
            stripped = [cell.strip() for cell in cells]
            if any(stripped):
                lines.append((reader.line_num, stripped))
    except csv.Error as error:
        raise MatrixError(f"{name}, row {reader.line_num}, is no comma-separated text: {error}") from error
    return lines


def _regions(header: list[str], where: str) -> tuple[str, ...]:
    regions = tuple(header[1:])
    if not regions:
        raise MatrixError(f"{where}: the header names no region; are the values separated by commas?")
    seen: set[str] = set()
    for column, region in enumerate(regions, start=2):
        if not region:
            raise MatrixError(f"{where}, column {column}: the header has no name")
        if region in seen:
            raise MatrixError(f"{where}, column {column}: the header names region {region!r} twice")
        seen.add(region)
    return regions


def _round_trip_ms(cell: str, where: str) -> float:
    if not cell:
        raise MatrixError(f"{where}: the value is missing")
    try:
        value = float(cell)
    except ValueError:
        raise MatrixError(f"{where}: {cell!r} is no number") from None
    if not math.isfinite(value) or not 0 <= value <= _LONGEST_RTT_MS:
        raise MatrixError(
            f"{where}: {cell} is no round-trip time in milliseconds (0 to {_LONGEST_RTT_MS:.0f})"
        )
    return value
