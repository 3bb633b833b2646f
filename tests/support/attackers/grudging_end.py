"""Grudging end: proves who it is, and takes no byte of what it is answered. HTTP/2 by hand: libraries do not."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from support.attackers.connection_attack import careless_tls, grpc_port
from support.links.data_plane import End, soon

from molink.dht.identity.identity import Identity
from molink.peer.wire.link.dialling import LINK_METHOD
from molink.peer.wire.link.handshake import LINK_ID_BYTES, challenge, prove
from molink.peer.wire.protocol import frames
from molink.peer.wire.protocol import molink_pb2 as pb

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACKNOWLEDGES, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
STREAM = 1
MESSAGE_HEAD_BYTES = 5
"""Of a message of gRPC: whether it is compressed, and its length."""
_numbers = itertools.count(1)


class GrudgingEnd:
    """An end that has sent its proof, if the other end waited for it; `over` is done when that has given up on the
    connection."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: Identity, link_id: bytes
    ) -> None:
        self.identity = identity
        self.link_id = link_id
        self.over: asyncio.Task[None] | None = None
        self._reader = reader
        self._writer = writer

    async def prove(self, end: End, *, resumes: bool) -> None:
        """Grants the bytes of the challenge, and proves itself."""
        headers = {
            ":method": "POST",
            ":scheme": "https",
            ":path": LINK_METHOD,
            ":authority": "x",
            "content-type": "application/grpc",
            "te": "trailers",
        }
        asked_bytes = MESSAGE_HEAD_BYTES + len(frames.encode(challenge()))
        self._send(SETTINGS, 0, 0, struct.pack("!HI", INITIAL_WINDOW_SIZE, 0), before=PREFACE)
        self._send(HEADERS, END_HEADERS, STREAM, b"".join(itertools.starmap(_literal, headers.items())))
        self._send(WINDOW_UPDATE, 0, STREAM, struct.pack("!I", asked_bytes))
        asked = b""
        while len(asked) < asked_bytes:
            asked += await soon(self._next_data())
        question = frames.expect(frames.decode(asked[MESSAGE_HEAD_BYTES:]), pb.Challenge)
        certificate = end.certificate.der
        proof = prove(question, self.identity, certificate, None, link_id=self.link_id, is_client=False)
        proof.resumes = resumes
        content = frames.encode(proof)
        self._send(DATA, 0, STREAM, b"\0" + struct.pack("!I", len(content)) + content)

    async def close(self) -> None:
        if self.over is not None:
            self.over.cancel()
            await asyncio.gather(self.over, return_exceptions=True)
        self._writer.transport.abort()

    async def hold(self) -> None:
        """Answers no more than HTTP/2 has to, until the other end closes."""
        with contextlib.suppress(OSError, EOFError):
            while True:
                await self._next_data()

    async def _next_data(self) -> bytes:
        """What the next frame of data holds. Raises EOFError."""
        while True:
            head = await self._reader.readexactly(9)
            content = await self._reader.readexactly(int.from_bytes(head[:3]))
            kind, flags = head[3], head[4]
            if kind == DATA:
                return content
            if kind in (SETTINGS, PING) and not flags & ACKNOWLEDGES:
                self._send(kind, ACKNOWLEDGES, 0, content if kind == PING else b"")

    def _send(self, kind: int, flags: int, stream: int, content: bytes, *, before: bytes = b"") -> None:
        head = len(content).to_bytes(3) + bytes([kind, flags]) + struct.pack("!I", stream)
        self._writer.write(before + head + content)


def _literal(name: str, value: str) -> bytes:
    """A header as HPACK writes it out, neither from a table nor into one."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


@asynccontextmanager
async def grudging_end(
    end: End, identity: Identity, *, resumes: bool = False, link_id: bytes | None = None
) -> AsyncIterator[GrudgingEnd]:
    """One that has proven itself, for a new link unless told."""
    chosen = next(_numbers).to_bytes(LINK_ID_BYTES) if link_id is None else link_id
    reader, writer = await asyncio.open_connection("127.0.0.1", grpc_port(end.facts), ssl=careless_tls())
    grudging = GrudgingEnd(reader, writer, identity, chosen)
    try:
        with contextlib.suppress(
            OSError, EOFError
        ):  # a busy machine may be too late: then it is over already
            await grudging.prove(end, resumes=resumes)
        grudging.over = asyncio.create_task(grudging.hold(), name="grudging end")
        yield grudging
    finally:
        await grudging.close()
