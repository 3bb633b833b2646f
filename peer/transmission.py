"""The order in which frames leave a peer over one link. Pure: no clock, no socket.

Decode goes first, as in section 4 of the MoLink transmission paper (Algorithm 1). Its starvation guard is not
taken over: it counts transmissions, and then sends the whole remainder of a prefill, so a decode waits for as
long as that takes, while a guard that sends one chunk after so many decodes promises no rate at all. Here
each lower class is guaranteed a share of the bytes: it earns credit for that share of all bytes sent while it
waits, and goes first as soon as its credit pays for its next frame. So a class that waits gets its share,
give or take a few frames, however busy the link, and decode is held up by one frame at a time.
"""

from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType


class TrafficClass(IntEnum):
    """What a frame is for; a lower number goes first."""

    DECODE = 0
    CONTROL = 1
    HANDOVER = 2
    """A KV cache on its way to where the decode goes on; a user waits for it."""
    PREFILL = 3
    REPLICATION = 4
    """A KV cache's second copy; nobody waits for it."""
    WEIGHTS = 5


DEFAULT_SHARES: Mapping[TrafficClass, float] = MappingProxyType(
    {
        TrafficClass.CONTROL: 0.05,
        TrafficClass.HANDOVER: 0.15,
        TrafficClass.PREFILL: 0.15,
        TrafficClass.REPLICATION: 0.05,
        TrafficClass.WEIGHTS: 0.05,
    }
)
"""Guaranteed part of the bytes sent while the class waits. The rest, 0.55, is decode's if it needs it."""

_WITH_OWN_ROOM = frozenset(
    (TrafficClass.DECODE, TrafficClass.CONTROL, TrafficClass.HANDOVER, TrafficClass.PREFILL)
)
_OWN_PART = 8
"""One part in so many of a queue's limits is each such class's own: no flood of others locks it out."""


class ByteShares:
    """Which class has earned the next transmission. Knows classes and sizes, not frames, so that several
    links, or the chunks of one frame, can be charged to the same account."""

    def __init__(self, shares: Mapping[TrafficClass, float]) -> None:
        total = sum(shares.values())
        if not all(share >= 0 for share in shares.values()) or not total <= 1.0:
            raise ValueError(f"byte shares must be 0 or more and add up to at most 1, got {dict(shares)}")
        self._shares = tuple(shares.get(traffic_class, 0.0) for traffic_class in TrafficClass)
        self._credit_bytes = [0.0] * len(TrafficClass)

    def choose(self, waiting: Mapping[TrafficClass, int]) -> TrafficClass:
        """Whose turn it is, of one class or more, given the bytes that each would send next.

        The highest class whose credit pays for that; where there is none, the highest that waits.
        """
        if len(waiting) > 1:
            for traffic_class in sorted(waiting):
                credit_bytes = self._credit_bytes[traffic_class]
                if credit_bytes > 0 and credit_bytes >= waiting[traffic_class]:
                    return traffic_class
        return min(waiting)

    def charge(self, sent: TrafficClass, size_bytes: int, waiting: Mapping[TrafficClass, int]) -> None:
        """`size_bytes` of `sent` have left while the classes of `waiting` had something to send.

        Credit never falls below 0: what a class sent over an idle link is not held against it later. It does
        not grow while the class has nothing to send either.
        """
        for traffic_class in waiting:
            self._credit_bytes[traffic_class] += self._shares[traffic_class] * size_bytes
        self._credit_bytes[sent] = max(0.0, self._credit_bytes[sent] - size_bytes)


class _Lane:
    """The frames of one class, in order."""

    __slots__ = ("frames", "own_bytes", "own_frames", "queued_bytes")

    def __init__(self, own_bytes: int, own_frames: int) -> None:
        self.frames: deque[bytes] = deque()
        self.queued_bytes = 0
        self.own_bytes = own_bytes
        self.own_frames = own_frames


class SendQueue:
    """Frames that wait for a link, bounded in bytes and in number.

    An eighth of both limits is each decode's, control's, handover's and prefill's own; half is anyone's. So
    weights and replication can fill at most half of the queue.
    """

    def __init__(
        self,
        limit_bytes: int = 64 * 1024 * 1024,
        limit_frames: int = 4096,
        shares: Mapping[TrafficClass, float] = DEFAULT_SHARES,
    ) -> None:
        if limit_bytes < 1 or limit_frames < 1:
            raise ValueError(f"a queue needs room, got {limit_bytes} bytes and {limit_frames} frames")
        own = (limit_bytes // _OWN_PART, limit_frames // _OWN_PART)
        self._lanes = {one: _Lane(*(own if one in _WITH_OWN_ROOM else (0, 0))) for one in TrafficClass}
        self._common_bytes = limit_bytes - sum(lane.own_bytes for lane in self._lanes.values())
        self._common_frames = limit_frames - sum(lane.own_frames for lane in self._lanes.values())
        self._shares = ByteShares(shares)
        self._queued_bytes = 0
        self._queued_frames = 0

    def __len__(self) -> int:
        """Frames that wait."""
        return self._queued_frames

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    def push(self, traffic_class: TrafficClass, frame: bytes) -> bool:
        """Queues a frame behind those of its class. False, and nothing queued, when there is no room for it.

        Raises:
            ValueError: the frame is empty.
        """
        if not frame:
            raise ValueError("an empty frame cannot be sent")
        lane = self._lanes[traffic_class]
        size_bytes = len(frame)
        # Own room is used before common room: what a lane holds beyond its own part is what it takes of the
        # common one.
        more_bytes = _beyond(lane.queued_bytes, size_bytes, lane.own_bytes)
        more_frames = _beyond(len(lane.frames), 1, lane.own_frames)
        if more_bytes > self._common_bytes or more_frames > self._common_frames:
            return False
        self._common_bytes -= more_bytes
        self._common_frames -= more_frames
        lane.frames.append(frame)
        lane.queued_bytes += size_bytes
        self._queued_bytes += size_bytes
        self._queued_frames += 1
        return True

    def pop(self) -> bytes | None:
        """Removes and returns the frame that leaves next; None when nothing waits."""
        if not self._queued_frames:
            return None
        waiting = {one: len(lane.frames[0]) for one, lane in self._lanes.items() if lane.frames}
        chosen = self._shares.choose(waiting)
        lane = self._lanes[chosen]
        frame = lane.frames.popleft()
        size_bytes = len(frame)
        lane.queued_bytes -= size_bytes
        self._queued_bytes -= size_bytes
        self._queued_frames -= 1
        self._common_bytes += _beyond(lane.queued_bytes, size_bytes, lane.own_bytes)
        self._common_frames += _beyond(len(lane.frames), 1, lane.own_frames)
        self._shares.charge(chosen, size_bytes, waiting)
        return frame


def _beyond(used: int, added: int, own: int) -> int:
    """How much of `added`, on top of `used`, lies beyond a lane's `own` room."""
    return max(0, used + added - own) - max(0, used - own)
