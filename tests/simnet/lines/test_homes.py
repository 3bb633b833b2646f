"""Homes behind access lines: who is let through, and which lines the bytes take."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import grpc.aio
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import End, asynchronous, soon

from molink.peer.wire.link.certificate import server_name
from molink.peer.wire.link.dialling import LINK_METHOD
from molink.simnet.lines.access import (
    MAX_REQUEST_BYTES,
    AccessRouter,
    Neighbourhood,
    TunnelRefused,
    parse_connect,
)
from molink.simnet.lines.line import Line
from molink.simnet.lines.shaper import Shaper
from molink.simnet.lines.transit import Chunk

DEADLINE_S = 120.0
HOST = "127.0.0.1"


class World:
    """Two homes, a router each, and a listening socket in the second."""

    def __init__(
        self, shaper: Shaper, target: socket.socket, delay_ms: float = 1.0, rate_mbps: float = 1000.0
    ) -> None:
        self.shaper = shaper
        self.uplinks = {name: Line[Chunk](rate_mbps) for name in ("here", "there")}
        self.neighbourhood = Neighbourhood(self.uplinks, delay_ms)
        self.target = target
        self.address: tuple[str, int] = target.getsockname()
        self.neighbourhood.place(self.address, "there")

    def router(self, home: str = "here") -> AccessRouter:
        return AccessRouter(self.shaper, self.neighbourhood, home)

    def sent_bytes(self, home: str) -> int:
        return self.shaper.call(self.uplinks[home].counters).sent_bytes


@pytest.fixture
def world() -> Iterator[World]:
    with Shaper() as shaper, socket.create_server((HOST, 0)) as target:
        target.settimeout(DEADLINE_S)
        yield World(shaper, target)


def ask(router: AccessRouter, request: bytes) -> socket.socket:
    client = socket.create_connection((HOST, router.port), DEADLINE_S)
    client.sendall(request)
    return client


def status(client: socket.socket) -> str:
    """The status line of the answer; what comes after the head is left in the socket."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = client.recv(1)
        assert byte, head
        head += byte
    return head.split(b"\r\n")[0].decode()


def connect(target: tuple[str, int]) -> bytes:
    return f"CONNECT {target[0]}:{target[1]} HTTP/1.1\r\nHost: any\r\n\r\n".encode()


def test_what_a_home_sends_takes_its_uplink_and_answers_take_the_other(world: World) -> None:
    with world.router() as router, ask(router, connect(world.address) + b"early") as client:
        assert status(client) == "HTTP/1.1 200 Connection established"
        server, _ = world.target.accept()
        with server:
            client.sendall(b" and late")
            assert server.recv(14, socket.MSG_WAITALL) == b"early and late"
            server.sendall(bytes(1000))
            assert len(client.recv(1000, socket.MSG_WAITALL)) == 1000
            assert world.sent_bytes("here") == 14
            assert world.sent_bytes("there") == 1000


def test_a_router_that_ends_resets_its_connections(world: World) -> None:
    with world.router() as router:
        client = ask(router, connect(world.address))
        assert status(client).startswith("HTTP/1.1 200")
        server, _ = world.target.accept()
    with client, server, pytest.raises(ConnectionResetError):
        server.recv(1)


def test_peers_of_one_home_do_not_load_its_uplink(world: World) -> None:
    with world.router("there") as router, ask(router, connect(world.address)) as client:
        assert status(client) == "HTTP/1.1 200 Connection established"
        server, _ = world.target.accept()
        with server:
            client.sendall(b"neighbour")
            assert server.recv(9, socket.MSG_WAITALL) == b"neighbour"
            assert world.sent_bytes("there") == 0


def test_homes_are_as_far_apart_as_it_is_said(world: World) -> None:
    far = World(world.shaper, world.target, delay_ms=20.0)
    with far.router() as router:
        begin_s = time.monotonic()
        with ask(router, connect(far.address)) as client:
            assert status(client).startswith("HTTP/1.1 200")
            assert time.monotonic() - begin_s >= 0.04
            server, _ = far.target.accept()
            with server:
                for sender, receiver in ((client, server), (server, client)):
                    begin_s = time.monotonic()
                    sender.sendall(b"x")
                    assert receiver.recv(1) == b"x"
                    assert time.monotonic() - begin_s >= 0.02


def test_connections_of_one_home_share_its_uplink(world: World) -> None:
    size, rate_mbps = 250_000, 20
    slow = World(world.shaper, world.target, rate_mbps=rate_mbps)
    with slow.router() as router, contextlib.ExitStack() as stack:
        pairs = []
        for _ in range(2):
            client = stack.enter_context(ask(router, connect(slow.address)))
            assert status(client).startswith("HTTP/1.1 200")
            pairs.append((client, stack.enter_context(slow.target.accept()[0])))
        begin_s = time.monotonic()
        senders = [threading.Thread(target=client.sendall, args=(bytes(size),)) for client, _ in pairs]
        for sender in senders:
            sender.start()
        for _, server in pairs:
            assert len(server.recv(size, socket.MSG_WAITALL)) == size
        assert time.monotonic() - begin_s >= 2 * size * 8 / (rate_mbps * 1e6)
        for sender in senders:
            sender.join(DEADLINE_S)


@pytest.mark.parametrize(
    ("request_bytes", "answer"),
    [
        (b"GET http://127.0.0.1/ HTTP/1.1\r\n\r\n", "405"),
        (b"CONNECT nowhere HTTP/1.1\r\n\r\n", "400"),
        (b"CONNECT 127.0.0.1:0 HTTP/1.1\r\n\r\n", "400"),
        (b"\x16\x03\x01\r\n\r\n", "400"),
        (b"CONNECT 127.0.0.1:9 HTTP/1.1\r\n\r\n", "403"),
        (b"CONNECT 127.0.0.1:9 HTTP/1.1\r\n" + b"a" * MAX_REQUEST_BYTES, "431"),
    ],
)
def test_what_is_no_request_for_a_known_target_is_refused(
    world: World, request_bytes: bytes, answer: str
) -> None:
    with world.router() as router, ask(router, request_bytes) as client:
        assert status(client).split()[1] == answer


def test_a_target_that_has_gone_is_a_bad_gateway(world: World) -> None:
    world.target.close()
    with world.router() as router, ask(router, connect(world.address)) as client:
        assert status(client).split()[1] == "502"


@given(st.binary(max_size=200))
def test_any_head_is_a_target_or_refused(head: bytes) -> None:
    for request in (head, b"CONNECT " + head + b" HTTP/1.1\r\n"):
        with contextlib.suppress(TunnelRefused):
            host, port = parse_connect(request)
            assert host
            assert 0 < port < 65536


def test_a_home_that_is_missing_is_told(world: World) -> None:
    with pytest.raises(KeyError, match="nowhere"):
        world.neighbourhood.place(world.address, "nowhere")


def test_pairs_of_homes_have_distances_of_their_own() -> None:
    homes = {name: Line[Chunk]() for name in ("0", "1", "2")}
    neighbourhood = Neighbourhood(homes, 1.0, {("0", "1"): 50.0})
    for port, home in enumerate(homes):
        neighbourhood.place((HOST, port), home)
    near, far = neighbourhood.route("0", (HOST, 2)), neighbourhood.route("0", (HOST, 1))
    assert near is not None
    assert far is not None
    assert (near.delay_s, far.delay_s) == (0.001, 0.05)


@asynchronous
async def test_grpc_over_tls_dials_through_the_router_of_its_home() -> None:
    with Shaper() as shaper:
        uplinks = {name: Line[Chunk]() for name in ("here", "there")}
        neighbourhood = Neighbourhood(uplinks, 1.0)
        async with End() as end:
            host, port = end.facts.grpc_addresses[0].split(":")
            neighbourhood.place((host, int(port)), "there")
            with AccessRouter(shaper, neighbourhood, "here") as router:
                async with channel(end, router.url) as through:
                    call = through.stream_stream(LINK_METHOD)()
                    challenge = await soon(call.read())
                    call.cancel()
        assert len(challenge) > 32
        counters = await asyncio.to_thread(shaper.call, uplinks["there"].counters)
        assert counters.sent_bytes > len(challenge)


@contextlib.asynccontextmanager
async def channel(end: End, proxy: str) -> AsyncIterator[grpc.aio.Channel]:
    options = [("grpc.ssl_target_name_override", server_name(end.peer_id)), ("grpc.http_proxy", proxy)]
    credentials = grpc.ssl_channel_credentials(root_certificates=end.certificate.pem)
    async with grpc.aio.secure_channel(end.facts.grpc_addresses[0], credentials, options=options) as made:
        yield made
