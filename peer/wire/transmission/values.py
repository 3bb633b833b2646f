"""Values that the packet scheduler is given and returns. Times are seconds on the caller's monotonic clock.

What is made for each message or chunk is a tuple: a frozen dataclass takes twice as long to make.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from molink.peer.wire.transmission.classes import TrafficClass

MAX_CHUNK_BYTES = 256 * 1024
"""No chunk is larger, whatever the policy."""


class AckError(ValueError):
    """An acknowledgement of a chunk that was never sent."""


class Outgoing(NamedTuple):
    """A message to send: one frame of the protocol."""

    number: int
    """Ascending on its link, from 1."""
    traffic_class: TrafficClass
    size_bytes: int
    """Of the whole message, 1 or more."""
    sessions: tuple[bytes, ...] = ()
    """For whom it is; it is dropped when all of them are cancelled. Without any it cannot be cancelled."""
    deadline_s: float = 0.0
    """Of a class's messages on a link the one that is due first goes first, those of one time in order of push. On any
    clock, since they are only compared with each other; 0 where `Uplink.uses_deadlines` is not true."""


class Send(NamedTuple):
    """Send this chunk now: `size_bytes` of a message from `offset`, as the link's next sequence number."""

    message: int
    offset: int
    size_bytes: int
    last: bool


class Wait(NamedTuple):
    """Ask again at `until_s`, or earlier if `Uplink.wake` names the link."""

    until_s: float


AckArrival: TypeAlias = tuple[int, float]
"""The sequence number of a chunk, and when it reached the other end in seconds on the receiver's clock, of any
origin."""


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """Estimate of a link: its bandwidth, delay and window."""

    bandwidth_bytes_per_s: float | None
    min_rtt_s: float | None
    queueing_s: float
    """How long a chunk has lately waited in queues on the way, above the least seen."""
    in_flight_bytes: int
    window_bytes: int | None
    """Bytes in flight up to which lower classes may send; None until the bandwidth is known."""
