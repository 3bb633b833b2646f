"""Frames on a libp2p stream: two bytes of length, then so many bytes."""

from collections.abc import Iterable
from typing import Protocol

import trio

MAX_FRAME_BYTES = 65_535
_LENGTH_BYTES = 2


class StreamEndedError(ConnectionError):
    """The other side has closed or reset the stream, or the connection is gone."""


class ByteStream(Protocol):
    """Byte stream, as libp2p's is."""

    async def read(self, n: int | None = None) -> bytes: ...
    async def write(self, data: bytes) -> None: ...
    async def close(self) -> None: ...
    async def reset(self) -> None: ...


class FrameStream:
    """A stream to one peer, as frames. One task may read and another one write."""

    def __init__(self, stream: ByteStream, peer_id: str) -> None:
        self._stream = stream
        self.peer_id = peer_id
        """Proven by the connection's noise handshake."""
        self._buffer = bytearray()
        self.bytes_in = 0
        self.bytes_out = 0

    async def send(self, frames: Iterable[bytes]) -> None:
        """Writes all frames at once.

        Raises:
            StreamEndedError: the stream is over.
        """
        await self.write(b"".join(len(frame).to_bytes(_LENGTH_BYTES) + frame for frame in frames))

    async def write(self, data: bytes) -> None:
        """Writes bytes as they are.

        Raises:
            StreamEndedError: the stream is over.
        """
        try:
            await self._stream.write(data)
        except Exception as error:  # libp2p raises a dozen unrelated types
            raise StreamEndedError(f"the stream to {self.peer_id} is closed: {error!r}") from error
        self.bytes_out += len(data)

    async def receive(self, limit: int) -> bytes:
        """The next frame, of at most `limit` bytes.

        Raises:
            StreamEndedError: the stream is over, or the frame is longer than `limit`.
        """
        await self.yield_to_others()
        length = int.from_bytes(await self._read_exactly(_LENGTH_BYTES))
        if length > limit:
            raise StreamEndedError(
                f"{self.peer_id} sent a frame of {length} bytes, at most {limit} are allowed"
            )
        return await self._read_exactly(length)

    async def yield_to_others(self) -> None:
        """A full buffer must not keep the thread from everybody else."""
        await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """Ends the stream; what was sent still arrives."""
        with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
            try:
                await self._stream.close()
            except Exception:  # noqa: BLE001 it is over either way
                await self.reset()

    async def reset(self) -> None:
        """Ends the stream at once."""
        with trio.CancelScope(deadline=trio.current_time() + 1.0, shield=True):
            try:
                await self._stream.reset()
            except Exception:  # noqa: BLE001 it is over either way
                return

    async def _read_exactly(self, count: int) -> bytes:
        while len(self._buffer) < count:
            try:
                data = await self._stream.read(MAX_FRAME_BYTES)
            except Exception as error:  # libp2p raises a dozen unrelated types
                raise StreamEndedError(f"the stream to {self.peer_id} is closed: {error!r}") from error
            if not data:
                raise StreamEndedError(f"{self.peer_id} has closed the stream")
            self.bytes_in += len(data)
            self._buffer += data
        frame = bytes(self._buffer[:count])
        del self._buffer[:count]
        return frame
