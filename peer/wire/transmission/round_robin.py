"""Round robin over the messages of a link: the order of concurrent streams, a baseline. Pure: no clock, no socket."""

from collections import deque

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.send_queue import QueuedMessage

_Key = tuple[TrafficClass, bytes]


class RoundRobin:
    """Round-robin queue of a link's messages, one turn for each session and class.

    Only the first message of each session takes part: a later chunk of a prompt must not be complete before an earlier
    one. A message for several sessions takes part once it is the first of all of them; those for nobody count as one
    session's. Classes do not wait for each other.
    """

    __slots__ = ("_by_session", "_rotation")

    def __init__(self) -> None:
        self._rotation: deque[QueuedMessage] = deque()
        self._by_session: dict[_Key, deque[QueuedMessage]] = {}

    def push(self, queued: QueuedMessage) -> None:
        """Queues a message; it takes part once it is the first of all of its sessions."""
        is_first = True
        for key in _keys(queued):
            if (waiting := self._by_session.get(key)) is None:
                self._by_session[key] = deque((queued,))
            else:
                waiting.append(queued)
                is_first = False
        if is_first:
            self._rotation.append(queued)

    def first(self) -> QueuedMessage:
        """Returns the message whose turn it is. The queue must not be empty."""
        while not self._rotation[0].left_bytes:
            self._retire(self._rotation.popleft())
        return self._rotation[0]

    def advance(self) -> None:
        """Moves the first message to the end: it has had its turn."""
        self._rotation.rotate(-1)

    def _is_first(self, queued: QueuedMessage) -> bool:
        return all(self._by_session[key][0] is queued for key in _keys(queued))

    def _retire(self, done: QueuedMessage) -> None:
        """A message was sent or cancelled: those behind it may take part."""
        behind: dict[QueuedMessage, None] = {}
        for key in _keys(done):
            waiting = self._by_session[key]
            waiting.popleft()
            if waiting:
                behind[waiting[0]] = None
            else:
                del self._by_session[key]
        self._rotation.extend(queued for queued in behind if self._is_first(queued))


def _keys(queued: QueuedMessage) -> tuple[_Key, ...]:
    outgoing = queued.outgoing
    sessions = dict.fromkeys(outgoing.sessions) or (b"",)
    traffic_class = outgoing.traffic_class
    return tuple([(traffic_class, session) for session in sessions])
