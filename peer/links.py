"""All links of one process: dialled on demand, accepted from others, one for each remote."""

import asyncio
from types import TracebackType
from typing import Protocol, Self

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from molink.dht.certificate import server_name
from molink.dht.identity import Identity
from molink.dht.records import PeerFacts
from molink.dht.swarm_key import SwarmKey
from molink.peer.handshake import HandshakeRefused, Remote, prove
from molink.peer.link import Link, LinkError, LinkHandler
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import MAX_FRAME_BYTES, ProtocolError, decode, encode, expect

LINK_METHOD = "/molink.Peer/Link"
DIAL_TIMEOUT_S = 5.0
IDLE_TIMEOUT_S = 60.0
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # or a failed dial's back-off would delay the next one to the same address
    ("grpc.enable_http_proxy", 0),
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


class Links:
    """Owner of this process's links. Dial with `to`, look up with `find`; accepted links come in through `accepted`."""

    def __init__(
        self, identity: Identity, handler: LinkHandler, swarm_key: SwarmKey | None, *, is_client: bool
    ) -> None:
        self._identity = identity
        self._handler = handler
        self._swarm_key = swarm_key
        self._is_client = is_client
        self._links: dict[str, Link] = {}
        self._dialling: dict[str, asyncio.Task[Link]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in self._links.values():
            link.close("this end is stopping")
        for task in (*self._dialling.values(), *self._running):
            task.cancel()
        await asyncio.gather(*self._dialling.values(), *self._running, return_exceptions=True)

    def find(self, peer_id: str) -> Link | None:
        """The open link to a peer or client, if there is one."""
        link = self._links.get(peer_id)
        return link if link is not None and link.closed_because is None else None

    def all(self) -> tuple[Link, ...]:
        return tuple(link for link in self._links.values() if link.closed_because is None)

    async def to(self, facts: PeerFacts, timeout_s: float = DIAL_TIMEOUT_S) -> Link:
        """The link to a peer: the open one, or a new one.

        Raises:
            LinkError: nobody answers there, or the one who does is not that peer.
        """
        link = self.find(facts.peer_id)
        if link is not None:
            return link
        dialling = self._dialling.get(facts.peer_id)
        if dialling is None:
            dialling = asyncio.create_task(self._dial(facts), name=f"dial {facts.peer_id}")
            self._dialling[facts.peer_id] = dialling
            dialling.add_done_callback(lambda _: self._dialling.pop(facts.peer_id, None))
            dialling.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dialling)
        except TimeoutError:
            raise LinkError(facts.peer_id, f"not reached within {timeout_s:g} s") from None

    def accepted(self, link: Link) -> None:
        """Takes in a link that the other end dialled. The newest link to a remote is the one that is used."""
        self._links[link.peer_id] = link

    def forget(self, link: Link) -> None:
        """The link has closed."""
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]

    async def _dial(self, facts: PeerFacts) -> Link:
        if not facts.grpc_addresses:
            raise LinkError(facts.peer_id, "it announces no address that can be dialled")
        reasons: list[str] = []
        for address in facts.grpc_addresses:
            try:
                return await self._dial_address(facts, address)
            except LinkError as error:
                reasons.append(f"{address}: {error.reason}")
        raise LinkError(facts.peer_id, "; ".join(reasons))

    async def _dial_address(self, facts: PeerFacts, address: str) -> Link:
        try:
            pinned = x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
        except ValueError as error:  # signed or not, what a peer announces need not be a certificate
            raise LinkError(facts.peer_id, "what it announces is not a certificate") from error
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(root_certificates=pinned),
            options=[*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", server_name(facts.peer_id))],
        )
        call: GrpcStream = channel.stream_stream(LINK_METHOD)()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._prove(call, facts)
        except (
            LinkError,
            TimeoutError,
            ProtocolError,
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
            asyncio.CancelledError,
        ) as error:
            call.cancel()
            await channel.close()
            if isinstance(error, (LinkError, asyncio.CancelledError)):
                raise
            raise LinkError(facts.peer_id, _why(error)) from error
        link = Link(call, Remote(facts.peer_id, is_client=False), self._handler)
        self._links[facts.peer_id] = link
        task = asyncio.create_task(self._run(link, call, channel), name=f"link {facts.peer_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return link

    async def _prove(self, call: GrpcStream, facts: PeerFacts) -> None:
        question = expect(decode(await _read(call)), pb.Challenge)
        proof = prove(question, self._identity, facts.certificate, self._swarm_key, is_client=self._is_client)
        await call.write(encode(proof))
        welcome = expect(decode(await _read(call)), pb.Welcome)
        if welcome.peer_id != facts.peer_id:
            raise HandshakeRefused(f"{welcome.peer_id} answered in its place")

    async def _run(self, link: Link, call: GrpcStream, channel: grpc.aio.Channel) -> None:
        try:
            await link.run()
        finally:
            self.forget(link)
            call.cancel()
            await channel.close()


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


def _retrieve(task: "asyncio.Task[Link]") -> None:
    """Marks a failed dial's error as seen, for when all who waited for it have given up."""
    if not task.cancelled():
        task.exception()
