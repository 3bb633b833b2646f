"""The gRPC port: accepts links and lets in only who has proven an identity."""

import asyncio
import logging
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from molink.dht.errors import PortInUse
from molink.dht.membership.door import ConnectionLimiter, ConnectionLimits, network_of
from molink.dht.refusals import RefusalLog
from molink.peer.wire.link.certificate import Credentials
from molink.peer.wire.link.dialling import CHANNEL_OPTIONS, LINK_METHOD
from molink.peer.wire.link.handshake import HandshakeRefused, Remote, challenge, check
from molink.peer.wire.link.inbound import (
    HANDSHAKE_TIMEOUT_S,
    InboundGuard,
    descriptor_limit,
    grpc_options,
    inbound_limits,
    parse_peer,
)
from molink.peer.wire.link.link import Link, LinkHandler, Resumed
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError, decode, encode, expect
from molink.shards.address_ranges import AddressRange, range_of

MAX_LINKS = 256
"""Of peers and clients that have proven who they are. Strangers never take the last tenth."""
LINKS_OF_NETWORK = 128
"""Of a home behind one address, or a company behind a few."""
LINKS_OF_IDENTITY = 4
"""One is used. When both ends dial at once, or one has lost a link that the other has not, there are two."""
MAX_UNPROVEN = 64
"""Who has yet to prove itself. Beyond that the oldest make room: proof takes a round trip, so whoever means to prove
itself has done so before as many strangers have come after it."""
_log = logging.getLogger(__name__)


class AcceptedConnection:
    """A call of the other end; gRPC keeps it open until `closed`."""

    def __init__(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        self.stream = context
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self) -> None:
        self.lost()
        self.closed.set()


class Acceptor:
    """The listening side of a peer's data plane, between `__aenter__` and `__aexit__`."""

    def __init__(  # noqa: PLR0913 - four of them by name
        self,
        host: str,
        port: int,
        credentials: Credentials,
        links: Links,
        handler: LinkHandler,
        *,
        is_member: Callable[[str], bool] = lambda _: False,
        is_needed: Callable[[Link], bool] = lambda _: False,
        proof_s: float = HANDSHAKE_TIMEOUT_S,
    ) -> None:
        """`is_member`: whether an identity is known to belong to the swarm. `is_needed`: whether a session uses a link,
        which then makes room for nobody. `proof_s`: for each step of the proof that waits for the other end."""
        self.port = port
        self._host = host
        self._credentials = credentials
        self._links = links
        self._handler = handler
        self._is_needed = is_needed
        self._proof_s = proof_s
        self._refusals = RefusalLog(_log)
        self._limits = inbound_limits(descriptor_limit())
        self._inbound = InboundGuard(port, self._limits, self._refusals)
        most = min(MAX_LINKS, self._limits.connections - self._limits.unproven)
        self._limiter = ConnectionLimiter(
            ConnectionLimits(
                unproven=MAX_UNPROVEN,
                proven=most,
                of_network=min(LINKS_OF_NETWORK, most),
                of_identity=LINKS_OF_IDENTITY,
                proof_s=proof_s,
                idle_s=math.inf,
            ),
            is_member,
        )
        self._guests: dict[int, asyncio.Timeout | Link] = {}
        """How long whoever comes may still take, and the links."""
        self._watching: asyncio.Task[None] | None = None
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        method = grpc.stream_stream_rpc_method_handler(self._accept)
        service, name = LINK_METHOD.strip("/").split("/")
        options = [*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0), *grpc_options(self._limits)]
        server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        credentials = grpc.ssl_server_credentials(
            [(self._credentials.certificate.key_pem, self._credentials.certificate.pem)]
        )
        require_free_port(self._host, self.port)
        address = listen_address(self._host, self.port)
        try:
            self.port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise _port_in_use(address) from error
        await server.start()
        self._server = server
        self._inbound = InboundGuard(self.port, self._limits, self._refusals)
        self._watching = asyncio.create_task(self._inbound.keep_few(), name="watch inbound connections")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        try:
            await self._links.close()  # or the other ends would take it for a broken connection
        finally:  # also of who is cancelled meanwhile: a server that is not stopped goes on
            if self._server is not None:
                await self._server.stop(grace=0.2)

    async def _accept(self, _: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        address = parse_peer(context.peer())
        guest = self._enter(address[0])
        try:
            proof, remote = await self._handshake(guest, context)
            # what comes over a relay arrives from this machine: then it is where the relay saw it
            host = self._links.host_of(remote.peer_id) or address[0]
            remote = replace(remote, network=_network_of(host))
            connection = AcceptedConnection(context)
            self._inbound.proven(address)
            try:
                if proof.resumes:
                    await self._resume(guest, proof, remote, connection)
                else:
                    await self._begin(guest, proof, remote, connection)
                await connection.closed.wait()
            except TimeoutError:  # to abort the call would wait for the same end to take what it does not
                self._refusals.refused("links that take no welcome", remote.peer_id)
            finally:
                connection.lost()
        finally:
            self._inbound.gone(address)
            if not isinstance(self._guests.get(guest), Link):  # a link outlives its connections
                self._leave(guest)

    async def _begin(
        self, guest: int, proof: pb.Proof, remote: Remote, connection: "AcceptedConnection"
    ) -> None:
        """Raises TimeoutError."""
        context = connection.stream
        if self._links.accepted(remote.peer_id, proof.link_id) is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there is a link of that id")
        if not self._admit(guest, remote.peer_id):
            self._refusals.refused("links beyond what may be", remote.peer_id)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this peer has as many links as it takes")
        async with self._time_limit(guest):
            await context.write(encode(pb.Welcome(peer_id=self._credentials.peer_id)))
        if guest not in self._limiter:
            raise TimeoutError
        running = self._links.accept(proof.link_id, remote, connection)
        link = self._links.accepted(remote.peer_id, proof.link_id)
        if link is not None:
            self._guests[guest] = link
        running.add_done_callback(lambda _: self._leave(guest))

    def _enter(self, host: str) -> int:
        """Somebody is to prove itself; who has tried for longest makes room, if need be."""
        entry = self._limiter.admit(asyncio.get_running_loop().time(), network_of(host))
        for other in entry.sent_away:
            if self._send_away(other):
                self._refusals.refused("unproven links", host)
        assert entry.guest is not None  # noqa: S101 - nobody is refused before he has proven who he is
        return entry.guest

    def _admit(self, guest: int, peer_id: str) -> bool:
        """Whether there is room for a link of that peer, if need be that of others which nobody uses."""
        for other, link in self._guests.items():
            if isinstance(link, Link):
                if self._is_needed(link):
                    self._limiter.mark_busy(other)
                else:
                    self._limiter.mark_idle(other, link.used_s)
        entry = self._limiter.prove(guest, asyncio.get_running_loop().time(), peer_id)
        for other in entry.sent_away:
            self._send_away(other)
        return entry.guest is not None

    def _send_away(self, guest: int) -> bool:
        """Whether there was anything to end: a guest that the limiter has forgotten may be leaving by itself."""
        gone = self._guests.pop(guest, None)
        if isinstance(gone, Link):
            gone.close("it was not used, and makes room for another")
        elif gone is not None and not gone.expired():
            gone.reschedule(0.0)
        else:
            return False
        return True

    def _leave(self, guest: int) -> None:
        self._limiter.remove_guest(guest)
        self._guests.pop(guest, None)

    async def _resume(
        self, guest: int, proof: pb.Proof, remote: Remote, connection: "AcceptedConnection"
    ) -> None:
        """The new connection takes the place of the old one, whether that is known to be broken or not. Raises
        TimeoutError."""
        link = self._links.accepted(remote.peer_id, proof.link_id)
        async with self._time_limit(guest):
            if link is not None:
                await link.detach()
            known = link is not None and link.closed_because is None
            received = link.received if link is not None and known else 0
            await connection.stream.write(
                encode(pb.Welcome(peer_id=self._credentials.peer_id, resumed=known, received=received))
            )
        self._leave(guest)  # the link has a place of its own
        if link is None or not link.attach(Resumed(connection, proof.received)):
            await connection.close()

    async def _handshake(
        self, guest: int, context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> tuple[pb.Proof, Remote]:
        question = challenge()
        try:
            async with self._time_limit(guest):
                await context.write(encode(question))
                data = await context.read()
                if not isinstance(data, bytes):
                    raise HandshakeRefused("the other end hung up before it proved who it is")
                proof = expect(decode(data), pb.Proof)
                return proof, check(
                    proof, question, self._credentials.certificate.der, self._credentials.swarm_key
                )
        except TimeoutError:
            self._refusals.refused("unproven links", parse_peer(context.peer())[0])
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no proof of identity in time")
        except ProtocolError as error:
            self._refusals.refused("links without proof", parse_peer(context.peer())[0])
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        raise AssertionError("unreachable: abort raises")

    @asynccontextmanager
    async def _time_limit(self, guest: int) -> AsyncIterator[None]:
        """`proof_s`, or until the guest has to make room: for each step that waits for the other end, also
        once it is proven, as an end need not take what is written. Raises TimeoutError."""
        if guest not in self._limiter:
            raise TimeoutError
        async with asyncio.timeout(self._proof_s) as limit:
            self._guests[guest] = limit
            try:
                yield
            finally:
                self._guests.pop(guest, None)


def _network_of(host: str) -> str:
    """The dialler's network; empty where addresses tell nobody apart: behind a tunnel or a proxy at home all come from
    one."""
    return network_of(host) if range_of(host) is AddressRange.PUBLIC else ""


def listen_address(host: str, port: int) -> str:
    """As gRPC takes an address to listen on: an IPv6 host in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def require_free_port(host: str, port: int) -> None:
    """Fails as gRPC would, but without the line of its own that gRPC writes to stderr.

    Raises:
        PortInUse: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), port), family=family).close()
    except OSError as error:
        raise _port_in_use(listen_address(host, port)) from error


def _port_in_use(address: str) -> PortInUse:
    return PortInUse(
        f"gRPC cannot listen on {address}: the port is in use or the address is not this machine's. Choose another "
        "with --grpc-port, or 0 for any free one."
    )
