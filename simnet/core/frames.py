"""What peers of a simulated circuit send each other, and how long it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from molink.peer.wire.protocol.packets import HEADER_BYTES
from molink.peer.wire.transmission.classes import TrafficClass
from molink.routing.cost.pipeline import TOKEN_BYTES

ROW_BYTES = 40
"""Of one session in the header of activations: who, which step, how many rows."""
FRAME_BYTES = 24
"""Of a frame with nothing in it."""
CHUNK_BYTES = HEADER_BYTES + 5 + 9 + 22 + 52
"""Around each chunk: our header, gRPC's, HTTP/2's, TLS's, TCP's and IP's, at least once each."""
ACK_BYTES = CHUNK_BYTES + 24
"""An acknowledgement of a few chunks."""


@dataclass(slots=True)
class SimulatedFrame:
    """A frame. Nobody changes it; Python does not forbid it, since there is one for each step, and frozen dataclasses
    take three times as long to make."""

    traffic_class: TrafficClass
    size_bytes: int
    sessions: tuple[bytes, ...]
    """Whose it is."""
    content: Any
    """What happens at the other end."""
    due_s: float = 0.0
    """Of prefill: when it is due."""


Deliver = Callable[[Any], None]
"""Takes a frame's content, where it has come to."""


def activations_bytes(sessions: int, tokens: int, activation_bytes: int) -> int:
    """Of hidden states for the next peer, `activation_bytes` for each new token."""
    return FRAME_BYTES + sessions * ROW_BYTES + tokens * activation_bytes


def guesses_bytes(guesses: Sequence[int]) -> int:
    """Of so many guesses for each session of a micro-batch, for the tail."""
    return FRAME_BYTES + len(guesses) * ROW_BYTES + 3 * sum(guesses)


def small_frame_bytes(sessions: int) -> int:
    """Of drawn tokens for the head, or of a window update."""
    return FRAME_BYTES + sessions * TOKEN_BYTES
