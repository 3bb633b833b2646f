"""Milliseconds between peers: what was measured, what coordinates predict, and what is assumed of the rest."""

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import numpy as np

from molink.dht.records import Coordinate
from molink.routing.arrays import FloatArray
from molink.routing.coordinates import USABLE_ERROR, CoordinateTable
from molink.routing.cost import CostModel


def one_way_ms(
    peer_ids: Sequence[str],
    rtt_ms: Mapping[tuple[str, str], float],
    coordinates: Sequence[Coordinate | None],
    cost: CostModel,
) -> FloatArray:
    """[peers, peers]: half the round trip and the overhead of a hop, row = from; the diagonal is 0.

    For each pair the first of these that is known: the sender's measurement, the receiver's, what the
    coordinates of both predict if neither is further off than USABLE_ERROR, the mean of both peers' medians
    over all they measured or that were measured to them, `cost.unknown_rtt_ms`. `coordinates` are in the order
    of `peer_ids`. Other entries of `rtt_ms`, to peers that are not listed, count for the medians. Numbers that
    cannot be round trips are left out.
    """
    index = {peer_id: position for position, peer_id in enumerate(peer_ids)}
    known = {
        pair: rtt for pair, rtt in rtt_ms.items() if math.isfinite(rtt) and rtt >= 0 and pair[0] != pair[1]
    }
    measured = np.full((len(peer_ids), len(peer_ids)), np.nan)
    for (source, target), rtt in known.items():
        if source in index and target in index:
            measured[index[source], index[target]] = rtt
    result = measured
    for fallback in (measured.T, _predicted_rtt_ms(coordinates)):
        result = np.where(np.isnan(result), fallback, result)
    if (unknown := np.isnan(result)).any():
        result = np.where(unknown, _guessed_rtt_ms(peer_ids, known, cost), result)
    result = result / 2 + cost.hop_overhead_ms
    np.fill_diagonal(result, 0.0)
    return np.asarray(result, dtype=np.float64)


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
    """[peers]: the median of the round trips from or to each peer; NaN where there are none."""
    trips: dict[str, list[float]] = {peer_id: [] for peer_id in peer_ids}
    for pair, rtt in known:
        for peer_id in pair:
            if peer_id in trips:
                trips[peer_id].append(rtt)
    return np.array(
        [median(trips[peer_id]) if trips[peer_id] else np.nan for peer_id in peer_ids], dtype=np.float64
    )
