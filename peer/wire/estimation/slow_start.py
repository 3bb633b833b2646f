"""Slow start (TCP, RFC 5681, section 3.1): finds the rate of a new line. Pure.

Twice as much is in flight in every round trip until the line is full. It is full when a queue forms: what leaves a
queue leaves it at the line's rate, so that a part of the window is enough to measure it. Or, as BBR has it (Cardwell et
al., 2016, "Startup"), when three round trips have brought no quarter more: then it is the sender, or a line whose
delays hide the queue.
"""

START_WINDOW_BYTES = 128 * 1024
"""In flight until the first acks; grows by what they acknowledge."""
RUN_S = 0.006
"""A line that had a queue for so long is measured: stamps err by a millisecond or two."""
RUN_CHUNKS = 4
LEAST_ROUND_S = 0.020
GROWTH = 1.25
ROUNDS = 3
"""After so many round trips without so much growth the line is full: BBR's values."""


class SlowStart:
    """Slow start of one link, until its rate is known."""

    __slots__ = (
        "_best", "_flat_rounds", "_last_s", "_more", "_round_bytes", "_round_start_s", "_run_bytes", "_run_chunks",
        "_run_start_s", "window_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.window_bytes = START_WINDOW_BYTES
        """What may be in flight."""
        self._last_s: float | None = None
        self._more = False
        """Bulk waited behind the last chunk: only then the next one came when the line let it."""
        self._run_start_s = 0.0
        self._run_bytes = 0
        self._run_chunks = 0
        self._round_start_s = 0.0
        self._round_bytes = 0
        self._best = 0.0
        self._flat_rounds = 0

    def record_arrival(
        self, at_s: float, size_bytes: int, queueing_s: float, more: bool, rtt_s: float
    ) -> float | None:
        """Records the arrival of a chunk. Returns the line's rate, in bytes a second, once it is known.

        Args:
            at_s: by the receiver's clock.
            queueing_s: how much longer its way took than the shortest one.
            more: bulk waited behind it when it was sent.
            rtt_s: the round trip without queues.
        """
        last_s, self._last_s = self._last_s, at_s
        follows, self._more = self._more, more
        if last_s is None or not more or at_s < last_s:
            self._begin_run(at_s)
            self._begin_round(at_s)
            return None
        self.window_bytes += size_bytes
        if at_s - queueing_s > last_s:
            # It could have been there before the last one had passed: the line ran empty between them.
            self._begin_run(at_s)
        else:
            self._run_bytes += size_bytes
            self._run_chunks += 1
            if at_s - self._run_start_s >= RUN_S and self._run_chunks >= RUN_CHUNKS:
                return max(self._best, self._run_bytes / (at_s - self._run_start_s))
        if not follows:
            self._begin_round(at_s)
            return None
        self._round_bytes += size_bytes
        if at_s - self._round_start_s >= max(LEAST_ROUND_S, rtt_s):
            return self._round_ends(at_s)
        return None

    def _round_ends(self, at_s: float) -> float | None:
        bytes_per_s = self._round_bytes / (at_s - self._round_start_s)
        self._flat_rounds = 0 if bytes_per_s >= GROWTH * self._best else self._flat_rounds + 1
        self._best = max(self._best, bytes_per_s)
        self._begin_round(at_s)
        return self._best if self._flat_rounds >= ROUNDS else None

    def _begin_run(self, at_s: float) -> None:
        self._run_start_s = at_s
        self._run_bytes = 0
        self._run_chunks = 0

    def _begin_round(self, at_s: float) -> None:
        self._round_start_s = at_s
        self._round_bytes = 0
