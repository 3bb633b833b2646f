"""Rate, delay and jitter estimation of a link from acknowledgements (after BBR). Pure: no clock, no socket.

The rate is the most that was measured while bulk was waiting to be sent, over some round trips (BBR's filter). What is
sent is bounded by what was measured before, and all that is late makes it less: anything but the most follows its own
window down, to nothing in the end. What is measured while nothing waits says how much there was to send, not what the
line could do; such measurements may raise the estimate and never lower it, and no estimate grows old while nothing
waits. The same goes for bulk that is over before it has filled a line, as copies of a few tokens are.
"""

import math
from collections import deque

MIN_SPAN_S = 0.020
"""A measurement spans at least so much of the receiver's time: stamps err by milliseconds."""
MIN_CHUNKS = 4
SAMPLES = 10
"""Measurements that count, each of a round trip or more: the window of BBR's filter."""
DELAY_WINDOW_S = 5.0
"""The least delay is that of one to two such windows."""
RAISE = 1.15
"""What is measured while nothing waits counts from so much above the estimate on: less is noise, and would add up."""
LEAST_RUN_BYTES = 128 * 1024
"""Of bulk that waited without a break: less than slow start's first window is over before it has filled a line, and
what is measured of it is the sender, whose window would follow that down."""
JITTER_WINDOW_S = 1.0
"""What chunks were held up in two of the last three such windows is jitter; once, it was chance."""
BORNE_S = 0.006
"""So much jitter the allowed queue bears anyway (`just_in_time.ALLOWED_S`): only what is more needs an allowance."""
LEVEL = 2.0
"""What is waited without a queue is jitter, so no more than so many times its spread; 2 to be sure, not measured."""
GROWTH = 1.25
FLAT = 3
"""A line whose rate still grew by a quarter within so many measurements may be faster yet (BBR's Startup)."""
SMOOTHING = 0.1
FIRST_ACK_LAG_S = 0.003
LONGEST_ACK_LAG_S = 0.100
"""An ack that comes later still was held up by something else."""


class RateEstimator:
    """Delivery rate estimator (BBR's maximum filter): bytes that arrive per second while more waits to be sent."""

    __slots__ = (
        "_best", "_busy", "_bytes", "_chunks", "_flat", "_min_span_s", "_run_bytes", "_samples", "_start_s",
        "_start_sent_s", "bytes_per_s",
    )  # fmt: skip

    def __init__(self, min_span_s: float = MIN_SPAN_S) -> None:
        self._min_span_s = min_span_s
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._start_s: float | None = None
        self._start_sent_s = 0.0
        self._bytes = 0
        self._chunks = 0
        self._busy = False
        self._run_bytes = 0
        """Of chunks behind which bulk waited, since there was none."""
        self._best = 0.0
        self._flat = 0
        self.bytes_per_s: float | None = None
        """The estimate; None until bulk was measured once."""

    def record_arrival(
        self, at_s: float, sent_s: float, size_bytes: int, more: bool, round_s: float = 0.0
    ) -> bool:
        """Records the arrival of a chunk. Returns whether it completes a measurement that counts.

        Args:
            at_s: by the receiver's clock.
            sent_s: by the sender's.
            more: bulk waited behind it for nothing but the line when it was sent.
            round_s: a measurement spans at least so much.
        """
        self._run_bytes = self._run_bytes + size_bytes if more else 0
        start_s = self._start_s
        if start_s is None or at_s < start_s or (more and not self._busy and self._chunks):
            self._restart(at_s, sent_s, more)
            return False
        self._bytes += size_bytes
        self._chunks += 1
        span_s = at_s - start_s
        if self._chunks >= MIN_CHUNKS and span_s >= self._min_span_s and span_s >= round_s:
            # Held up together and let go together, chunks arrive faster than any line: but not than they were sent.
            counts = self._add(self._bytes / max(span_s, sent_s - self._start_sent_s), self._busy)
            self._restart(at_s, sent_s, more)
            return counts
        if not more:
            self._busy = False
        return False

    @property
    def grows(self) -> bool:
        """Whether one of the last measurements was a good part above all before: the rate may still rise."""
        return self._flat < FLAT

    def found(self, bytes_per_s: float) -> None:
        """Raises the estimate to a rate that the line was seen to carry; earlier measurements are dropped."""
        if self.bytes_per_s is None or bytes_per_s > self.bytes_per_s:
            self._samples.clear()
            self._samples.append(bytes_per_s)
            self.bytes_per_s = self._best = bytes_per_s
            self._flat = FLAT

    def limit(self, most_bytes_per_s: float) -> None:
        """Bounds the estimate from above, whatever was measured."""
        if self.bytes_per_s is not None and self.bytes_per_s > most_bytes_per_s:
            self.bytes_per_s = most_bytes_per_s

    def idle(self) -> None:
        """Notes that nothing was sent for a while though bulk waited: the next measurement may not lower the rate."""
        self._busy = False

    def forget_start(self) -> None:
        """Drops the measurement under way: the next arrival does not follow the last one (a restored connection)."""
        self._start_s = None

    def _restart(self, at_s: float, sent_s: float, busy: bool) -> None:
        self._start_s = at_s
        self._start_sent_s = sent_s
        self._bytes = 0
        self._chunks = 0
        self._busy = busy

    def _add(self, bytes_per_s: float, busy: bool) -> bool:
        """Adds a measurement. Returns whether it counts."""
        known = self.bytes_per_s
        is_full = busy and self._run_bytes >= LEAST_RUN_BYTES
        counts = is_full or (known is not None and bytes_per_s > RAISE * known)
        if counts:
            self._samples.append(bytes_per_s)
            self._flat += 1
            if known is None or bytes_per_s >= GROWTH * self._best:
                self._best = bytes_per_s
                self._flat = 0
            elif self._flat >= SAMPLES:
                self._best = max(self._samples)
            self.bytes_per_s = max(self._samples)
        return counts


class WindowedMinimum:
    """Windowed minimum: the least value of the last one to two windows of time, in seconds."""

    __slots__ = ("_before", "_current", "_since_s", "_window_s", "least")

    def __init__(self, window_s: float = DELAY_WINDOW_S) -> None:
        self._window_s = window_s
        self._since_s = -math.inf
        self._current = math.inf
        self._before = math.inf
        self.least = math.inf
        """Infinite before anything was added."""

    def widen(self, window_s: float) -> None:
        """Sets the length of the windows, in seconds."""
        self._window_s = window_s

    def update(self, value: float, now_s: float) -> float:
        """Adds a value, and returns the least."""
        age_s = now_s - self._since_s
        if age_s > self._window_s:
            self._before = self._current if age_s <= 2 * self._window_s else math.inf
            self._current = value
            self._since_s = now_s
        elif value < self._current:
            self._current = value
        self.least = self._current if self._current < self._before else self._before
        return self.least


class JitterEstimator:
    """Jitter estimator: for how many seconds the way holds chunks up that it then lets go at once.

    No queue at a bottleneck lets anything out faster than the line's rate. What arrives faster was held up together
    behind it, for as long as it is ahead of the line: that is the spread of the delay that no waiting here removes.
    (BBR's draft-ietf-ccwg-bbr measures the same in bytes, as `extra_acked`.)
    """

    __slots__ = ("_ahead_s", "_last_s", "_most", "_since_s", "spread_s")

    def __init__(self) -> None:
        self._last_s = -math.inf
        self._ahead_s = 0.0
        self._most = deque((0.0, 0.0, 0.0), maxlen=3)
        self._since_s = -math.inf
        self.spread_s = 0.0
        """The most that chunks were lately ahead, more than once, beyond what the allowed queue bears anyway."""

    def record_arrival(self, at_s: float, size_bytes: int, bytes_per_s: float, now_s: float) -> None:
        """Records a chunk that arrived at `at_s` of the receiver's clock over a line of that rate."""
        ahead_s = self._ahead_s + size_bytes / bytes_per_s - (at_s - self._last_s)
        self._ahead_s = ahead_s if ahead_s > 0.0 else 0.0
        self._last_s = at_s
        most = self._most
        window_ends = now_s - self._since_s > JITTER_WINDOW_S
        if window_ends:
            self._since_s = now_s
            most.append(0.0)
        if self._ahead_s > most[-1] or window_ends:
            most[-1] = self._ahead_s
            self.spread_s = max(0.0, sorted(most)[1] - BORNE_S)

    def forget(self) -> None:
        """Resets the lead of chunks over the line's rate: the rate was taken to be lower than it is."""
        self._ahead_s = 0.0


class DelayEstimator:
    """Delay estimator: queueing on the way, and the round trip without it. A clock offset between the ends cancels.

    What it knows is read more often than it is learnt, and therefore worked out when it is.
    """

    __slots__ = (
        "_ack_lag_s",
        "_least_rtt",
        "_least_way",
        "_low",
        "_smoothed_standing_s",
        "_smoothed_unloaded_s",
        "base_rtt_s",
        "jitter",
        "min_rtt_s",
        "queueing_s",
        "round_s",
        "standing_s",
    )

    def __init__(self) -> None:
        self._least_way = WindowedMinimum()
        self._least_rtt = WindowedMinimum()
        self._ack_lag_s = FIRST_ACK_LAG_S
        self._low = WindowedMinimum(0.0)
        self.jitter = JitterEstimator()
        self._smoothed_unloaded_s = 0.0
        """Wait of chunks for which there should be no queue."""
        self._smoothed_standing_s = 0.0
        self.queueing_s = 0.0
        """Smoothed wait in queues, above the least one-way delay seen."""
        self.standing_s = 0.0
        """The queue that stays: what every chunk waited of late, held up by jitter or not, above what they would wait
        without a queue."""
        self.min_rtt_s: float | None = None
        self.base_rtt_s = 0.0
        """Mean time from sending a chunk of bulk to its acknowledgement, less the queueing."""
        self.round_s = 0.0
        """The same with what jitter adds to it."""

    def timed(self, at_s: float, size_bytes: int, bytes_per_s: float, now_s: float) -> None:
        """As `JitterEstimator.record_arrival`."""
        spread_s = self.jitter.spread_s
        self.jitter.record_arrival(at_s, size_bytes, bytes_per_s, now_s)
        if self.jitter.spread_s != spread_s:
            self._low.widen(self.jitter.spread_s)
            self._settle()

    def record_arrival(self, sent_s: float, at_s: float, now_s: float, more: bool, unloaded: bool) -> float:
        """Records the ack of a chunk; the chunk arrived at `at_s` of the receiver's clock. Returns its queueing, s.

        `more` as in `RateEstimator.record_arrival`: acks of single messages are delayed for longer, and say nothing of
        bulk's.
        """
        way_s = at_s - sent_s
        queueing_s = way_s - self._least_way.update(way_s, now_s)
        rtt_s = now_s - sent_s
        if queueing_s > rtt_s:
            # Whatever the stamps say, it waited on its way between its departure and its acknowledgement.
            queueing_s = rtt_s
        least_s = self._least_rtt.update(rtt_s, now_s)
        self.queueing_s += SMOOTHING * (queueing_s - self.queueing_s)
        if unloaded:
            self._smoothed_unloaded_s += SMOOTHING * (queueing_s - self._smoothed_unloaded_s)
        low_s = self._low.update(queueing_s, at_s)
        self._smoothed_standing_s += SMOOTHING * (low_s - self._smoothed_standing_s)
        if more:
            lag_s = rtt_s - queueing_s - least_s
            lag_s = 0.0 if lag_s < 0.0 else lag_s if lag_s < LONGEST_ACK_LAG_S else LONGEST_ACK_LAG_S
            self._ack_lag_s += SMOOTHING * (lag_s - self._ack_lag_s)
        self.min_rtt_s = least_s
        self.base_rtt_s = least_s + self._ack_lag_s
        self._settle()
        return queueing_s

    def _settle(self) -> None:
        """Recomputes what depends on jitter."""
        spread_s, unloaded_s = self.jitter.spread_s, self._smoothed_unloaded_s
        if unloaded_s > LEVEL * spread_s:
            unloaded_s = LEVEL * spread_s
        standing_s = self._smoothed_standing_s - unloaded_s
        self.standing_s = standing_s if standing_s > 0.0 else 0.0
        self.round_s = self.base_rtt_s + (unloaded_s + spread_s)
