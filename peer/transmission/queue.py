"""The order in which frames leave a peer over one link. Pure: no clock, no socket."""

from collections import deque
from collections.abc import Mapping

from molink.peer.transmission.classes import DEFAULT_SHARES, TrafficClass
from molink.peer.transmission.shares import ByteShares

_WITH_OWN_ROOM = frozenset(
    (TrafficClass.DECODE, TrafficClass.CONTROL, TrafficClass.HANDOVER, TrafficClass.PREFILL)
)
_OWN_PART = 8
"""One part in so many of a queue's limits is each such class's own: no flood of others locks it out."""


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
