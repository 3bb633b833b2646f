"""Memory of the messages to the other end of a link, from when they are queued until they are acknowledged. Pure."""

from collections import deque

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.message_memory import MemoryAccount

UNCOUNTED_BYTES = 4096
"""Messages no longer than this, such as tokens, are bounded by their number alone."""
_SMALL = frozenset((TrafficClass.DECODE, TrafficClass.CONTROL))
"""What has bounds of its own, and never waits for memory."""


class SentMemory:
    """Memory of one link's outgoing messages: taken by each, given back in the order of their last chunks."""

    __slots__ = ("_holder", "_kept", "answer_bytes")

    def __init__(self, holder: MemoryAccount) -> None:
        self._holder = holder
        self.answer_bytes = 0
        """Of answers with a payload that the other end has not acknowledged."""
        self._kept: deque[tuple[int, int, bool]] = deque()
        """Of messages that were sent to their end, or cancelled: the last chunk, the bytes, and whether it was an
        answer; until that chunk is acknowledged."""

    def take(self, size_bytes: int, traffic_class: TrafficClass) -> bool:
        """Takes memory for a message. False: there is none now."""
        if size_bytes > UNCOUNTED_BYTES:
            if not self._holder.take_out(size_bytes, always=traffic_class in _SMALL):
                return False
            if traffic_class is TrafficClass.WEIGHTS:
                self.answer_bytes += size_bytes
        return True

    def give(self, size_bytes: int, traffic_class: TrafficClass) -> None:
        """Gives back the memory of a message of which nothing is in flight."""
        if size_bytes > UNCOUNTED_BYTES:
            if traffic_class is TrafficClass.WEIGHTS:
                self.answer_bytes -= size_bytes
            self._holder.give_out(size_bytes)

    def keep(self, size_bytes: int, traffic_class: TrafficClass, last_chunk: int) -> None:
        """Nothing more of a message will be sent: its memory is free when that chunk is acknowledged."""
        if size_bytes > UNCOUNTED_BYTES:
            self._kept.append((last_chunk, size_bytes, traffic_class is TrafficClass.WEIGHTS))

    def let_go(self, acknowledged: int) -> bool:
        """Gives back the memory of messages that are acknowledged. Returns whether an answer was among them."""
        kept, answered = self._kept, False
        while kept and kept[0][0] <= acknowledged:
            _, size_bytes, is_answer = kept.popleft()
            self._holder.give_out(size_bytes)
            if is_answer:
                self.answer_bytes -= size_bytes
                answered = True
        return answered

    def close(self) -> None:
        """The link is gone with all that it held."""
        self._holder.close()
