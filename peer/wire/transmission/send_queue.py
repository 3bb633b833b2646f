"""Send queue of one link: a lane for each traffic class, earliest deadline first in it, bounded in size. Pure."""

from collections import deque

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.values import Outgoing, Send

WITH_OWN_ROOM = frozenset(
    (TrafficClass.DECODE, TrafficClass.CONTROL, TrafficClass.HANDOVER, TrafficClass.PREFILL)
)
OWN_PART = 8
"""One part in so many of the limits is each such class's own: no flood of others locks it out."""
NOBODY = (b"",)
"""Messages without a session are in order like those of one."""


class QueuedMessage:
    """Queued message: something of it is still to be sent."""

    __slots__ = ("left_bytes", "live_sessions", "order", "outgoing")

    def __init__(self, outgoing: Outgoing, order: int) -> None:
        self.outgoing = outgoing
        self.order = order
        """Ascends over all messages pushed to the link."""
        self.left_bytes = outgoing.size_bytes
        self.live_sessions = outgoing.sessions
        """Those of its sessions that were not cancelled."""


class _Lane:
    """The messages of one class, in the order in which they leave."""

    __slots__ = ("messages", "own_bytes", "own_messages", "queued_bytes")

    def __init__(self, own_bytes: int, own_messages: int) -> None:
        self.messages: deque[QueuedMessage] = deque()
        self.queued_bytes = 0
        self.own_bytes = own_bytes
        self.own_messages = own_messages

    def insert(self, queued: QueuedMessage) -> None:
        """Puts it before those that are due later, but behind all that share a session with it: a later chunk of a
        prompt must not be complete before an earlier one."""
        messages, deadline_s = self.messages, queued.outgoing.deadline_s
        if not messages or messages[-1].outgoing.deadline_s <= deadline_s:
            messages.append(queued)
            return
        place, sessions = len(messages), set(queued.outgoing.sessions or NOBODY)
        for other in reversed(messages):
            if other.outgoing.deadline_s <= deadline_s or not sessions.isdisjoint(
                other.outgoing.sessions or NOBODY
            ):
                break
            place -= 1
        messages.insert(place, queued)


class SendQueue:
    """Send queue of one link, bounded in bytes and in messages.

    A message counts whole until its last part has left: so what the other end holds of unfinished messages is within
    the same limits. An eighth of both is each decode's, control's, handover's and prefill's own; half is anyone's. So
    weights and replication can fill at most half of it.
    """

    __slots__ = ("_common_bytes", "_common_messages", "_lanes", "_orders", "heads", "queued_bytes")

    def __init__(self, limit_bytes: int, limit_messages: int) -> None:
        if limit_bytes < 1 or limit_messages < 1:
            raise ValueError(f"a queue needs room, got {limit_bytes} bytes and {limit_messages} messages")
        own = (limit_bytes // OWN_PART, limit_messages // OWN_PART)
        self._lanes = tuple(_Lane(*(own if one in WITH_OWN_ROOM else (0, 0))) for one in TrafficClass)
        self._common_bytes = limit_bytes - sum(lane.own_bytes for lane in self._lanes)
        self._common_messages = limit_messages - sum(lane.own_messages for lane in self._lanes)
        self._orders = 0
        self.queued_bytes = 0
        self.heads: dict[TrafficClass, QueuedMessage] = {}
        """The first message of each class that has one."""

    def __len__(self) -> int:
        return sum(len(lane.messages) for lane in self._lanes)

    def all_messages(self) -> list[QueuedMessage]:
        """Returns all messages that wait."""
        return [queued for lane in self._lanes for queued in lane.messages]

    def cancel_session(self, session: bytes) -> list[QueuedMessage]:
        """Cancels a session. Returns the messages that wait for nobody any more, in order of push, still to be
        dropped."""
        found = []
        for queued in self.all_messages():
            if session in queued.live_sessions:
                queued.live_sessions = tuple(one for one in queued.live_sessions if one != session)
                if not queued.live_sessions:
                    found.append(queued)
        return sorted(found, key=lambda queued: queued.order)

    def push(self, outgoing: Outgoing) -> QueuedMessage | None:
        """Queues a message where it is due among those of its class; None, and nothing queued, when there is no room.

        Raises:
            ValueError: the message is empty.
        """
        size_bytes = outgoing.size_bytes
        if size_bytes < 1:
            raise ValueError(f"a message of {size_bytes} bytes cannot be sent")
        lane = self._lanes[outgoing.traffic_class]
        # Own room is used before common room: what a lane holds beyond its own part is what it takes of the
        # common one.
        more_bytes = _beyond(lane.queued_bytes, size_bytes, lane.own_bytes)
        more_messages = _beyond(len(lane.messages), 1, lane.own_messages)
        if more_bytes > self._common_bytes or more_messages > self._common_messages:
            return None
        self._common_bytes -= more_bytes
        self._common_messages -= more_messages
        self._orders += 1
        queued = QueuedMessage(outgoing, self._orders)
        lane.insert(queued)
        self.heads[outgoing.traffic_class] = lane.messages[0]
        lane.queued_bytes += size_bytes
        self.queued_bytes += size_bytes
        return queued

    def take_chunk(self, queued: QueuedMessage, size_bytes: int) -> Send:
        """Takes the next chunk of a message, at most `size_bytes` of it."""
        outgoing = queued.outgoing
        left_bytes = queued.left_bytes
        offset = outgoing.size_bytes - left_bytes
        if size_bytes < left_bytes:
            queued.left_bytes = left_bytes - size_bytes
            return Send(outgoing.number, offset, size_bytes, False)
        self.drop_message(queued)
        return Send(outgoing.number, offset, left_bytes, True)

    def drop_message(self, queued: QueuedMessage) -> None:
        """Drops what is left of a message."""
        traffic_class, size_bytes = queued.outgoing.traffic_class, queued.outgoing.size_bytes
        lane = self._lanes[traffic_class]
        messages = lane.messages
        queued.left_bytes = 0
        lane.queued_bytes -= size_bytes
        self.queued_bytes -= size_bytes
        if messages[0] is queued:
            messages.popleft()
        else:
            messages.remove(queued)
        self._common_bytes += _beyond(lane.queued_bytes, size_bytes, lane.own_bytes)
        self._common_messages += _beyond(len(messages), 1, lane.own_messages)
        if messages:
            self.heads[traffic_class] = messages[0]
        else:
            del self.heads[traffic_class]


def _beyond(used: int, added: int, own: int) -> int:
    """How much of `added`, on top of `used`, lies beyond a lane's `own` room."""
    beyond = used + added - own
    if beyond <= 0:
        return 0
    return beyond if used <= own else added
