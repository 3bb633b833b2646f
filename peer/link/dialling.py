"""Dialling: a TLS connection to a peer's pinned certificate, on which this end then proves who it is."""

import asyncio
from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from molink.dht.addresses import ANYWHERE, Ranges, dialled_as, host_of, may_dial
from molink.dht.certificate import server_name
from molink.dht.identity import Identity
from molink.dht.records import PeerFacts
from molink.dht.swarm_key import SwarmKey
from molink.peer.link.handshake import HandshakeRefused, prove
from molink.peer.link.link import LinkError, Resumed
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import ProtocolError, decode, encode, expect
from molink.peer.protocol.packets import MAX_PACKET_BYTES
from molink.shards.address_ranges import range_of

LINK_METHOD = "/molink.Peer/Link"
DIAL_TIMEOUT_S = 5.0
REDIAL_DELAYS_S = (0.0, 0.05, 0.1, *(0.2,) * 9)
"""Before each try to resume a link whose connection broke: what breaks connections may break the next few as well."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_PACKET_BYTES),
    ("grpc.max_send_message_length", MAX_PACKET_BYTES),
    # or a failed dial's back-off would delay the next one to the same address
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcStream(Protocol):
    """What is used of a grpc.aio call."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...

    def cancel(self) -> bool: ...

    async def code(self) -> grpc.StatusCode: ...

    async def initial_metadata(self) -> grpc.aio.Metadata: ...

    async def trailing_metadata(self) -> grpc.aio.Metadata: ...

    async def details(self) -> str: ...


class DialledConnection:
    """A call of this end, with the channel that is its own."""

    def __init__(self, call: GrpcStream, channel: grpc.aio.Channel) -> None:
        self.stream = call
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = channel

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self) -> None:
        self.lost()
        self.stream.cancel()
        await self._channel.close()


class Dialler:
    """Dials peers for one identity."""

    def __init__(
        self,
        identity: Identity,
        swarm_key: SwarmKey | None,
        *,
        is_client: bool,
        http_proxy: str | None,
        own_ranges: Ranges = ANYWHERE,
    ) -> None:
        """Addresses in other than `own_ranges` are not dialled (`dht/addresses.py`); what a name stands for is asked
        here, or by the proxy if there is one."""
        self._identity = identity
        self._swarm_key = swarm_key
        self._is_client = is_client
        self._own_ranges = own_ranges
        self._resolves = http_proxy is None and own_ranges != ANYWHERE
        self._options = [*CHANNEL_OPTIONS, *_proxy_options(http_proxy)]

    async def dial(self, facts: PeerFacts, link_id: bytes) -> DialledConnection:
        """A proven connection for a new link.

        Raises:
            LinkError: nobody answers at any of the peer's addresses, or the one who does is not that peer.
        """
        return (await self._dial(facts, pb.Proof(link_id=link_id))).connection  # type: ignore[return-value]

    async def redial(self, facts: PeerFacts, link_id: bytes, received: int) -> Resumed:
        """Another connection for a link whose connection broke; tries a few times.

        Raises:
            LinkError: nobody is there, or the other end does not know the link.
        """
        asked = pb.Proof(link_id=link_id, resumes=True, received=received)
        for delay_s in REDIAL_DELAYS_S:
            await asyncio.sleep(delay_s)
            try:
                return await self._dial(facts, asked)
            except LinkError as error:
                if error.final:
                    raise
                last = error
        raise last

    async def _dial(self, facts: PeerFacts, asked: pb.Proof) -> Resumed:
        if not facts.grpc_addresses:
            raise LinkError(facts.peer_id, "it announces no address that can be dialled")
        errors: list[tuple[str, LinkError]] = []
        for address in facts.grpc_addresses:
            for target in await self._targets(address):
                try:
                    return await self._dial_address(facts, target, asked)
                except LinkError as error:
                    errors.append((target, error))
        if not errors:
            raise LinkError(
                facts.peer_id, "it announces no address that may be dialled from here", final=True
            )
        raise LinkError(
            facts.peer_id,
            "; ".join(f"{target}: {error.reason}" for target, error in errors),
            final=all(error.final for _, error in errors),
        )

    async def _targets(self, address: str) -> tuple[str, ...]:
        """What is dialled for an announced address."""
        if self._resolves:
            return await dialled_as(address, self._own_ranges)
        unknown = range_of(host_of(address)) is None
        return (address,) if unknown or may_dial(address, self._own_ranges) else ()

    async def _dial_address(self, facts: PeerFacts, address: str, asked: pb.Proof) -> Resumed:
        try:
            pinned = x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
        except ValueError as error:  # signed or not, what a peer announces need not be a certificate
            raise LinkError(facts.peer_id, "what it announces is not a certificate") from error
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(root_certificates=pinned),
            options=[*self._options, ("grpc.ssl_target_name_override", server_name(facts.peer_id))],
        )
        connection = DialledConnection(channel.stream_stream(LINK_METHOD)(), channel)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                welcome = await self._prove(connection.stream, facts, asked)
        except (
            LinkError,
            TimeoutError,
            ProtocolError,
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
            asyncio.CancelledError,
        ) as error:
            await connection.close()
            if isinstance(error, (LinkError, asyncio.CancelledError)):
                raise
            raise LinkError(facts.peer_id, _why(error), final=_is_final(error)) from error
        return Resumed(connection, welcome.received)

    async def _prove(self, call: GrpcStream, facts: PeerFacts, asked: pb.Proof) -> pb.Welcome:
        question = expect(decode(await _read(call)), pb.Challenge)
        proof = prove(
            question,
            self._identity,
            facts.certificate,
            self._swarm_key,
            link_id=asked.link_id,
            is_client=self._is_client,
        )
        proof.resumes, proof.received = asked.resumes, asked.received
        await call.write(encode(proof))
        welcome = expect(decode(await _read(call)), pb.Welcome)
        if welcome.peer_id != facts.peer_id:
            raise HandshakeRefused(f"{welcome.peer_id} answered in its place")
        if welcome.resumed != asked.resumes:
            raise HandshakeRefused("it does not know this link any more")
        return welcome


def _proxy_options(http_proxy: str | None) -> Sequence[tuple[str, str | int]]:
    """Without a proxy of ours, those that the environment names for the web are not used either."""
    if http_proxy is None:
        return [("grpc.enable_http_proxy", 0)]
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", http_proxy)]


async def _read(call: GrpcStream) -> bytes:
    data = await call.read()
    if not isinstance(data, bytes):
        raise grpc.aio.AioRpcError(
            await call.code(),
            await call.initial_metadata(),
            await call.trailing_metadata(),
            await call.details(),
        )
    return data


def _why(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {DIAL_TIMEOUT_S:g} s"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)


def _is_final(error: BaseException) -> bool:
    """Whether another try would end the same: nobody listens there, or what answers is not who was meant."""
    if isinstance(error, grpc.aio.AioRpcError):
        refused = "refused" in (error.details() or "").lower()
        return refused or error.code() is grpc.StatusCode.UNAUTHENTICATED
    return isinstance(error, ProtocolError)
