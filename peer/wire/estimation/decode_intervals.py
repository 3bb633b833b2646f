"""Decode interval predictor: when the next decode will be pushed on a link, learnt from the past ones. Pure.

Each stream has a smoothed gap and a smoothed deviation of it, as TCP has of round trips (RFC 6298, section 2).
"""

import math

REGULAR = 0.25
"""A stream whose gaps differ from their mean by more than this part, on average, is not predicted."""
SMOOTHING = 0.25
KNOWN = 64
"""Streams remembered; the one unheard for longest is forgotten."""
PASSED_S = 0.002
"""A decode that is so late is no longer waited for."""
LONGEST_GAP_S = 2.0


class _Stream:
    """One micro-batch's decodes."""

    __slots__ = ("deviation_s", "gap_s", "last_s", "next_s")

    def __init__(self, now_s: float) -> None:
        self.last_s = now_s
        self.gap_s = math.inf
        self.deviation_s = 0.0
        self.next_s = math.inf
        """When the next one is expected; infinite if none is."""

    def record_decode(self, now_s: float) -> None:
        gap_s = now_s - self.last_s
        self.last_s = now_s
        if gap_s > LONGEST_GAP_S or self.gap_s > LONGEST_GAP_S:
            self.gap_s = gap_s
            self.deviation_s = 0.0
        else:
            error_s = gap_s - self.gap_s
            self.deviation_s += SMOOTHING * (abs(error_s) - self.deviation_s)
            self.gap_s += SMOOTHING * error_s
        regular = self.gap_s <= LONGEST_GAP_S and self.deviation_s <= REGULAR * self.gap_s
        self.next_s = self.last_s + self.gap_s if regular else math.inf


class DecodeIntervalPredictor:
    """Decode interval predictor of one link. Micro-batches circulate: each one's decodes come at its own interval."""

    __slots__ = ("_next_s", "_streams")

    def __init__(self) -> None:
        self._streams: dict[tuple[bytes, ...], _Stream] = {}
        self._next_s = math.inf

    @property
    def streams(self) -> int:
        """Micro-batches whose interval it remembers."""
        return len(self._streams)

    def record_decode(self, sessions: tuple[bytes, ...], now_s: float) -> None:
        """A decode of these sessions is pushed now."""
        stream = self._streams.pop(sessions, None)
        if stream is None:
            if len(self._streams) >= KNOWN:
                del self._streams[next(iter(self._streams))]
            stream = _Stream(now_s)
        else:
            stream.record_decode(now_s)
        self._streams[sessions] = stream
        self._next_s = -math.inf

    def next_s(self, now_s: float) -> float:
        """When the next one is expected; infinite when nothing is, or when what was expected is late."""
        if self._next_s < now_s - PASSED_S:
            expected = [stream.next_s for stream in self._streams.values()]
            passed_s = now_s - PASSED_S
            self._next_s = min([one for one in expected if one >= passed_s], default=math.inf)
        return self._next_s
