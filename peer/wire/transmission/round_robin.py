"""Messages that take turns, those of one session and class in order. Pure: no clock, no socket."""

from collections import deque

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.send_queue import Queued

_Key = tuple[TrafficClass, bytes]


class Turns:
    """Whose turn it is among the messages of a link.

    Only the first message of each session takes part: a later chunk of a prompt must not be complete before an earlier
    one. A message for several sessions takes part once it is the first of all of them; those for nobody count as one
    session's. Classes do not wait for each other.
    """

    __slots__ = ("_by_session", "_rotation")

    def __init__(self) -> None:
        self._rotation: deque[Queued] = deque()
        self._by_session: dict[_Key, deque[Queued]] = {}

    def push(self, queued: Queued) -> None:
        """A message waits."""
        is_first = True
        for key in _keys(queued):
            if (waiting := self._by_session.get(key)) is None:
                self._by_session[key] = deque((queued,))
            else:
                waiting.append(queued)
                is_first = False
        if is_first:
            self._rotation.append(queued)

    def first(self) -> Queued:
        """Whose turn it is. Something must wait."""
        while not self._rotation[0].left_bytes:
            self._retire(self._rotation.popleft())
        return self._rotation[0]

    def passed(self) -> None:
        """The first has had its turn."""
        self._rotation.rotate(-1)

    def _is_first(self, queued: Queued) -> bool:
        return all(self._by_session[key][0] is queued for key in _keys(queued))

    def _retire(self, done: Queued) -> None:
        """A message was sent or cancelled: those behind it may take part."""
        behind: dict[Queued, None] = {}
        for key in _keys(done):
            waiting = self._by_session[key]
            waiting.popleft()
            if waiting:
                behind[waiting[0]] = None
            else:
                del self._by_session[key]
        self._rotation.extend(queued for queued in behind if self._is_first(queued))


def _keys(queued: Queued) -> tuple[_Key, ...]:
    outgoing = queued.outgoing
    sessions = dict.fromkeys(outgoing.sessions) or (b"",)
    traffic_class = outgoing.traffic_class
    return tuple([(traffic_class, session) for session in sessions])
