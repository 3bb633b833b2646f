"""Line model of one link: its rate, delay and queue, from when chunks arrived at its receiver. Pure."""

import math

from molink.peer.wire.estimation.bottleneck_model import BottleneckModel
from molink.peer.wire.estimation.estimator import DelayEstimator, RateEstimator
from molink.peer.wire.estimation.slow_start import SlowStart
from molink.peer.wire.transmission.flight import NO_PREDICTION, InFlightChunk

CHUNK_S = 0.003
"""A chunk of bulk occupies the line for so long."""
LONG_CHUNK_S = 0.012
"""The same while nobody decodes."""
FULL_S = 0.003
"""Bulk that waits so long on the way fills the line; if it waits less, more is tried."""
MOST_GAIN = 1.25
"""Of BBR's probing for bandwidth."""
GROWING_GAIN = 2.0
"""While the rate grows: twice as much in every round trip, as in slow start."""
MOST_OF_UPLINK = 1.5
"""A link is not taken to be faster than the uplink that it goes over by more than this: its rate is measured by the
receiver's clock, that of the uplink by ours."""


class LineModel:
    """Line model: the estimates of one link's line, and how much more than them is tried."""

    __slots__ = ("bottleneck", "delay", "gain", "rate", "slow_start")

    def __init__(self) -> None:
        self.rate = RateEstimator()
        self.delay = DelayEstimator()
        self.bottleneck = BottleneckModel()
        self.slow_start = SlowStart()
        self.gain = 1.0
        """What is sent at a time, relative to what the estimate allows."""

    def record_start(self, chunk: InFlightChunk, at_s: float, now_s: float) -> float | None:
        """Records the arrival of a chunk over a line of unknown rate. Returns the rate once it is found."""
        delay, more = self.delay, chunk.more
        queueing_s = delay.record_arrival(chunk.sent_s, at_s, now_s, more, chunk.unloaded)
        found = self.slow_start.record_arrival(
            at_s, chunk.size_bytes, queueing_s, more, delay.min_rtt_s or 0.0
        )
        if found is not None:
            self.rate.found(found)
        return found

    def record_arrival(
        self,
        chunk: InFlightChunk,
        rate: float,
        uplink_rate: float | None,
        in_flight_bytes: int,
        at_s: float,
        now_s: float,
    ) -> float | None:
        """Records the arrival of a chunk, at `at_s` of the receiver's clock, over a line that was known to have this
        rate; so much is still in flight. Returns the chunk's queueing in seconds; None where it took too long on the
        line itself to say anything of that."""
        delay, sent_s, size_bytes, more = self.delay, chunk.sent_s, chunk.size_bytes, chunk.more
        known = rate
        if self.rate.record_arrival(at_s, sent_s, size_bytes, more and not chunk.shared, delay.base_rtt_s):
            known = self._measured(rate, uplink_rate)
        delay.timed(at_s, size_bytes, MOST_GAIN * known, now_s)
        # Its own time on the line is not queueing. Taken from the estimate, so it must not weigh much.
        line_s = size_bytes / rate
        if line_s > 2 * LONG_CHUNK_S:
            return None
        if line_s > LONG_CHUNK_S:
            line_s = LONG_CHUNK_S
        queueing_s = delay.record_arrival(sent_s, at_s - line_s, now_s, more, chunk.unloaded)
        standing_s = delay.standing_s
        if more:
            most_gain = GROWING_GAIN if self.rate.grows else MOST_GAIN
            part = 1.0 - standing_s / FULL_S
            self.gain = 1.0 + (most_gain - 1.0) * part if part > 0.0 else 1.0
        if chunk.on_line is not NO_PREDICTION:
            self.bottleneck.record_arrival(
                chunk.on_line, queueing_s, now_s, in_flight_bytes / rate, standing_s
            )
        return queueing_s

    def _measured(self, before: float, uplink_rate: float | None) -> float:
        """The line was measured by its receiver's stamps; its rate was `before`. Returns what it is now."""
        self.rate.limit(MOST_OF_UPLINK * (uplink_rate or math.inf))
        known = self.rate.bytes_per_s or before
        if known > before:
            self.delay.jitter.forget()
        return known
