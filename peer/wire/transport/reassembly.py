"""Reassembly of messages from the chunks that arrive. Pure."""

from molink.peer.wire.protocol.packets import CloseCode, Data, PacketError
from molink.peer.wire.transport.message_memory import MemoryAccount

MAX_PARTIAL_BYTES = 64 * 1024 * 1024
MAX_PARTIAL_MESSAGES = 4096
PARTIAL_BYTES = 256
"""What keeping an unfinished message takes beside what has come of it."""
PROGRESS_S = 30.0
"""A message of which nothing has come for so long, and a chunk that is not acknowledged, ends its link."""


class _Partial:
    """A message of which chunks are missing."""

    __slots__ = ("at_s", "buffer", "message_bytes", "traffic_class")

    def __init__(self, chunk: Data) -> None:
        self.at_s = 0.0
        """When its last chunk came."""
        self.buffer = bytearray()
        self.message_bytes = chunk.message_bytes
        self.traffic_class = chunk.traffic_class


class Reassembly:
    """Reassembly at the receiving end of a link, over all its connections.

    A message takes the memory of what has arrived of it, whatever length it declares; all unfinished ones together
    at most `limit_bytes`, and there are at most `limit_messages`. Beyond that, all links of a process share what their
    holders have.
    """

    def __init__(
        self,
        limit_bytes: int = MAX_PARTIAL_BYTES,
        limit_messages: int = MAX_PARTIAL_MESSAGES,
        holder: MemoryAccount | None = None,
    ) -> None:
        self.received = 0
        """Sequence number of the last chunk taken."""
        self.partial_bytes = 0
        self._limit_bytes = limit_bytes
        self._limit_messages = limit_messages
        self._holder = holder
        self._partials: dict[int, _Partial] = {}
        """That of which nothing has come for longest is the first."""

    def __len__(self) -> int:
        """Messages that are not whole yet."""
        return len(self._partials)

    def waits_since_s(self) -> float | None:
        """When the last chunk came of the message of which none has come for longest; None: all are whole."""
        return next(iter(self._partials.values())).at_s if self._partials else None

    def add_chunk(self, chunk: Data, now_s: float = 0.0) -> memoryview | None:
        """Takes the next chunk; the message that it makes whole, if it does.

        Raises:
            PacketError: it is not the next chunk, contradicts earlier ones, or is too much.
        """
        if chunk.sequence != self.received + 1:
            raise PacketError(
                CloseCode.SEQUENCE, f"chunk {chunk.sequence} came where {self.received + 1} was expected"
            )
        partial = self._partials.pop(chunk.message, None)
        if partial is None:
            self._begin(chunk)
            if len(chunk.payload) == chunk.message_bytes:
                self.received = chunk.sequence
                return chunk.payload
            self._take(PARTIAL_BYTES)
            partial = _Partial(chunk)
        self._partials[chunk.message] = partial
        self._continue(partial, chunk)
        partial.at_s = now_s
        self.received = chunk.sequence
        if len(partial.buffer) < partial.message_bytes:
            return None
        self.drop_message(chunk.message)
        return memoryview(partial.buffer)

    def drop_message(self, message: int) -> None:
        """Forgets what has come of a message; one that is whole or unknown is no matter."""
        partial = self._partials.pop(message, None)
        if partial is not None:
            self.partial_bytes -= len(partial.buffer)
            if self._holder is not None:
                self._holder.give_in(len(partial.buffer) + PARTIAL_BYTES)

    def clear(self) -> None:
        """Forgets what has come of all messages."""
        for message in tuple(self._partials):
            self.drop_message(message)

    def _begin(self, chunk: Data) -> None:
        if chunk.offset:
            raise PacketError(CloseCode.OFFSET, f"message {chunk.message} begins at {chunk.offset}")
        if len(self._partials) >= self._limit_messages and len(chunk.payload) < chunk.message_bytes:
            raise PacketError(CloseCode.OVERLOAD, f"more than {self._limit_messages} unfinished messages")

    def _continue(self, partial: _Partial, chunk: Data) -> None:
        if (partial.message_bytes, partial.traffic_class) != (chunk.message_bytes, chunk.traffic_class):
            raise PacketError(
                CloseCode.OFFSET, f"message {chunk.message} has changed its length or its class"
            )
        if chunk.offset != len(partial.buffer):
            raise PacketError(
                CloseCode.OFFSET,
                f"message {chunk.message} goes on at {chunk.offset}, {len(partial.buffer)} bytes have come",
            )
        if self.partial_bytes + len(chunk.payload) > self._limit_bytes:
            raise PacketError(
                CloseCode.OVERLOAD, f"more than {self._limit_bytes} bytes of unfinished messages"
            )
        self._take(len(chunk.payload))
        partial.buffer += chunk.payload
        self.partial_bytes += len(chunk.payload)

    def _take(self, size_bytes: int) -> None:
        if self._holder is not None and not self._holder.take_in(size_bytes):
            raise PacketError(CloseCode.OVERLOAD, "more unfinished messages than this end has memory for")
