"""Sending pace: a token bucket over all that a peer's control plane sends, so that no minute takes more than 32 kbit/s.

Intervals of announcements hold the average (`timing.py`). Newcomers that copy tables, and links that all begin anew
where a peer goes that many had dialled, come in bursts: what can wait then waits. Pure.
"""

from dataclasses import dataclass

WIRE_BYTES = 12 + 18 + 40 + 26
"""Of yamux, noise, TCP and IP, and half an acknowledgement, for each frame that goes alone."""
CONNECTION_BYTES = 1_500
"""TCP, noise and negotiation, of each end."""
LINE_BITS_PER_S = 32_000
PACED_BITS_PER_S = 27_000
BURST_BYTES = 60 * (LINE_BITS_PER_S - PACED_BITS_PER_S) // 8
"""That may go at once: with a minute at the pace it makes a minute at 32 kbit/s."""
MOST_OWED_BYTES = 60_000
"""Of what did not wait, as tables of newcomers: in a large swarm one is megabytes, and nobody falls silent for it."""


@dataclass(frozen=True, slots=True)
class SendPace:
    """Token bucket in bytes; what is owed is below 0."""

    left_bytes: float = BURST_BYTES
    at: float = 0.0
    """When it was counted."""

    def after(self, now: float, sent_bytes: int = 0) -> "SendPace":
        """With so many bytes sent at `now`, or as it is by then."""
        gained = max(0.0, now - self.at) * PACED_BITS_PER_S / 8
        left = min(float(BURST_BYTES), self.left_bytes + gained) - sent_bytes
        return SendPace(max(-float(MOST_OWED_BYTES), left), now)

    def wait_s(self, now: float) -> float:
        """Seconds until what can wait may be sent."""
        return max(0.0, -self.after(now).left_bytes) * 8 / PACED_BITS_PER_S
