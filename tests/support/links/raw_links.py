"""Calls to a peer's port without a client's manners: for tests that do not follow the protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from molink.client.api.swarm import AsyncSwarm
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.certificate import server_name
from molink.peer.wire.link.dialling import LINK_METHOD
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import decode, expect

TURNED_AWAY_WITHIN_S = 200.0


def facts_of(client: AsyncSwarm, name: str = "whole") -> PeerFacts:
    connection = client.connection
    return next(view.facts for view in connection.snapshot() if view.facts.name == name)


@asynccontextmanager
async def dialled(facts: PeerFacts) -> AsyncIterator["grpc.aio.StreamStreamCall[bytes, bytes]"]:
    """An open call to the peer, whose certificate is pinned, before anything is proven."""
    pinned = x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
    options = [
        ("grpc.ssl_target_name_override", server_name(facts.peer_id)),
        ("grpc.max_send_message_length", -1),
    ]
    credentials = grpc.ssl_channel_credentials(root_certificates=pinned)
    async with grpc.aio.secure_channel(facts.grpc_addresses[0], credentials, options=options) as channel:
        call = channel.stream_stream(LINK_METHOD)()
        try:
            yield call
        finally:
            call.cancel()


async def question_of(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> pb.Challenge:
    data = await call.read()
    assert isinstance(data, bytes)
    return expect(decode(data), pb.Challenge)


async def refusal_of(call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> tuple[grpc.StatusCode, str]:
    """How the peer ended the call; it has to within TURNED_AWAY_WITHIN_S."""
    async with asyncio.timeout(TURNED_AWAY_WITHIN_S):
        with suppress(grpc.aio.AioRpcError):  # as its code and details say
            while isinstance(await call.read(), bytes):
                pass  # what was on its way before
        return await call.code(), await call.details()
