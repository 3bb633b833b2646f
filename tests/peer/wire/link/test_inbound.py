"""Who gets in: connections that prove nothing and links that nobody uses make room, what is used stays."""

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack

import grpc
import pytest
from support.attackers.grudging_end import GrudgingEnd, grudging_end
from support.links.data_plane import DEADLINE_S, End, asynchronous, soon, until
from support.links.raw_end import ended, proven, raw_call, raw_link

from molink.dht.identity.identity import Identity
from molink.peer.wire.link import acceptor as acceptor_module
from molink.peer.wire.link.inbound import InboundLimits, inbound_limits, parse_peer
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb

only_where_descriptors_are_listed = pytest.mark.xfail(
    sys.platform == "win32", reason="Windows lists no descriptors", strict=True
)


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:192.0.2.1:5000", ("192.0.2.1", 5000)),
        ("ipv6:%5B2001:db8::1%5D:5000", ("2001:db8::1", 5000)),
        ("ipv6:[::1]:7", ("::1", 7)),
        ("ipv6:%5B::ffff:192.0.2.1%5D:7", ("192.0.2.1", 7)),
        ("unix:/a", ("unix:/a", 0)),
        ("", ("", 0)),
    ],
)
def test_what_grpc_calls_an_address_is_one(peer: str, address: tuple[str, int]) -> None:
    assert parse_peer(peer) == address


@pytest.mark.parametrize("descriptors", [None, 100, 256, 1024, 65536])
def test_connections_leave_half_of_the_descriptors_to_the_rest_of_the_process(
    descriptors: int | None,
) -> None:
    limits = inbound_limits(descriptors)
    assert 0 < limits.unproven < limits.connections <= 768
    assert descriptors is None or limits.connections <= max(64, descriptors // 2)


@only_where_descriptors_are_listed
@asynchronous
async def test_the_oldest_silent_connections_are_shut_and_links_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "inbound_limits", lambda _: InboundLimits(64, 2))
    async with End() as end, End() as honest:
        link = await honest.links.to(end.facts)
        port = int(end.facts.grpc_addresses[0].rsplit(":", 1)[1])
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        closed = [asyncio.create_task(reader.read()) for reader, _ in silent]
        await until(lambda: sum(task.done() for task in closed) >= 6)
        late = await honest.links.to(end.facts)
        assert late is link
        answer, _ = await link.request(pb.Request(release=pb.Release(session=bytes(16), epoch=1)), DEADLINE_S)
        assert answer.HasField("released")
        for _, writer in silent:
            writer.transport.abort()
        await soon(asyncio.gather(*closed, return_exceptions=True))


@asynchronous
async def test_no_more_links_are_taken_than_allowed_and_a_member_still_gets_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_LINKS", 2)
    async with End() as a, End() as b, End() as member, End(members=[member.peer_id], needed=True) as c:
        link = await a.links.to(c.facts)
        with pytest.raises(LinkError, match="as many links as it takes"):
            await b.links.to(c.facts)
        assert (await member.links.to(c.facts)).peer_id == c.peer_id
        link.close("making room")
        await until(lambda: c.links.find(a.peer_id) is None)
        assert (await b.links.to(c.facts)).peer_id == c.peer_id


@asynchronous
async def test_a_link_that_nobody_uses_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_LINKS", 2)
    async with End() as a, End() as b, End() as c:
        await a.links.to(c.facts)
        assert (await b.links.to(c.facts)).peer_id == c.peer_id
        closed, reason = await soon(a.handler.closed.get())
        assert (closed, "makes room" in reason) == (c.peer_id, True)
        await until(lambda: [link.peer_id for link in c.links.all()] == [b.peer_id])


@asynchronous
async def test_a_fifth_link_of_one_identity_closes_its_oldest() -> None:
    identity = Identity.generate()
    async with End() as end, AsyncExitStack() as stack:
        calls = [await stack.enter_async_context(raw_call(end)) for _ in range(5)]
        for number, call in enumerate(calls):
            await proven(call, end, identity, link_id=bytes([number]) * 16)
        assert await ended(calls[0]) is grpc.StatusCode.OK
        await until(lambda: end.links.accepted(identity.peer_id, bytes(16)) is None)
        for number in range(1, 5):
            assert end.links.accepted(identity.peer_id, bytes([number]) * 16) is not None


RAISES = """
import resource
from molink.peer.device.machine import raise_descriptor_limit
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
raise_descriptor_limit()
soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
assert soft > 256 and (soft == hard or soft == 65536), (soft, hard)
"""


@only_where_descriptors_are_listed
def test_a_process_raises_its_own_limit_of_descriptors() -> None:
    subprocess.run([sys.executable, "-c", RAISES], check=True, timeout=DEADLINE_S)


async def until_let_go(grudging: list[GrudgingEnd], count: int) -> None:
    """Of these ends, whose connections would stay for good if they counted as proven, so many have to be shut."""
    await until(lambda: sum(end.over is not None and end.over.done() for end in grudging) >= count)


@only_where_descriptors_are_listed
@pytest.mark.parametrize("resumes", [False, True])
def test_who_proves_itself_and_takes_no_welcome_counts_as_unproven_after_a_while(
    monkeypatch: pytest.MonkeyPatch, *, resumes: bool
) -> None:
    monkeypatch.setattr(acceptor_module, "inbound_limits", lambda _: InboundLimits(64, 2))

    @asynchronous
    async def run() -> None:
        async with End(proof_s=0.5) as end, AsyncExitStack() as stack:
            ends = [
                await stack.enter_async_context(grudging_end(end, Identity.generate(), resumes=resumes))
                for _ in range(6)
            ]
            await until_let_go(ends, 4)
            assert end.links.all() == ()

    run()


@only_where_descriptors_are_listed
@asynchronous
async def test_who_takes_no_welcome_is_let_go_of_as_soon_as_it_makes_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(acceptor_module, "inbound_limits", lambda _: InboundLimits(64, 2))
    identity = Identity.generate()
    async with End() as end, AsyncExitStack() as stack:
        count = 2 * acceptor_module.LINKS_OF_IDENTITY
        ends = [await stack.enter_async_context(grudging_end(end, identity)) for _ in range(count)]
        await until_let_go(ends, acceptor_module.LINKS_OF_IDENTITY - 2)


@asynchronous
async def test_however_many_links_are_resumed_newcomers_are_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor_module, "MAX_UNPROVEN", 2)
    async with End() as end, AsyncExitStack() as stack:
        for _ in range(3):
            raw = await stack.enter_async_context(raw_link(end))
            call = await stack.enter_async_context(raw_call(end))
            assert (await proven(call, end, raw.identity, resumes=True)).resumed
        for _ in range(3):
            newcomer = await stack.enter_async_context(End(is_client=True))
            assert (await newcomer.links.to(end.facts)).closed_because is None
        assert len(end.links.all()) == 6
