"""How long nothing but pings has travelled on a link's stream."""

import asyncio

from molink.peer.link import Stream
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import encode

_KIND_OFFSET = 1
_PINGS = frozenset(encode(header)[_KIND_OFFSET] for header in (pb.Ping(), pb.Pong()))


class WatchedStream:
    """A stream that knows when it was last of use. What waits to be written is in use."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._writing = False
        self._used_s = asyncio.get_running_loop().time()

    @property
    def quiet_s(self) -> float:
        """Seconds since anything but a ping or its answer travelled, in either direction."""
        return 0.0 if self._writing else asyncio.get_running_loop().time() - self._used_s

    async def read(self) -> object:
        data = await self._stream.read()
        if isinstance(data, bytes):
            self._note(data)
        return data

    async def write(self, message: bytes) -> None:
        self._writing = True
        try:
            await self._stream.write(message)
        finally:
            self._writing = False
        self._note(message)

    def _note(self, message: bytes) -> None:
        if message[_KIND_OFFSET : _KIND_OFFSET + 1] and message[_KIND_OFFSET] not in _PINGS:
            self._used_s = asyncio.get_running_loop().time()
