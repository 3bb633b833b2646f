"""Network coordinates: where peers are in a space whose distances are round trips. Pure.

Vivaldi with height (Dabek, Cox, Kaashoek, Morris: Vivaldi, a decentralized network coordinate system, SIGCOMM
2004): a peer moves as if a spring as long as each measured round trip held it to the other end, weighted by how
sure both are. The height stands for the access link, which every path of a home goes through.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.random import Generator, default_rng

from molink.dht.records.records import (
    COORDINATE_DIMENSIONS,
    MAX_COORDINATE_ERROR,
    MAX_COORDINATE_MS,
    Coordinate,
)
from molink.routing.arrays import FloatArray, IntArray

MOVE_GAIN = 0.25
"""c_c of the paper's figure 3: the part of a misfit by which an entirely unsure peer moves. 0.25 is the paper's
choice between slow and never settling."""
ERROR_GAIN = 0.25
"""c_e of figure 3: how fast the error follows new samples. 0.25 as in Serf, a deployment of many years."""
MIN_ERROR = 0.05
"""Nobody is surer than this, so that nobody's word weighs without limit."""
MIN_HEIGHT_MS = 0.05
"""A height never reaches 0: no prediction is free, and a height of 0 could never grow again."""
MAX_MOVE_MS = 50.0
"""Farthest that one sample moves a peer, whatever a liar announces or how long it holds back its answer. An
honest round trip of 200 ms moves nobody farther."""
MAX_RTT_MS = 60_000.0
OUTLIER = 5.0
"""A neighbour whose coordinate misfits its round trip by so many times the median of all is left out: it lies, or is
on the same local network, which a height cannot express."""
PULL = 1.5
"""A neighbour whose round trip is further from what the coordinates say than so many times the median of all counts as
no further than that (Huber's bound, as of robust regression)."""
LEAST_PULL_MS = 1.0
"""Round trips vary by so much."""
USABLE_ERROR = 0.5
"""Predictions between two peers that are both at most this wrong go before a guess."""
START = Coordinate((0.0,) * COORDINATE_DIMENSIONS, 1.0, 1.0)
"""Where a peer begins: nowhere in particular, and sure of nothing (figure 3)."""

_COINCIDING_MS = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class CoordinateTable:
    """Coordinates of many peers as arrays."""

    positions: FloatArray
    """[peers, dimensions], in milliseconds of round trip."""
    heights_ms: FloatArray
    """[peers]."""
    errors: FloatArray
    """[peers]."""

    @classmethod
    def of(cls, coordinates: Sequence[Coordinate]) -> "CoordinateTable":
        """One row for each coordinate."""
        shape = (len(coordinates), COORDINATE_DIMENSIONS)
        return cls(
            np.array([each.position for each in coordinates], dtype=np.float64).reshape(shape),
            np.array([each.height_ms for each in coordinates], dtype=np.float64),
            np.array([each.error for each in coordinates], dtype=np.float64),
        )

    def take(self, rows: IntArray) -> "CoordinateTable":
        """The given rows."""
        return CoordinateTable(self.positions[rows], self.heights_ms[rows], self.errors[rows])

    def rtt_ms(self) -> FloatArray:
        """[peers, peers]: predicted round trips, as `predicted_rtt_ms`; the diagonal is 0."""
        squared = np.zeros((len(self.heights_ms),) * 2)
        for axis in self.positions.T:  # one at a time: all at once would take memory for several matrices
            squared += (axis[:, None] - axis[None, :]) ** 2
        result = np.sqrt(squared) + (self.heights_ms[:, None] + self.heights_ms[None, :])
        np.fill_diagonal(result, 0.0)
        return np.asarray(result, dtype=np.float64)


def predicted_rtt_ms(a: Coordinate, b: Coordinate) -> float:
    """The round trip between two peers: the way between their positions, and both access links."""
    return math.dist(a.position, b.position) + (a.height_ms + b.height_ms)


def moved_ms(before: Coordinate, now: Coordinate) -> float:
    """The most that any prediction has changed by from one coordinate of a peer to another."""
    return math.dist(before.position, now.position) + abs(before.height_ms - now.height_ms)


def direction_between(own_id: str, other_id: str) -> tuple[float, ...]:
    """A unit vector that looks random and depends on the ids alone: where a peer turns that coincides with
    another."""
    digest = hashlib.shake_256(f"{own_id}\0{other_id}".encode()).digest(4 * COORDINATE_DIMENSIONS)
    parts = [
        int.from_bytes(digest[at : at + 4], "little") / 2**31 - 1 + 2**-33 for at in range(0, len(digest), 4)
    ]
    length = math.hypot(*parts)
    return tuple(part / length for part in parts)


def updated(own: Coordinate, other: Coordinate, rtt_ms: float, direction: Sequence[float]) -> Coordinate:
    """`own` after one measured round trip to a peer at `other`.

    `direction` is a unit vector, taken where the two coincide. However wrong `other` and `rtt_ms` are, the move
    is bounded by MAX_MOVE_MS and the result is a valid coordinate. Raises ValueError if `rtt_ms` is no round
    trip.
    """
    if not 0 < rtt_ms <= MAX_RTT_MS:
        raise ValueError(f"rtt_ms must be above 0 and at most {MAX_RTT_MS:g}, got {rtt_ms}")
    moved = _moved(
        CoordinateTable.of([own]), CoordinateTable.of([other]), np.array([rtt_ms]), np.array([direction])
    )
    position = tuple(float(value) for value in moved.positions[0])
    return Coordinate(position, float(moved.heights_ms[0]), float(moved.errors[0]))


def placed(
    own_id: str, own: Coordinate, samples: Mapping[str, tuple[Coordinate, float]], passes: int = 1
) -> Coordinate:
    """`own` after a round of samples: by peer id, the neighbour's coordinate and the round trip in milliseconds.

    The samples are taken in the order of the ids, `passes` times over; outliers among them count for nothing, and none
    pulls further than PULL times as far as the middle one: a neighbour can say that it is anywhere, and answer as late
    as it likes.
    """
    misfits = {
        peer_id: abs(predicted_rtt_ms(own, other) - rtt_ms) / rtt_ms
        for peer_id, (other, rtt_ms) in samples.items()
    }
    most = OUTLIER * max(1.0, median(misfits.values())) if misfits else 0.0
    kept = [peer_id for peer_id in sorted(samples) if misfits[peer_id] <= most]
    # Who says to be surer than the middle one weighs no more for it.
    least_error = median(samples[peer_id][0].error for peer_id in kept) if kept else 0.0
    for _ in range(passes):
        predicted = {peer_id: predicted_rtt_ms(own, samples[peer_id][0]) for peer_id in kept}
        off_ms = {peer_id: samples[peer_id][1] - predicted[peer_id] for peer_id in kept}
        most_ms = PULL * max(LEAST_PULL_MS, median(map(abs, off_ms.values()))) if kept else 0.0
        for peer_id in kept:
            other, rtt_ms = samples[peer_id]
            if off_ms[peer_id] > most_ms:
                rtt_ms = min(predicted_rtt_ms(own, other) + most_ms, MAX_RTT_MS)
            elif off_ms[peer_id] < -most_ms:  # others may have moved this peer there already, or beyond
                rtt_ms = max(predicted_rtt_ms(own, other) - most_ms, rtt_ms)
            if other.error < least_error:
                other = replace(other, error=least_error)
            own = updated(own, other, rtt_ms, direction_between(own_id, peer_id))
    return own


def fit(rtt_ms: FloatArray, *, rounds: int = 500, neighbours: int = 16, seed: int = 0) -> CoordinateTable:
    """Coordinates of all peers of a matrix of round trips, as simulated peers would find them.

    `rtt_ms` is [peers, peers]; NaN where nothing was measured, the diagonal is ignored. Each peer draws
    `neighbours` others that it has measured (fewer if there are fewer) and keeps to them; in each round every
    peer samples one of them.
    """
    rng = default_rng(seed)
    peers = len(rtt_ms)
    known = np.full((peers, min(neighbours, max(1, peers - 1))), np.nan)
    chosen = np.zeros(known.shape, dtype=np.int64)
    for peer, row in enumerate(rtt_ms):
        others = np.flatnonzero(~np.isnan(row))
        drawn = rng.permutation(others[others != peer])[: known.shape[1]]
        chosen[peer, : len(drawn)] = drawn
        known[peer, : len(drawn)] = row[drawn]
    return fit_neighbours(chosen, known, rounds=rounds, seed=seed)


def fit_neighbours(
    neighbours: IntArray, rtt_ms: FloatArray, *, rounds: int = 500, seed: int = 0
) -> CoordinateTable:
    """As `fit`, from the round trips that each peer measured to its own neighbours: both arrays are [peers,
    neighbours], NaN where there is none."""
    rng = default_rng(seed)
    table = CoordinateTable.of([START] * len(neighbours))
    measured = ~np.isnan(rtt_ms)
    rows = np.flatnonzero(measured.any(axis=1))
    for _ in range(rounds if rows.size else 0):
        pick = np.where(measured[rows], rng.random((rows.size, rtt_ms.shape[1])), -1.0).argmax(axis=1)
        other = table.take(neighbours[rows, pick])
        moved = _moved(table.take(rows), other, rtt_ms[rows, pick], _directions(rng, rows.size))
        table.positions[rows], table.heights_ms[rows] = moved.positions, moved.heights_ms
        table.errors[rows] = moved.errors
    return table


def _directions(rng: Generator, count: int) -> FloatArray:
    drawn = rng.normal(size=(count, COORDINATE_DIMENSIONS))
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), dtype=np.float64)


def _moved(
    own: CoordinateTable, other: CoordinateTable, rtt_ms: FloatArray, directions: FloatArray
) -> CoordinateTable:
    """The rule of figure 3 with the height vectors of section 5.4, one sample in each row."""
    weight = own.errors / (own.errors + np.maximum(other.errors, MIN_ERROR))
    apart = own.positions - other.positions
    between = np.linalg.norm(apart, axis=1)
    heights = own.heights_ms + other.heights_ms
    predicted = between + heights
    misfit = np.minimum(np.abs(predicted - rtt_ms), MAX_COORDINATE_ERROR * rtt_ms) / rtt_ms
    errors = own.errors + ERROR_GAIN * weight * (misfit - own.errors)
    move = np.clip(MOVE_GAIN * weight * (rtt_ms - predicted), -MAX_MOVE_MS, MAX_MOVE_MS)
    coincide = between < _COINCIDING_MS
    away = np.where(coincide[:, None], directions, apart / np.maximum(between, _COINCIDING_MS)[:, None])
    # Where they coincide, only a push can be answered by moving apart, and only a pull by sinking.
    along = np.where(coincide, np.maximum(move, 0.0), move * between / predicted)
    upwards = np.where(coincide, np.minimum(move, 0.0), move * heights / predicted)
    return CoordinateTable(
        np.clip(own.positions + along[:, None] * away, -MAX_COORDINATE_MS, MAX_COORDINATE_MS),
        np.clip(own.heights_ms + upwards, MIN_HEIGHT_MS, MAX_COORDINATE_MS),
        np.clip(errors, MIN_ERROR, MAX_COORDINATE_ERROR),
    )
