"""Latency matrix of peers in one-way milliseconds: measured, predicted from coordinates, or assumed."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from molink.dht.records.records import Coordinate
from molink.routing.arrays import FloatArray
from molink.routing.cost.cost import CostModel
from molink.routing.latency.coordinates import USABLE_ERROR, CoordinateTable

CONTRADICTED = 2.0
"""Two ends that measure one round trip differ by less: one of them lies, and to seem near is what pays."""


def latency_matrix_ms(
    peer_ids: Sequence[str],
    rtt_ms: Mapping[tuple[str, str], float],
    coordinates: Sequence[Coordinate | None],
    cost: CostModel,
) -> FloatArray:
    """[peers, peers]: half the round trip and the overhead of a hop, row = from; the diagonal is 0.

    For each pair the first of these that is known: the sender's measurement, or the receiver's if that is CONTRADICTED
    times as long; the receiver's; what the coordinates of both predict if neither is further off than USABLE_ERROR; the
    mean of both peers' medians over all they measured, or that were measured to them if they have measured nothing;
    `cost.unknown_rtt_ms`. So nobody seems much nearer to an honest peer than that one says, nor puts two others apart.
    `coordinates` are in the order of `peer_ids`. Other entries of `rtt_ms`, to peers that are not listed, count for the
    medians. Numbers that cannot be round trips are left out.
    """
    index = {peer_id: position for position, peer_id in enumerate(peer_ids)}
    known = {pair: rtt for pair, rtt in rtt_ms.items() if is_round_trip(rtt) and pair[0] != pair[1]}
    measured = np.full((len(peer_ids), len(peer_ids)), np.nan)
    for (source, target), rtt in known.items():
        if source in index and target in index:
            measured[index[source], index[target]] = rtt
    with np.errstate(invalid="ignore"):
        contradicted = CONTRADICTED * measured < measured.T
    result = np.where(np.isnan(measured) | contradicted, measured.T, measured)
    result = np.where(np.isnan(result), _predicted_rtt_ms(coordinates), result)
    if (unknown := np.isnan(result)).any():
        result = np.where(unknown, _guessed_rtt_ms(peer_ids, known, cost), result)
    result = result / 2 + cost.hop_overhead_ms
    np.fill_diagonal(result, 0.0)
    return np.asarray(result, dtype=np.float64)


def is_round_trip(rtt_ms: float) -> bool:
    """Whether a number can be a round trip in milliseconds."""
    return math.isfinite(rtt_ms) and rtt_ms >= 0


def _predicted_rtt_ms(coordinates: Sequence[Coordinate | None]) -> FloatArray:
    """[peers, peers]: NaN where one of the two has no coordinate that is good enough."""
    result = np.full((len(coordinates), len(coordinates)), np.nan)
    usable = {
        row: coordinate
        for row, coordinate in enumerate(coordinates)
        if coordinate is not None and coordinate.error <= USABLE_ERROR
    }
    rows = np.array(list(usable), dtype=np.int64)
    result[np.ix_(rows, rows)] = CoordinateTable.of(list(usable.values())).rtt_ms()
    return result


def _guessed_rtt_ms(
    peer_ids: Sequence[str], known: Mapping[tuple[str, str], float], cost: CostModel
) -> FloatArray:
    """[peers, peers]: the mean of both peers' medians, or of the one there is, or `cost.unknown_rtt_ms`."""
    typical = _typical_rtt_ms(peer_ids, known.items())
    pairs = np.stack(np.broadcast_arrays(typical[:, None], typical[None, :]))
    given = ~np.isnan(pairs)
    total = np.where(given, pairs, 0.0).sum(axis=0)
    guess = np.where(given.any(axis=0), total / np.maximum(1, given.sum(axis=0)), cost.unknown_rtt_ms)
    return np.asarray(guess, dtype=np.float64)


def _typical_rtt_ms(peer_ids: Sequence[str], known: Iterable[tuple[tuple[str, str], float]]) -> FloatArray:
    """[peers]: the median of the round trips that each peer has measured, else of those to it; NaN where there are
    none."""
    own: dict[str, list[float]] = {peer_id: [] for peer_id in peer_ids}
    others: dict[str, list[float]] = {peer_id: [] for peer_id in peer_ids}
    for (source, target), rtt in known:
        if source in own:
            own[source].append(rtt)
        if target in others:
            others[target].append(rtt)
    trips = [own[peer_id] or others[peer_id] for peer_id in peer_ids]
    return np.array([median(each) if each else np.nan for each in trips], dtype=np.float64)
