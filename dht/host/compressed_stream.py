"""Compressed stream: frames on a libp2p stream, deflated, one dictionary for each direction.

Records of one swarm are much alike: a model's hash, names, the frame of a certificate. Each direction is one deflate
stream (RFC 1951), flushed after each batch, in frames of the stream beneath; what comes out are frames again.
"""

import zlib
from collections.abc import Iterable

from molink.dht.host.framing import MAX_FRAME_BYTES, FrameStream, StreamEndedError

_LENGTH_BYTES = 2
_WINDOW_BITS = -15
"""32 KiB, and no head: the stream beneath says what it is."""
_LEVEL = 6


class Deflater:
    """Deflater of one direction's frames. Not for several streams."""

    def __init__(self) -> None:
        self._deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS)

    def pack(self, frames: Iterable[bytes]) -> list[bytes]:
        """Chunks to be sent, in order, none longer than a frame may be."""
        data = b"".join(len(frame).to_bytes(_LENGTH_BYTES) + frame for frame in frames)
        deflated = self._deflate.compress(data) + self._deflate.flush(zlib.Z_SYNC_FLUSH)
        return [deflated[at : at + MAX_FRAME_BYTES] for at in range(0, len(deflated), MAX_FRAME_BYTES)]


class Inflater:
    """Inflater of what the other side deflated.

    Holds the chunk that it was fed last and one frame, however much it inflates to.
    """

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_WINDOW_BITS)
        self._deflated = b""
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        """Bytes kept in memory for frames that are not complete."""
        return len(self._buffer) + len(self._deflated)

    def feed(self, chunk: bytes) -> None:
        """Takes in another chunk; all frames before it must have been taken."""
        self._deflated += chunk

    def take(self, limit: int) -> bytes | None:
        """The next frame, of at most `limit` bytes; None: another chunk is needed first.

        Raises:
            ValueError: this is nothing that a `Deflater` made, or the frame is longer.
        """
        if not self._fill(_LENGTH_BYTES):
            return None
        length = int.from_bytes(self._buffer[:_LENGTH_BYTES])
        if length > limit:
            raise ValueError(f"a frame of {length} bytes, at most {limit} are allowed")
        if not self._fill(_LENGTH_BYTES + length):
            return None
        frame = bytes(self._buffer[_LENGTH_BYTES : _LENGTH_BYTES + length])
        del self._buffer[: _LENGTH_BYTES + length]
        return frame

    def _fill(self, count: int) -> bool:
        while len(self._buffer) < count:
            lacking = count - len(self._buffer)
            try:
                inflated = self._inflate.decompress(self._deflated, lacking)
            except zlib.error as error:
                raise ValueError("what was sent cannot be inflated") from error
            self._deflated = self._inflate.unconsumed_tail
            if self._inflate.eof:
                raise ValueError("the deflate stream ended before the stream beneath it")
            if not inflated and not self._deflated:
                return False
            self._buffer += inflated
        return True


class CompressedStream:
    """A stream to one peer, as frames that are deflated on their way. One task may read and another one write."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._deflater = Deflater()
        self._inflater = Inflater()

    @property
    def peer_id(self) -> str:
        """Proven by the connection's noise handshake."""
        return self._stream.peer_id

    @property
    def bytes_in(self) -> int:
        return self._stream.bytes_in

    @property
    def bytes_out(self) -> int:
        return self._stream.bytes_out

    async def send(self, frames: Iterable[bytes]) -> None:
        """Writes all frames at once.

        Raises:
            StreamEndedError: the stream is over.
        """
        await self._stream.send(self._deflater.pack(frames))

    async def receive(self, limit: int) -> bytes:
        """The next frame, of at most `limit` bytes.

        Raises:
            StreamEndedError: the stream is over, cannot be inflated, or the frame is longer than `limit`.
        """
        await self._stream.yield_to_others()
        try:
            while (frame := self._inflater.take(limit)) is None:
                self._inflater.feed(await self._stream.receive(MAX_FRAME_BYTES))
        except ValueError as error:
            raise StreamEndedError(f"{self.peer_id} sent what cannot be taken in: {error}") from error
        return frame

    async def close(self) -> None:
        """Ends the stream; what was sent still arrives."""
        await self._stream.close()

    async def reset(self) -> None:
        """Ends the stream at once."""
        await self._stream.reset()
