"""Delayed acknowledgements (as TCP's, RFC 5681, section 4.2; QUIC's, RFC 9000, section 13.2). Pure."""

import math
from collections import deque

from molink.peer.wire.protocol.packets import MAX_ARRIVALS, Ack
from molink.peer.wire.transmission.classes import TrafficClass

BULK_DELAY_S = 0.004
"""The sender of bulk learns its rate from acknowledgements, and what it may send next depends on them. A little more
than one of its chunks takes, so that the next one comes first."""
BULK_CHUNKS = 2
BULK_INTERVAL_S = 0.005
"""After so long without an acknowledgement of bulk a single chunk is worth one: it was a long one."""
SMALL_DELAY_S = 0.04
"""Nobody waits for the acknowledgement of a token: one for many costs less."""
_SMALL = frozenset((TrafficClass.DECODE, TrafficClass.CONTROL))


class DelayedAcks:
    """Delayed acknowledgements of one link: what has arrived since the last one."""

    def __init__(self) -> None:
        self.due_s = math.inf
        """When an acknowledgement should leave."""
        self._sequence = 0
        self._bulk_chunks = 0
        self._bulk_acknowledged_s = -math.inf
        self._arrivals: deque[tuple[int, float]] = deque(maxlen=MAX_ARRIVALS)

    def record_arrival(self, sequence: int, traffic_class: TrafficClass, now_s: float) -> None:
        """Records the arrival of a chunk."""
        self._sequence = sequence
        arrivals = self._arrivals
        arrivals.append((sequence, now_s))
        delay_s = SMALL_DELAY_S
        if traffic_class not in _SMALL:
            self._bulk_chunks += 1
            alone = now_s - self._bulk_acknowledged_s >= BULK_INTERVAL_S
            delay_s = 0.0 if alone or self._bulk_chunks >= BULK_CHUNKS else BULK_DELAY_S
        if len(arrivals) == MAX_ARRIVALS:
            delay_s = 0.0
        due_s = now_s + delay_s
        if due_s < self.due_s:
            self.due_s = due_s

    def take_ack(self, now_s: float) -> Ack | None:
        """Takes the acknowledgement that is due, if one is."""
        if now_s < self.due_s:
            return None
        arrivals = tuple([(sequence, round((now_s - at_s) * 1e6)) for sequence, at_s in self._arrivals])
        ack = Ack(self._sequence, round(now_s * 1e6), arrivals)
        if self._bulk_chunks:
            self._bulk_acknowledged_s = now_s
        self.reset()
        return ack

    def reset(self) -> None:
        """Resets: the other end knows by other means what has arrived."""
        self._arrivals.clear()
        self._bulk_chunks = 0
        self.due_s = math.inf
