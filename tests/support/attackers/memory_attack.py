"""Links that leave as much as they can in a peer's memory."""

import asyncio
import itertools
from contextlib import AsyncExitStack, suppress

import grpc
import grpc.aio
from support.links.raw_links import dialled, question_of

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.handshake import prove
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import MAX_FRAME_BYTES, encode
from molink.peer.wire.protocol.packets import Ping, encode_data, encode_pong
from molink.peer.wire.protocol.packets import decode as decode_packet
from molink.peer.wire.transmission.classes import TrafficClass

CHUNK_BYTES = 64 * 1024
SAID_NO_MORE = (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError)


class LyingLink:
    """A proven link that answers pings, and acknowledges nothing."""

    def __init__(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        self._call = call
        self._sequences = itertools.count(1)
        self._messages = itertools.count(1)
        self.received_bytes = 0

    @classmethod
    async def dial(
        cls, facts: PeerFacts, identity: Identity, link_id: bytes, stack: AsyncExitStack
    ) -> "LyingLink":
        call = await stack.enter_async_context(dialled(facts))
        question = await question_of(call)
        await call.write(
            encode(prove(question, identity, facts.certificate, None, link_id=link_id, is_client=False))
        )
        await call.read()
        return cls(call)

    async def keep_alive(self) -> None:
        """Reads all that comes, until the link ends."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while isinstance(data := await self._call.read(), bytes):
                self.received_bytes += len(data)
                packet = decode_packet(data)
                if isinstance(packet, Ping):
                    await self._call.write(encode_pong(packet.number))

    async def begin_messages(self, size_bytes: int) -> None:
        """Sends so much of messages of the largest size, none of them whole; less if the link ends."""
        sent_bytes = 0
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while sent_bytes < size_bytes:
                message, offset = next(self._messages), 0
                while offset + CHUNK_BYTES < MAX_FRAME_BYTES and sent_bytes < size_bytes:
                    await self._call.write(
                        encode_data(
                            TrafficClass.PREFILL, message, MAX_FRAME_BYTES, offset, next(self._sequences),
                            bytes(CHUNK_BYTES),
                        )
                    )  # fmt: skip
                    offset += CHUNK_BYTES
                    sent_bytes += CHUNK_BYTES

    async def ask(self, request: pb.Request, times: int) -> None:
        """Asks the same so many times at once."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for number in range(1, times + 1):
                request.id = number
                content = encode(request)
                await self._call.write(
                    encode_data(
                        TrafficClass.CONTROL,
                        next(self._messages),
                        len(content),
                        0,
                        next(self._sequences),
                        content,
                    )
                )
