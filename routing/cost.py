"""What a router assumes where nobody has measured, and how announcements become milliseconds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median

import numpy as np

from molink.dht.records import LayerLatency
from molink.routing.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class CostModel:
    """The assumptions of a plan. All are positive."""

    unknown_rtt_ms: float = 100.0
    """Round trip between peers of which nothing was measured: below the mean of 21 cloud regions (153 ms),
    since volunteers of one swarm tend to be near each other, and well above a city's, so that measured links
    win."""
    hop_overhead_ms: float = 1.0
    """Added to every link: framing, copying to and from the device, and the event loops at both ends."""
    load_amortisation_tokens: float = 2000.0
    """Tokens over which loading a cold layer must pay off: a few generations, for layers stay once they are
    held."""
    load_layer_overhead_ms: float = 50.0
    """Loading one layer beyond reading its bytes: opening, checking hashes, placing it on the device. Keeps
    layers of small models from being loaded for gains within measurement noise."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be finite and above 0, got {value}")


def layer_ms_at(latencies: Sequence[LayerLatency], batch_size: int) -> float:
    """Milliseconds of one layer at a batch size: linear between measurements, along the last slope beyond
    them.

    Below the smallest measured batch size its own latency holds. The slope beyond is never negative.
    """
    ordered = sorted(latencies, key=lambda latency: latency.batch_size)
    sizes = [float(latency.batch_size) for latency in ordered]
    times = [latency.layer_ms for latency in ordered]
    known = float(np.interp(batch_size, sizes, times))
    if batch_size <= sizes[-1] or len(sizes) < 2 or sizes[-1] == sizes[-2]:
        return known
    slope = max(0.0, (times[-1] - times[-2]) / (sizes[-1] - sizes[-2]))
    return known + slope * (batch_size - sizes[-1])


def one_way_ms(
    peer_ids: Sequence[str], rtt_ms: Mapping[tuple[str, str], float], cost: CostModel
) -> FloatArray:
    """[peers, peers]: half the round trip and the overhead of a hop, row = from; the diagonal is 0.

    For each pair the first of these that is known: the sender's measurement, the receiver's, the mean of both
    peers' medians over all they measured or that were measured to them, `unknown_rtt_ms`. Other entries of
    `rtt_ms`, to peers that are not listed, count for the medians. Numbers that cannot be round trips are left
    out.
    """
    index = {peer_id: position for position, peer_id in enumerate(peer_ids)}
    known = {
        pair: rtt for pair, rtt in rtt_ms.items() if math.isfinite(rtt) and rtt >= 0 and pair[0] != pair[1]
    }
    measured = np.full((len(peer_ids), len(peer_ids)), np.nan)
    for (source, target), rtt in known.items():
        if source in index and target in index:
            measured[index[source], index[target]] = rtt
    result = np.where(np.isnan(measured), measured.T, measured)
    typical = _typical_rtt_ms(peer_ids, known.items())
    pairs = np.stack(np.broadcast_arrays(typical[:, None], typical[None, :]))
    given = ~np.isnan(pairs)
    total = np.where(given, pairs, 0.0).sum(axis=0)
    guess = np.where(given.any(axis=0), total / np.maximum(1, given.sum(axis=0)), cost.unknown_rtt_ms)
    result = np.where(np.isnan(result), guess, result) / 2 + cost.hop_overhead_ms
    np.fill_diagonal(result, 0.0)
    return np.asarray(result, dtype=np.float64)


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
