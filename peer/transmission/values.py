"""What the scheduler of an uplink is told and what it answers. Times are seconds on the caller's monotonic clock."""

from dataclasses import dataclass

from molink.peer.transmission.classes import TrafficClass

MAX_CHUNK_BYTES = 256 * 1024
"""No chunk is larger, whatever the policy."""


class AckError(ValueError):
    """An acknowledgement of a chunk that was never sent."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to send: one frame of the protocol."""

    number: int
    """Ascending on its link, from 1."""
    traffic_class: TrafficClass
    size_bytes: int
    """Of the whole message, 1 or more."""
    sessions: tuple[bytes, ...] = ()
    """For whom it is; it is dropped when all of them are cancelled. Without any it cannot be cancelled."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send this chunk now: `size_bytes` of a message from `offset`, as the link's next sequence number."""

    message: int
    offset: int
    size_bytes: int
    last: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """Ask again at `until_s`, or earlier if `Uplink.wake` names the link."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a chunk reached the other end, in seconds on the receiver's clock, of any origin."""

    sequence: int
    at_s: float


@dataclass(frozen=True, slots=True)
class LinkEstimate:
    """What a link is known to be able to do."""

    bandwidth_bytes_per_s: float | None
    min_rtt_s: float | None
    queueing_s: float
    """How long a chunk has lately waited in queues on the way, above the least seen."""
    in_flight_bytes: int
    window_bytes: int | None
    """Bytes in flight up to which lower classes may send; None until the bandwidth is known."""
