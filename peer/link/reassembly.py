"""Chunks that arrive, made messages again. Pure."""

from molink.peer.protocol.packets import CloseCode, Data, PacketError

MAX_PARTIAL_BYTES = 64 * 1024 * 1024
MAX_PARTIAL_MESSAGES = 4096


class _Partial:
    """A message of which chunks are missing."""

    __slots__ = ("buffer", "message_bytes", "traffic_class")

    def __init__(self, chunk: Data) -> None:
        self.buffer = bytearray()
        self.message_bytes = chunk.message_bytes
        self.traffic_class = chunk.traffic_class


class Reassembly:
    """The receiving end of a link, over all its connections.

    A message takes the memory of what has arrived of it, whatever length it declares; all unfinished ones together
    at most `limit_bytes`, and there are at most `limit_messages`.
    """

    def __init__(
        self, limit_bytes: int = MAX_PARTIAL_BYTES, limit_messages: int = MAX_PARTIAL_MESSAGES
    ) -> None:
        self.received = 0
        """Sequence number of the last chunk taken."""
        self.partial_bytes = 0
        self._limit_bytes = limit_bytes
        self._limit_messages = limit_messages
        self._partials: dict[int, _Partial] = {}

    def __len__(self) -> int:
        """Messages that are not whole yet."""
        return len(self._partials)

    def add(self, chunk: Data) -> memoryview | None:
        """Takes the next chunk; the message that it makes whole, if it does.

        Raises:
            PacketError: it is not the next chunk, contradicts earlier ones, or is too much.
        """
        if chunk.sequence != self.received + 1:
            raise PacketError(
                CloseCode.SEQUENCE, f"chunk {chunk.sequence} came where {self.received + 1} was expected"
            )
        partial = self._partials.get(chunk.message)
        if partial is None:
            self._begin(chunk)
            if len(chunk.payload) == chunk.message_bytes:
                self.received = chunk.sequence
                return chunk.payload
            partial = self._partials[chunk.message] = _Partial(chunk)
        self._continue(partial, chunk)
        self.received = chunk.sequence
        if len(partial.buffer) < partial.message_bytes:
            return None
        self.drop(chunk.message)
        return memoryview(partial.buffer)

    def drop(self, message: int) -> None:
        """Forgets what has come of a message; one that is whole or unknown is no matter."""
        partial = self._partials.pop(message, None)
        if partial is not None:
            self.partial_bytes -= len(partial.buffer)

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
        partial.buffer += chunk.payload
        self.partial_bytes += len(chunk.payload)
