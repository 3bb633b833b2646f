"""Bottleneck model: predicts the queue at the slowest part of a line, corrected by measurements. Pure."""

import math

CORRECTION = 0.2
"""Part of an error that one measurement corrects: a single stamp may err by milliseconds."""


class BottleneckModel:
    """Bottleneck model of one line: when what was sent will have left the slowest part of the way.

    Each chunk is predicted to wait until the ones before it have left at the estimated rate. Its arrival tells how
    long it did wait; the difference corrects the model, less what was corrected since it was sent.
    """

    __slots__ = ("_corrected_s", "_free_at_s")

    def __init__(self) -> None:
        self._free_at_s = 0.0
        self._corrected_s = 0.0

    def queued_s(self, now_s: float) -> float:
        """How long a chunk sent now would wait."""
        left_s = self._free_at_s - now_s
        return left_s if left_s > 0.0 else 0.0

    def speed_up(self, times: float, now_s: float) -> None:
        """Shortens the queue: the line proves to be so many times as fast."""
        left_s = self._free_at_s - now_s
        if left_s > 0.0:
            self._free_at_s = now_s + left_s / times

    def record_sent(self, size_bytes: int, bytes_per_s: float, now_s: float) -> tuple[float, float]:
        """Records that a chunk is sent now. Returns what `record_arrival` wants to be told of it."""
        free_at_s = self._free_at_s
        queued_s = free_at_s - now_s
        if queued_s < 0.0:
            queued_s = 0.0
            free_at_s = now_s
        self._free_at_s = free_at_s + size_bytes / bytes_per_s
        return queued_s, self._corrected_s

    def record_arrival(
        self,
        predicted: tuple[float, float],
        queueing_s: float,
        now_s: float,
        most_s: float,
        standing_s: float,
        own_s: float = math.inf,
    ) -> None:
        """Corrects the model by a chunk that waited for `queueing_s`, `standing_s` of it in a queue.

        The queue is not taken to be longer than `most_s` for that; nor to be shorter by more than `own_s`, what the
        chunk itself put on it, if that is given.
        """
        queued_s, corrected_s = predicted
        expected_s = queued_s + self._corrected_s - corrected_s
        error_s = queueing_s - expected_s
        if standing_s > expected_s:
            error_s = min(standing_s - expected_s, max(0.0, most_s - self.queued_s(now_s)) / CORRECTION)
        elif error_s > 0.0:
            error_s = 0.0
        elif error_s * CORRECTION < -own_s:
            error_s = -own_s / CORRECTION
        free_at_s = self._free_at_s
        self._corrected_s += CORRECTION * error_s
        self._free_at_s = (now_s if now_s > free_at_s else free_at_s) + CORRECTION * error_s
