"""An end of a link that does by hand what the test says: the handshake, then packets."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc.aio
from google.protobuf.message import Message
from support.links.data_plane import DEADLINE_S, End, soon, until

from molink.dht.identity.identity import Identity
from molink.peer.wire.link.certificate import server_name
from molink.peer.wire.link.dialled_connection import GrpcStream
from molink.peer.wire.link.dialling import LINK_METHOD
from molink.peer.wire.link.handshake import LINK_ID_BYTES, prove
from molink.peer.wire.protocol import frames, packets
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.packets import Ack, Data, Packet, Ping
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.reassembly import Reassembly

LINK_ID = bytes(range(LINK_ID_BYTES))


class RawEnd:
    """The dialling end of a proven link, after the handshake."""

    def __init__(self, call: GrpcStream, identity: Identity) -> None:
        self.call = call
        self.identity = identity
        self.reassembly = Reassembly()
        self.sequence = 0
        self._messages = itertools.count(1)

    @property
    def peer_id(self) -> str:
        return self.identity.peer_id

    async def packet(self) -> Packet:
        """The next packet, whatever it is."""
        return packets.decode(await read(self.call))

    async def header(self) -> Message:
        """The header of the next message. What comes meanwhile is acknowledged, and pings are answered."""
        while True:
            packet = await self.packet()
            if isinstance(packet, Ping):
                await self.call.write(packets.encode_pong(packet.number))
            elif isinstance(packet, Data):
                message = self.reassembly.add_chunk(packet)
                await self.call.write(packets.encode_ack(Ack(packet.sequence, 0, ())))
                if message is not None:
                    return frames.decode(message).header

    async def send(self, content: bytes, traffic_class: TrafficClass = TrafficClass.CONTROL) -> None:
        """A message of one chunk."""
        self.sequence += 1
        await self.call.write(
            packets.encode_data(
                traffic_class, next(self._messages), len(content), 0, self.sequence, memoryview(content)
            )
        )

    async def closed(self) -> packets.Close:
        """The packet by which the other end closes the link."""
        while True:
            packet = await self.packet()
            if isinstance(packet, packets.Close):
                return packet


async def read(call: GrpcStream) -> bytes:
    data = await soon(call.read())
    assert isinstance(data, bytes)
    return data


@asynccontextmanager
async def raw_call(end: End) -> AsyncIterator[GrpcStream]:
    """A dialler that does as the test says: nothing of the handshake is done yet."""
    channel = grpc.aio.secure_channel(
        end.facts.grpc_addresses[0],
        grpc.ssl_channel_credentials(root_certificates=end.certificate.pem),
        options=[
            ("grpc.ssl_target_name_override", server_name(end.peer_id)),
            ("grpc.max_send_message_length", -1),
        ],
    )
    async with channel:
        call = channel.stream_stream(LINK_METHOD)()
        try:
            yield call
        finally:
            call.cancel()


async def proven(
    call: GrpcStream,
    end: End,
    identity: Identity,
    *,
    link_id: bytes = LINK_ID,
    resumes: bool = False,
    received: int = 0,
) -> pb.Welcome:
    """Does the handshake."""
    question = frames.expect(frames.decode(await read(call)), pb.Challenge)
    proof = prove(question, identity, end.certificate.der, None, link_id=link_id, is_client=False)
    proof.resumes, proof.received = resumes, received
    await call.write(frames.encode(proof))
    return frames.expect(frames.decode(await read(call)), pb.Welcome)


@asynccontextmanager
async def raw_link(end: End) -> AsyncIterator[RawEnd]:
    """An end that has been let in."""
    identity = Identity.generate()
    async with raw_call(end) as call:
        assert (await proven(call, end, identity)).peer_id == end.peer_id
        await until(lambda: end.links.find(identity.peer_id) is not None)
        yield RawEnd(call, identity)


async def ended(call: GrpcStream) -> grpc.StatusCode:
    """How the other end has ended the call, once it has."""
    async with asyncio.timeout(DEADLINE_S):
        with suppress(grpc.aio.AioRpcError):  # as its code says
            while isinstance(await call.read(), bytes):
                pass  # what was on its way before
        return await call.code()
