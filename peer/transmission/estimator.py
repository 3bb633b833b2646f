"""How fast a link is and how long its queues are, learnt from acknowledgements. Pure: no clock, no socket.

The rate is near the top of what was measured while bulk was waiting to be sent. What is sent is bounded by what was
measured before, and every late timer, stamp or acknowledgement makes it less: a median follows its own window down,
to nothing in the end. What is measured while nothing waits says how much there was to send, not what the line could
do; such measurements may raise the estimate and never lower it, and no estimate grows old while nothing waits.
"""

import math
from collections import deque

MIN_SPAN_S = 0.020
"""A measurement spans at least so much of the receiver's time: stamps err by milliseconds."""
FIRST_SPAN_S = 0.004
"""The first one: half an initial window at 100 Mbit/s."""
MIN_CHUNKS = 4
SAMPLES = 17
RANK = 15
"""Of so many, in ascending order from 0, the one that counts: the highest may be what stamps in a bunch made of it."""
DELAY_WINDOW_S = 5.0
"""The least delay is that of one to two such windows."""
RAISE = 1.15
"""What is measured while nothing waits counts from so much above the estimate on: less is noise, and would add up."""
SMOOTHING = 0.1
FIRST_ACK_LAG_S = 0.003
LONGEST_ACK_LAG_S = 0.020
"""An ack that comes later still was held up by something else."""


class RateEstimator:
    """Bytes that arrive per second of the receiver's clock, while the sender had more to send."""

    __slots__ = ("_busy", "_bytes", "_chunks", "_min_span_s", "_samples", "_start_s", "bytes_per_s")

    def __init__(self, min_span_s: float = MIN_SPAN_S) -> None:
        self._min_span_s = min_span_s
        self._samples: deque[float] = deque(maxlen=SAMPLES)
        self._start_s: float | None = None
        self._bytes = 0
        self._chunks = 0
        self._busy = False
        self.bytes_per_s: float | None = None
        """The estimate; None until bulk was measured once."""

    def arrived(self, at_s: float, size_bytes: int, more: bool) -> None:
        """A chunk arrived.

        Args:
            at_s: by the receiver's clock.
            more: bulk waited behind it for nothing but the line when it was sent.
        """
        start_s = self._start_s
        if start_s is None or at_s < start_s or (more and not self._busy and self._chunks):
            self._restart(at_s, more)
            return
        self._bytes += size_bytes
        self._chunks += 1
        span_s = at_s - start_s
        if self._chunks >= MIN_CHUNKS and span_s >= (self._min_span_s if self._samples else FIRST_SPAN_S):
            self._add(self._bytes / span_s, self._busy)
            self._restart(at_s, more)
        elif not more:
            self._busy = False

    def idle(self) -> None:
        """Nothing was sent for a while though bulk waited: that is not the line's slowness."""
        self._busy = False

    def forget_start(self) -> None:
        """The next arrival does not follow the last one (a connection was restored)."""
        self._start_s = None

    def _restart(self, at_s: float, busy: bool) -> None:
        self._start_s = at_s
        self._bytes = 0
        self._chunks = 0
        self._busy = busy

    def _add(self, bytes_per_s: float, busy: bool) -> None:
        known = self.bytes_per_s
        if busy or (known is not None and bytes_per_s > RAISE * known):
            self._samples.append(bytes_per_s)
            self.bytes_per_s = sorted(self._samples)[len(self._samples) * RANK // SAMPLES]


class WindowedMinimum:
    """The least of the last one to two windows of time."""

    __slots__ = ("_before", "_current", "_since_s", "_window_s")

    def __init__(self, window_s: float = DELAY_WINDOW_S) -> None:
        self._window_s = window_s
        self._since_s = -math.inf
        self._current = math.inf
        self._before = math.inf

    @property
    def least(self) -> float:
        """Infinite before anything was added."""
        return min(self._current, self._before)

    def add(self, value: float, now_s: float) -> float:
        """Takes in a value, and returns the least."""
        age_s = now_s - self._since_s
        if age_s > self._window_s:
            self._before = self._current if age_s <= 2 * self._window_s else math.inf
            self._current = value
            self._since_s = now_s
        elif value < self._current:
            self._current = value
        return self._current if self._current < self._before else self._before


class DelayEstimator:
    """Queueing on the way, and the round trip without it. A clock offset between the ends cancels."""

    __slots__ = ("_ack_lag_s", "_least_rtt", "_least_way", "queueing_s")

    def __init__(self) -> None:
        self._least_way = WindowedMinimum()
        self._least_rtt = WindowedMinimum()
        self._ack_lag_s = FIRST_ACK_LAG_S
        self.queueing_s = 0.0
        """Smoothed wait in queues, above the least one-way delay seen."""

    @property
    def min_rtt_s(self) -> float | None:
        least_s = self._least_rtt.least
        return least_s if least_s < math.inf else None

    @property
    def base_rtt_s(self) -> float:
        """Mean time from sending a chunk of bulk to its acknowledgement, less the queueing."""
        least_s = self._least_rtt.least
        return least_s + self._ack_lag_s if least_s < math.inf else 0.0

    def arrived(self, sent_s: float, at_s: float, now_s: float, more: bool) -> float:
        """The ack of a chunk came now; it arrived at `at_s` of the receiver's clock. Returns its queueing, s.

        `more` as in `RateEstimator.arrived`: acks of single messages are delayed for longer, and say nothing of bulk's.
        """
        way_s = at_s - sent_s
        queueing_s = way_s - self._least_way.add(way_s, now_s)
        rtt_s = now_s - sent_s
        least_s = self._least_rtt.add(rtt_s, now_s)
        self.queueing_s += SMOOTHING * (queueing_s - self.queueing_s)
        if more:
            lag_s = min(LONGEST_ACK_LAG_S, max(0.0, rtt_s - queueing_s - least_s))
            self._ack_lag_s += SMOOTHING * (lag_s - self._ack_lag_s)
        return queueing_s
