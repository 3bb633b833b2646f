"""The gRPC port: accepts links and lets in only who has proven an identity."""

import asyncio
import collections
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self
from urllib.parse import unquote

import grpc
import grpc.aio

from molink.dht.certificate import Certificate
from molink.dht.door import network_of
from molink.dht.swarm_key import SwarmKey
from molink.peer.link.dialling import CHANNEL_OPTIONS, LINK_METHOD
from molink.peer.link.handshake import HandshakeRefused, Remote, challenge, check
from molink.peer.link.link import LinkHandler, Resumed
from molink.peer.link.links import Links
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import ProtocolError, decode, encode, expect
from molink.shards.address_ranges import AddressRange, range_of

HANDSHAKE_TIMEOUT_S = 5.0
MAX_LINKS = 256
"""Of peers and clients that have proven who they are."""
MAX_UNPROVEN = 64
"""Who has yet to prove itself. Beyond that the oldest make room: proof takes a round trip, so whoever means to prove
itself has done so before as many strangers have come after it."""
_log = logging.getLogger(__name__)


class PortInUse(OSError):
    """The gRPC port is taken by another program."""


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

    def __init__(
        self,
        host: str,
        port: int,
        peer_id: str,
        certificate: Certificate,
        links: Links,
        handler: LinkHandler,
        swarm_key: SwarmKey | None,
    ) -> None:
        self.port = port
        self._host = host
        self._peer_id = peer_id
        self._certificate = certificate
        self._links = links
        self._handler = handler
        self._swarm_key = swarm_key
        self._proven = 0
        self._unproven: collections.deque[asyncio.Timeout] = collections.deque()
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        method = grpc.stream_stream_rpc_method_handler(self._accept)
        service, name = LINK_METHOD.strip("/").split("/")
        server = grpc.aio.server(options=[*CHANNEL_OPTIONS, ("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
        credentials = grpc.ssl_server_credentials([(self._certificate.key_pem, self._certificate.pem)])
        address = listen_address(self._host, self.port)
        try:
            _try_to_listen(self._host, self.port)
            self.port = server.add_secure_port(address, credentials)
        except (OSError, RuntimeError) as error:
            raise PortInUse(
                f"gRPC cannot listen on {address}: the port is in use or the address is not this machine's. Choose "
                "another with --grpc-port, or 0 for any free one."
            ) from error
        await server.start()
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._links.close()  # or the other ends would take it for a broken connection
        if self._server is not None:
            await self._server.stop(grace=0.2)

    async def _accept(self, _: object, context: "grpc.aio.ServicerContext[bytes, bytes]") -> None:
        proof, remote = await self._handshake(context)
        connection = AcceptedConnection(context)
        try:
            if proof.resumes:
                await self._resume(proof, remote, connection)
            else:
                await self._begin(proof, remote, connection)
            await connection.closed.wait()
        finally:
            connection.lost()

    async def _begin(self, proof: pb.Proof, remote: Remote, connection: "AcceptedConnection") -> None:
        context = connection.stream
        if self._proven >= MAX_LINKS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "this peer has as many links as it takes")
        if self._links.accepted(remote.peer_id, proof.link_id) is not None:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, "there is a link of that id")
        self._proven += 1
        try:
            await context.write(encode(pb.Welcome(peer_id=self._peer_id)))
            remote = replace(remote, network=_network_of(context.peer()))
            running = self._links.accept(proof.link_id, remote, connection)
        except BaseException:
            self._proven -= 1
            raise
        running.add_done_callback(self._ended)

    async def _resume(self, proof: pb.Proof, remote: Remote, connection: "AcceptedConnection") -> None:
        """The new connection takes the place of the old one, whether that is known to be broken or not."""
        link = self._links.accepted(remote.peer_id, proof.link_id)
        if link is not None:
            await link.detach()
        known = link is not None and link.closed_because is None
        received = link.received if link is not None and known else 0
        await connection.stream.write(
            encode(pb.Welcome(peer_id=self._peer_id, resumed=known, received=received))
        )
        if link is None or not link.attach(Resumed(connection, proof.received)):
            await connection.close()

    def _ended(self, _: object) -> None:
        self._proven -= 1

    async def _handshake(self, context: "grpc.aio.ServicerContext[bytes, bytes]") -> tuple[pb.Proof, Remote]:
        question = challenge()
        try:
            async with self._time_to_prove():
                await context.write(encode(question))
                data = await context.read()
                if not isinstance(data, bytes):
                    raise HandshakeRefused("the other end hung up before it proved who it is")
                proof = expect(decode(data), pb.Proof)
                return proof, check(proof, question, self._certificate.der, self._swarm_key)
        except TimeoutError:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no proof of identity in time")
        except ProtocolError as error:
            _log.info("refused a link from %s: %s", context.peer(), error)
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        raise AssertionError("unreachable: abort raises")

    @asynccontextmanager
    async def _time_to_prove(self) -> AsyncIterator[None]:
        """HANDSHAKE_TIMEOUT_S, or until MAX_UNPROVEN others have come after. Raises TimeoutError."""
        if len(self._unproven) >= MAX_UNPROVEN:
            oldest = self._unproven.popleft()
            if not oldest.expired():
                oldest.reschedule(0.0)
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S) as limit:
            self._unproven.append(limit)
            try:
                yield
            finally:
                if limit in self._unproven:
                    self._unproven.remove(limit)


def _network_of(peer: str) -> str:
    """Where a dialler is that gRPC calls `ipv4:192.0.2.1:5000` or `ipv6:%5B::1%5D:5000`; empty where addresses tell
    nobody apart: behind a tunnel or a proxy at home all come from one."""
    host = unquote(peer).partition(":")[2].rpartition(":")[0].strip("[]")
    return network_of(host) if range_of(host) is AddressRange.PUBLIC else ""


def listen_address(host: str, port: int) -> str:
    """As gRPC takes an address to listen on: an IPv6 host in brackets."""
    bare = host.strip("[]")
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def _try_to_listen(host: str, port: int) -> None:
    """Fails as gRPC would, but without the line of its own that gRPC writes to stderr.

    Raises:
        OSError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host.strip("[]"), port), family=family):
        pass
