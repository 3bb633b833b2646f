"""What a peer's port lets in, and which of two links between two peers stays."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace

import grpc.aio
import pytest
from support.links.data_plane import DEADLINE_S, PATIENT_DIALS, End, asynchronous, soon, until

from molink.peer.wire.link import acceptor as acceptor_module
from molink.peer.wire.link.acceptor import listen_address
from molink.peer.wire.link.certificate import server_name
from molink.peer.wire.link.dialled_connection import GrpcStream
from molink.peer.wire.link.dialling import LINK_METHOD
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb

AT_ONCE = replace(PATIENT_DIALS, at_once_s=DEADLINE_S)
"""However long a machine takes for two dials that begin at once, neither link is older."""


def request() -> pb.Request:
    return pb.Request(release=pb.Release(session=bytes(16), epoch=1))


@asynccontextmanager
async def stranger(end: End) -> AsyncIterator[GrpcStream]:
    """A call that has been asked for its proof and does not give it."""
    options = [("grpc.ssl_target_name_override", server_name(end.peer_id))]
    credentials = grpc.ssl_channel_credentials(root_certificates=end.certificate.pem)
    async with grpc.aio.secure_channel(end.facts.grpc_addresses[0], credentials, options=options) as channel:
        call = channel.stream_stream(LINK_METHOD)()
        try:
            assert isinstance(await soon(call.read()), bytes)
            yield call
        finally:
            call.cancel()


@asynchronous
async def test_strangers_that_prove_nothing_lock_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_LINKS", 3)
    monkeypatch.setattr(acceptor_module, "MAX_UNPROVEN", 3)
    async with End() as end, End() as first, End() as second, AsyncExitStack() as stack:
        assert (await first.links.to(end.facts)).peer_id == end.peer_id
        calls = [await stack.enter_async_context(stranger(end)) for _ in range(5)]
        for call in calls[:2]:  # the oldest made room
            assert await soon(call.code()) is grpc.StatusCode.UNAUTHENTICATED
        assert (await second.links.to(end.facts)).peer_id == end.peer_id
        await until(lambda: len(end.links.all()) == 2)


async def dialled_both_ways(one: End, other: End) -> tuple[Link, Link]:
    """The two links of two that dial each other at once: what `one` dialled and what `other` dialled."""
    from_one, from_other = await asyncio.gather(
        one.links._dial(other.facts),  # a dial that has begun before the other end's link came in
        other.links._dial(one.facts),
    )
    ends = (one, other)  # a spare may be gone again by now
    await until(lambda: all(len(end.links._opened_s) + end.handler.closed.qsize() >= 2 for end in ends))
    return from_one, from_other


@asynchronous
async def test_of_two_links_both_ends_use_the_one_that_the_smaller_peer_id_dialled() -> None:
    async with End(times=AT_ONCE) as a, End(times=AT_ONCE) as b:
        small, large = sorted((a, b), key=lambda end: end.peer_id)
        kept, spare = await dialled_both_ways(small, large)
        assert small.links.find(large.peer_id) is kept
        assert large.links.find(small.peer_id) is not spare
        assert [len(end.links.all()) for end in (small, large)] == [1, 1]
        for end, other in ((small, large), (large, small)):
            link = await end.links.to(other.facts)
            assert (await link.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_the_spare_link_is_closed_when_nothing_travels_on_it() -> None:
    times = replace(AT_ONCE, spare_quiet_s=0.05)
    async with End(times=times) as a, End(times=times) as b:
        small, large = sorted((a, b), key=lambda end: end.peer_id)
        kept, spare = await dialled_both_ways(small, large)
        closed = await soon(large.handler.closed.get())
        assert closed == (small.peer_id, "another link to this peer is in use")
        assert (await soon(small.handler.closed.get()))[0] == large.peer_id
        await until(lambda: [len(end.links._opened_s) for end in (a, b)] == [1, 1])
        assert spare.closed_because
        assert (await kept.request(request(), DEADLINE_S))[0].HasField("released")
        assert small.handler.closed.empty()
        assert large.handler.closed.empty()


@asynchronous
async def test_a_spare_link_stays_while_frames_travel_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = replace(AT_ONCE, spare_quiet_s=0.01)
    travelling = iter([True] * 5)
    looks = 0

    def quiet_s(_: Link) -> float:
        nonlocal looks
        looks += 1
        return 0.0 if next(travelling, False) else 1.0

    monkeypatch.setattr(Link, "quiet_s", property(quiet_s))
    async with End(times=times) as a, End(times=times) as b:
        small, large = sorted((a, b), key=lambda end: end.peer_id)
        await dialled_both_ways(small, large)
        assert (await soon(large.handler.closed.get()))[0] == small.peer_id
        assert looks == 6


@asynchronous
async def test_when_the_link_in_use_breaks_the_spare_takes_its_place() -> None:
    async with End(times=AT_ONCE) as a, End(times=AT_ONCE) as b:
        small, large = sorted((a, b), key=lambda end: end.peer_id)
        kept, spare = await dialled_both_ways(small, large)
        kept.close("for a test")
        assert await soon(small.handler.closed.get()) == (large.peer_id, "for a test")
        await soon(large.handler.closed.get())
        await until(lambda: [len(end.links._opened_s) for end in (a, b)] == [1, 1])
        assert large.links.find(small.peer_id) is spare
        assert large.links.in_use(spare)
        for end, other in ((small, large), (large, small)):
            link = end.links.find(other.peer_id)
            assert link is not None
            assert (await link.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_a_later_link_is_used_where_the_older_is_lost() -> None:
    times = replace(PATIENT_DIALS, at_once_s=0.0)
    async with End(times=times) as a, End(times=times) as b:
        small, large = sorted((a, b), key=lambda end: end.peer_id)
        older = await small.links.to(large.facts)  # the one that would stay if both were dialled at once
        newer = await large.links._dial(small.facts)
        await until(lambda: small.links.find(large.peer_id) is not older)
        assert large.links.find(small.peer_id) is newer


@asynchronous
async def test_signs_of_life_leave_a_link_quiet_and_a_frame_does_not() -> None:
    async with End() as a, End() as b:
        link = await a.links.to(b.facts)
        await soon(link.measured())
        used_s = link._packets.keepalive.used_s
        link._packets.ping(asyncio.get_running_loop().time())
        heard_s = link._packets.keepalive.heard_s
        await until(lambda: link._packets.keepalive.heard_s > heard_s)
        assert link._packets.keepalive.used_s == used_s
        assert link.post(pb.Tokens())
        assert link.quiet_s == 0.0
        await soon(b.handler.frames.get())
        assert link._packets.keepalive.used_s > used_s
        await until(lambda: not link._packets.owes_or_is_owed)
        assert link.quiet_s > 0.0


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "127.0.0.1:4001"),
        ("localhost", "localhost:4001"),
        ("::1", "[::1]:4001"),
        ("[::1]", "[::1]:4001"),
        ("::", "[::]:4001"),
    ],
)
def test_an_ipv6_host_has_brackets_beside_its_port(host: str, address: str) -> None:
    assert listen_address(host, 4001) == address


def ipv6_hosts() -> list[str]:
    """Ways to write this machine's IPv6 loopback address; none where it has none."""
    try:
        with closing(socket.create_server(("::1", 0), family=socket.AF_INET6)):
            return ["::1", "[::1]"]
    except OSError:
        return []


@pytest.mark.parametrize("host", ["127.0.0.1", *ipv6_hosts()])
@asynchronous
async def test_peers_link_over_ipv4_and_ipv6(host: str) -> None:
    async with End(host=host) as one, End(host=host) as other:
        assert one.facts.grpc_addresses[0].startswith(listen_address(host, 1)[:-1])
        link = await one.links.to(other.facts)
        assert (await link.request(request(), DEADLINE_S))[0].HasField("released")
