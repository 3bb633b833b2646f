"""Cost model: what a router assumes where nobody has measured, and how announcements become milliseconds."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter

from molink.dht.records.records import LayerLatency, PrefillLatency

_SIZE = attrgetter("batch_size")


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

    unknown_bandwidth_mbps: float = 20.0
    """Uplink of a peer that has not measured and announced its own: a common cable line's."""
    unknown_row_share: float = 0.1
    """Where only one batch size was measured: what each further row adds, as a part of that time. Eight
    sequences in one pass run at 4 to 5 times the serial rate on two processor cores, hence (8 / 4.5 - 1) / 7."""
    steps_per_batch: int = 64
    """Waiting steps that a peer computes together; a prompt's chunk leaves so many rows of a step to them."""
    head_service_ms: float = 0.5
    """What a head of one processor does for its client with each token: taking it in, beginning the next
    step, sending it on. Several processors share it with the computation."""
    session_tpot_ms: float = 200.0
    """What a token takes, for a session's length and a peer's utilisation, before its circuit is known: the
    level of the decentralized-scheduling paper's testbeds."""
    mean_lifetime_s: float = 7200.0
    """How long a peer of which nothing is known stays, on average: a volunteer's evening."""
    recovery_ms: float = 5000.0
    """From the loss of a peer to another circuit: noticing it takes 4 s, forming about one more. Doing the
    prefill again comes on top."""
    lookup_tokens_per_trip: float = 1.4
    """Tokens that a trip brings where its head guesses from sequences themselves: the bundled model's brought 1.14 at
    temperature 0.8, and 1.98 greedily."""
    draft_tokens_per_trip: float = 2.0
    """The same where it guesses with a draft model too: there 1.63 and 2.94."""
    most_tokens_per_trip: float = 4.0
    """No head is expected to bring more, whatever was measured: circuits would be chosen by what heads say of the steps
    that tokens came of."""
    assumed_trips: float = 64.0
    """For so many measured trips counts what is assumed of a head's guesses."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be finite and above 0, got {value}")


PROFILED_CONTEXT_TOKENS = 64
"""What each sequence holds when a peer measures its decode steps."""


def decode_context_ms(per_1000_ms: float, context_tokens: float) -> float:
    """Returns what one sequence's decode step takes longer for its context than it did when it was measured, in one
    layer."""
    return per_1000_ms * max(0.0, context_tokens - PROFILED_CONTEXT_TOKENS) / 1000


def prefill_context_ms(per_1000_ms: float, rows: float, context_tokens: float) -> float:
    """Returns what so many rows of a prompt take longer because so many tokens came before them, in one layer."""
    return per_1000_ms * rows * context_tokens / 1000


def layer_ms_at(latencies: Sequence[LayerLatency], batch_size: int) -> float:
    """Milliseconds of one layer at a batch size: linear between measurements, along the last slope beyond
    them.

    Below the smallest measured batch size its own latency holds. The slope beyond is never negative.
    """
    ordered = sorted(latencies, key=_SIZE)
    after = bisect_right(ordered, batch_size, key=_SIZE)
    if after == 0:
        return ordered[0].layer_ms
    below = ordered[after - 1]
    if batch_size == below.batch_size or len(ordered) == 1:
        return below.layer_ms
    if after < len(ordered):
        return below.layer_ms + _slope(below, ordered[after]) * (batch_size - below.batch_size)
    before = ordered[-2]
    if before.batch_size == below.batch_size:
        return below.layer_ms
    return below.layer_ms + max(0.0, _slope(before, below)) * (batch_size - below.batch_size)


def _slope(low: LayerLatency, high: LayerLatency) -> float:
    return (high.layer_ms - low.layer_ms) / (high.batch_size - low.batch_size)


def prefill_layer_ms(
    latencies: Sequence[LayerLatency], rows: int, cost: CostModel, measured: Sequence[PrefillLatency] = ()
) -> float:
    """Milliseconds of one layer for `rows` rows of a prompt: from the prefills that were `measured`, if any,
    and else from decode steps.

    Beyond the largest, by the mean slope of all: the last two sizes alone are within noise of each other on a
    fast device, and a prompt may be far beyond them. What attention adds as the prompt grows is left out.
    """
    points, slope = prefill_points(latencies, cost, measured)
    largest = points[-1]
    if rows <= largest.batch_size:
        return layer_ms_at(points, rows)
    return largest.layer_ms + slope * (rows - largest.batch_size)


def prefill_points(
    latencies: Sequence[LayerLatency], cost: CostModel, measured: Sequence[PrefillLatency] = ()
) -> tuple[list[LayerLatency], float]:
    """What `prefill_layer_ms` goes by: one layer at some numbers of rows, ascending, and what each row beyond the
    largest adds."""
    if measured:
        single = LayerLatency(1, min(layer_ms_at(latencies, 1), measured[0].layer_ms))
        prompts = (
            LayerLatency(prefill.tokens, prefill.layer_ms) for prefill in measured if prefill.tokens > 1
        )
        latencies = (single, *prompts)
    ordered = sorted(latencies, key=_SIZE)
    smallest, largest = ordered[0], ordered[-1]
    if largest.batch_size > smallest.batch_size:
        sizes = largest.batch_size - smallest.batch_size
        return ordered, max(0.0, (largest.layer_ms - smallest.layer_ms) / sizes)
    return ordered, cost.unknown_row_share * largest.layer_ms / largest.batch_size
