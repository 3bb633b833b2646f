"""What peers of a simulated circuit tell each other, and how long it is.

Nobody changes a row or a frame. Python does not forbid it, since there is one for each step of each session, and frozen
dataclasses take three times as long to make.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.pipeline import TOKEN_BYTES
from molink.peer.wire.protocol.packets import HEADER_BYTES
from molink.peer.wire.transmission.classes import TrafficClass

ROW_BYTES = 40
"""Of one session in the header of activations: who, which step, how many rows."""
FRAME_BYTES = 24
"""Of a frame with nothing in it."""
CHUNK_BYTES = HEADER_BYTES + 5 + 9 + 22 + 52
"""Around each chunk: our header, gRPC's, HTTP/2's, TLS's, TCP's and IP's, at least once each."""
ACK_BYTES = CHUNK_BYTES + 24
"""An acknowledgement of a few chunks."""


class FrameKind(Enum):
    ACTIVATIONS = auto()
    TOKENS = auto()
    WINDOW_UPDATE = auto()
    """Credits the previous peer for prefill that was computed."""


@dataclass(slots=True)
class SimulatedRow:
    """One session's part of a step."""

    key: LeaseKey
    step: int
    count: int
    """New tokens, 1 or more."""
    sample: bool
    """Whether a token is drawn after it."""
    prefill: bool


@dataclass(slots=True)
class SimulatedFrame:
    kind: FrameKind
    rows: tuple[SimulatedRow, ...]
    traffic_class: TrafficClass
    size_bytes: int
    due_s: float = 0.0
    """Of prefill: when it is due."""


Deliver = Callable[[SimulatedFrame], None]
_ACTIVATIONS, _PREFILL, _DECODE = FrameKind.ACTIVATIONS, TrafficClass.PREFILL, TrafficClass.DECODE
"""By its name, an enumeration finds a member by a call."""


def activations(rows: tuple[SimulatedRow, ...], activation_bytes: int, prefill: bool) -> SimulatedFrame:
    """Hidden states for the next peer; `activation_bytes` for each new token."""
    size_bytes = FRAME_BYTES + len(rows) * ROW_BYTES + sum([row.count for row in rows]) * activation_bytes
    traffic_class = _PREFILL if prefill else _DECODE
    return SimulatedFrame(_ACTIVATIONS, rows, traffic_class, size_bytes)


def tokens(rows: tuple[SimulatedRow, ...]) -> SimulatedFrame:
    """Drawn tokens for the head."""
    return SimulatedFrame(FrameKind.TOKENS, rows, TrafficClass.DECODE, FRAME_BYTES + len(rows) * TOKEN_BYTES)


def window_update(rows: tuple[SimulatedRow, ...]) -> SimulatedFrame:
    """Which prefill was stepped, for who sent it."""
    return SimulatedFrame(
        FrameKind.WINDOW_UPDATE, rows, TrafficClass.CONTROL, FRAME_BYTES + len(rows) * TOKEN_BYTES
    )
