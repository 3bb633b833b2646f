"""Links between real ends on loopback sockets: who is let in, what travels, and how a link ends."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import cast

import grpc.aio
import pytest
from support.links.cutting_proxy import CuttingProxy
from support.links.data_plane import DEADLINE_S, End, Recorder, asynchronous, facts_at, released, soon, until
from support.links.raw_end import ended, raw_call, raw_link, read

from molink.dht.errors import PortInUse
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.wire.link import link as link_module
from molink.peer.wire.link import requests as requests_module
from molink.peer.wire.link.acceptor import Acceptor
from molink.peer.wire.link.certificate import Credentials, new_certificate
from molink.peer.wire.link.dialled_connection import DialledConnection, GrpcStream
from molink.peer.wire.link.handshake import Remote
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.link_resources import LinkResources
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.frames import MAX_FRAME_BYTES, encode, expect
from molink.peer.wire.protocol.packets import MAX_PACKET_BYTES, CloseCode
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport import keepalive, shared_uplink
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink

REQUEST = pb.Request(release=pb.Release(session=bytes(16), epoch=1))


def request() -> pb.Request:
    copy = pb.Request()
    copy.CopyFrom(REQUEST)
    return copy


async def refusal(dialler: End, facts_of: End) -> str:
    with pytest.raises(LinkError) as caught:
        await dialler.links.to(facts_of.facts)
    assert caught.value.peer_id == facts_of.peer_id
    assert dialler.links.find(facts_of.peer_id) is None
    return caught.value.reason


@asynchronous
async def test_both_ends_send_frames_and_payloads_over_one_link() -> None:
    async with End() as a, End() as b:
        there = await a.links.to(b.facts)
        back = await b.linked(a.peer_id)
        assert there.remote.peer_id == b.peer_id
        assert there.post(pb.Activations(hidden_size=2, dtype="float32"), b"12345678", TrafficClass.DECODE)
        sender, frame = await soon(b.handler.frames.get())
        assert sender == a.peer_id
        assert expect(frame, pb.Activations).hidden_size == 2
        assert bytes(frame.payload) == b"12345678"
        assert back.post(pb.Tokens(tokens=[pb.Token(token_id=7)]))
        sender, frame = await soon(a.handler.frames.get())
        assert sender == b.peer_id
        assert expect(frame, pb.Tokens).tokens[0].token_id == 7


@asynchronous
async def test_a_link_through_an_http_proxy_is_as_good_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with CuttingProxy() as proxy, End(http_proxy=proxy.url) as a, End() as b:
        link = await a.links.to(b.facts)
        assert proxy.targets == list(b.facts.grpc_addresses)
        assert (await link.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_the_proxy_that_the_environment_names_for_the_web_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with CuttingProxy() as proxy, End() as a, End() as b:
        for name in ("http_proxy", "https_proxy", "grpc_proxy"):
            monkeypatch.setenv(name, proxy.url)
        await a.links.to(b.facts)
        assert proxy.targets == []


@asynchronous
async def test_either_end_may_ask_and_answers_find_their_questions() -> None:
    async def echo(_: Link, asked: pb.Request) -> tuple[pb.Response, bytes]:
        offset = asked.get_file.offset
        await asyncio.sleep(0.02 - offset / 1000)  # the last question is answered first
        return pb.Response(content=pb.Content(total_bytes=offset)), bytes([offset]) * 3

    async with End() as a, End() as b:
        a.handler.answer = b.handler.answer = echo
        there = await a.links.to(b.facts)
        back = await b.linked(a.peer_id)
        for link in (there, back):
            questions = [pb.Request(get_file=pb.GetFile(offset=offset)) for offset in range(20)]
            answers = await asyncio.gather(*(link.request(one, DEADLINE_S) for one in questions))
            for offset, (response, payload) in enumerate(answers):
                assert response.content.total_bytes == offset
                assert bytes(payload) == bytes([offset]) * 3


@asynchronous
async def test_a_payload_near_the_largest_frame_arrives_whole() -> None:
    payload = bytes(range(256)) * ((MAX_FRAME_BYTES - 1024) // 256)
    async with End() as a, End() as b:
        link = await a.links.to(b.facts)
        assert link.post(pb.Activations(hidden_size=1, dtype="float32"), payload, TrafficClass.PREFILL)
        _, frame = await soon(b.handler.frames.get())
        assert frame.payload == payload


@asynchronous
async def test_no_answer_in_time_is_a_link_error_and_the_link_goes_on() -> None:
    answered = asyncio.Event()

    async def late(link: Link, asked: pb.Request) -> tuple[pb.Response, bytes]:
        await answered.wait()
        return await released(link, asked)

    async with End() as a, End() as b:
        b.handler.answer = late
        link = await a.links.to(b.facts)
        with pytest.raises(LinkError, match=r"no answer to release within 0\.05 s"):
            await link.request(request(), 0.05)
        answered.set()
        response, _ = await link.request(request(), DEADLINE_S)
        assert response.WhichOneof("body") == "released"


@asynchronous
async def test_many_that_want_a_link_at_once_share_one() -> None:
    async with End() as a, End() as b:
        links = await asyncio.gather(*(a.links.to(b.facts) for _ in range(10)))
        assert len({id(link) for link in links}) == 1
        assert await a.links.to(b.facts) is links[0]
        await until(lambda: len(b.links.all()) == 1)
        assert a.links.all() == (links[0],)


@asynchronous
async def test_an_acceptor_knows_a_client_from_a_peer() -> None:
    async with End(is_client=True) as client, End() as peer, End() as other:
        await client.links.to(peer.facts)
        await other.links.to(peer.facts)
        await until(lambda: len(peer.links.all()) == 2)
        assert {link.peer_id: link.remote.is_client for link in peer.links.all()} == {
            client.peer_id: True,
            other.peer_id: False,
        }


@asynchronous
async def test_a_certificate_that_is_not_the_announced_one_is_refused() -> None:
    async with End() as a, End() as b:
        b.facts = replace(b.facts, certificate=new_certificate(b.peer_id).der)
        assert "cannot be reached" in await refusal(a, b)
        assert b.links.all() == ()


@asynchronous
async def test_another_peer_at_the_address_is_refused() -> None:
    async with End() as a, End() as b, End() as c:
        c.facts = replace(c.facts, grpc_addresses=b.facts.grpc_addresses)
        assert "cannot be reached" in await refusal(a, c)


@asynchronous
async def test_one_who_has_the_certificate_but_another_name_is_refused() -> None:
    async with End() as a, End() as b:
        other = Identity.generate().peer_id
        async with Acceptor(
            "127.0.0.1", 0, Credentials(other, b.certificate), b.links, b.handler
        ) as acceptor:
            b.facts = facts_at(b.identity, b.certificate, f"127.0.0.1:{acceptor.port}")
            assert f"{other} answered in its place" in await refusal(a, b)
        await until(lambda: b.links.all() == ())


@asynchronous
async def test_what_is_no_certificate_is_a_link_error() -> None:
    async with End() as a, End() as b:
        b.facts = replace(b.facts, certificate=b"not a certificate")
        assert "not a certificate" in await refusal(a, b)


@asynchronous
async def test_a_peer_that_nobody_can_dial_is_a_link_error() -> None:
    async with End() as a, End() as b:
        b.facts = replace(b.facts, grpc_addresses=())
        assert "no address" in await refusal(a, b)


@asynchronous
async def test_the_next_address_is_tried_and_a_failure_names_none() -> None:
    async with End() as a, End() as b:
        async with End() as gone:
            dead = gone.facts.grpc_addresses[0]
        unreachable = replace(b.facts, grpc_addresses=(dead, dead))
        with pytest.raises(LinkError, match=f"{b.peer_id}: it cannot be reached$"):
            await a.links.to(unreachable)
        link = await a.links.to(replace(b.facts, grpc_addresses=(dead, *b.facts.grpc_addresses)))
        assert link.peer_id == b.peer_id


@asynchronous
async def test_a_caller_waits_no_longer_than_it_wants_for_an_address_that_says_nothing() -> None:
    held: list[asyncio.StreamWriter] = []
    listener = await asyncio.start_server(lambda _, writer: held.append(writer), "127.0.0.1", 0)
    async with listener, End() as a, End() as b:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(LinkError, match=r"not reached within 0\.05 s"):
            await a.links.to(replace(b.facts, grpc_addresses=(f"127.0.0.1:{port}",)), 0.05)
    for writer in held:
        writer.close()


@asynchronous
async def test_a_private_swarm_is_closed_to_strangers_and_tells_them_why() -> None:
    key = SwarmKey.generate()
    async with End(swarm_key=key) as member, End(swarm_key=key) as other, End() as stranger:
        assert "this swarm is private" in await refusal(stranger, member)
        assert (await other.links.to(member.facts)).peer_id == member.peer_id


@asynchronous
async def test_who_does_not_prove_itself_in_time_is_sent_away() -> None:
    async with End(proof_s=0.5) as end:
        is_asked = False
        while not is_asked:  # a machine may be too busy to ask in time
            async with raw_call(end) as call:
                with suppress(grpc.aio.AioRpcError):
                    is_asked = isinstance(await soon(call.read()), bytes)
                if is_asked:
                    assert await ended(call) is grpc.StatusCode.UNAUTHENTICATED
                    assert "in time" in await call.details()
        assert end.links.all() == ()


@asynchronous
async def test_whatever_comes_instead_of_a_proof_is_refused() -> None:
    async with End() as end:
        for wrong in (b"", b"garbage", encode(pb.Request(id=1)), encode(pb.Proof(protocol_version=1))):
            async with raw_call(end) as call:
                await read(call)
                await call.write(wrong)
                assert await soon(call.code()) is grpc.StatusCode.UNAUTHENTICATED
        assert end.links.all() == ()


@pytest.mark.parametrize(
    "garbage",
    [b"\0", b"garbage", b"\x01\x06\xff\xff\xff\xff", encode(pb.Failed(code="lost"))],
    ids=["empty", "garbage", "length", "out-of-place"],
)
@asynchronous
async def test_a_message_that_is_no_frame_ends_the_link_it_came_over_and_no_other(garbage: bytes) -> None:
    async with End() as end, End() as other, raw_link(end) as raw:
        link = await other.links.to(end.facts)
        await raw.send(garbage)
        assert (await raw.closed()).code == CloseCode.MESSAGE
        closed, reason = await soon(end.handler.closed.get())
        assert closed == raw.peer_id
        assert reason.startswith("protocol error")
        assert end.links.find(raw.peer_id) is None
        assert (await link.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_a_packet_over_the_limit_ends_the_link_it_came_over_and_no_other() -> None:
    async with End() as end, End() as other, raw_link(end) as raw:
        link = await other.links.to(end.facts)
        await raw.call.write(bytes(MAX_PACKET_BYTES + 1))
        assert await ended(raw.call) is grpc.StatusCode.RESOURCE_EXHAUSTED
        closed, _ = await soon(end.handler.closed.get())
        assert closed == raw.peer_id
        assert (await link.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_requests_that_wait_fail_when_the_acceptor_goes() -> None:
    async with End() as a:
        async with End() as b:
            b.handler.answer = forever
            link = await a.links.to(b.facts)
            waiting = asyncio.create_task(link.request(request(), DEADLINE_S))
            await until(lambda: link.rtt_ms is not None)
        with pytest.raises(LinkError):
            await soon(waiting)
        assert (await soon(a.handler.closed.get()))[0] == b.peer_id
        await until(lambda: a.links.all() == ())
        assert link.closed_because
        assert not link.post(pb.Tokens())
        with pytest.raises(LinkError):
            await link.request(request(), DEADLINE_S)


@asynchronous
async def test_requests_that_wait_fail_when_the_dialler_goes() -> None:
    async with End() as b:
        async with End() as a:
            a.handler.answer = forever
            await a.links.to(b.facts)
            back = await b.linked(a.peer_id)
            waiting = asyncio.create_task(back.request(request(), DEADLINE_S))
            await until(lambda: back.rtt_ms is not None)
        with pytest.raises(LinkError):
            await soon(waiting)
        assert (await soon(b.handler.closed.get()))[0] == a.peer_id
        assert b.links.all() == ()


@asynchronous
async def test_nobody_is_left_waiting_when_a_link_is_cancelled_twice() -> None:
    class Stuck:
        """A stream that takes its time to let go: gRPC cancels once more meanwhile."""

        def __init__(self) -> None:
            self.cancelled = asyncio.Event()
            self.let_go = asyncio.Event()

        async def read(self) -> object:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
                await self.let_go.wait()

        async def write(self, message: bytes) -> None:
            pass

        def cancel(self) -> bool:
            return True

    stream, handler = Stuck(), Recorder()
    connection = DialledConnection(cast("GrpcStream", stream), grpc.aio.insecure_channel("127.0.0.1:1"))
    link = Link(
        bytes(16),
        Remote("a peer", is_client=False),
        connection,
        handler,
        LinkResources(SharedUplink(), MessageMemory()),
    )
    running = asyncio.create_task(link.run())
    waiting = asyncio.create_task(link.request(request(), DEADLINE_S))
    await asyncio.sleep(0)
    for _ in range(2):
        await asyncio.sleep(0)
        running.cancel()
        await soon(stream.cancelled.wait())
    stream.let_go.set()
    with pytest.raises(LinkError):
        await soon(waiting)
    assert (await soon(handler.closed.get()))[0] == "a peer"
    assert handler.closed.empty()
    with pytest.raises(asyncio.CancelledError):
        await running


@asynchronous
async def test_a_lost_link_is_made_anew_when_it_is_wanted() -> None:
    async with End() as a, End() as b:
        first = await a.links.to(b.facts)
        first.close("for a test")
        assert (await soon(a.handler.closed.get())) == (b.peer_id, "for a test")
        second = await a.links.to(b.facts)
        assert second is not first
        assert (await second.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_two_that_dial_each_other_can_both_talk() -> None:
    async with End() as a, End() as b:
        await asyncio.gather(a.links.to(b.facts), b.links.to(a.facts))
        for end, other in ((a, b), (b, a)):
            link = await end.links.to(other.facts)
            assert (await link.request(request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_an_end_that_falls_silent_is_declared_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The moment of that is a keep-alive's to say, whose tests have a clock of their own."""
    async with End() as end, raw_link(end) as raw:
        link = end.links.find(raw.peer_id)
        assert link is not None
        monkeypatch.setattr(keepalive.KeepAlive, "tick", lambda *_, **__: keepalive.KeepAliveAction.LOST)
        with pytest.raises(LinkError, match="nothing heard for"):
            await link.request(request(), DEADLINE_S)
        closed, reason = await soon(end.handler.closed.get())
        assert closed == raw.peer_id
        assert reason.startswith("nothing heard for")
        assert (await raw.closed()).code == CloseCode.SILENT


@asynchronous
async def test_an_end_that_answers_pings_is_not_lost_and_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "TICK_S", 0.02)
    monkeypatch.setattr(keepalive, "IDLE_PING_INTERVAL_S", 0.02)
    async with End() as a, End() as b:
        link = await a.links.to(b.facts)
        assert await soon(link.measured()) > 0
        pings = 0
        async with raw_link(b) as raw:
            while pings < 10:
                packet = await raw.packet()
                if isinstance(packet, packets.Ping):
                    pings += 1
                    await raw.call.write(packets.encode_pong(packet.number))
            assert b.links.find(raw.peer_id) is not None
        assert link.closed_because is None


@asynchronous
async def test_a_full_queue_takes_no_more_and_loses_nothing_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_uplink, "MAX_PARTIAL_BYTES", 512 * 1024)
    monkeypatch.setattr(shared_uplink, "MAX_PARTIAL_MESSAGES", 64)
    async with End() as end, raw_link(end) as raw:
        link = end.links.find(raw.peer_id)
        assert link is not None
        taken = 0
        while link.post(pb.Activations(hidden_size=taken), bytes(32 * 1024), TrafficClass.PREFILL):
            taken += 1
            assert taken < 100
        for arrived in range(taken):
            header = await soon(raw.header())
            assert isinstance(header, pb.Activations)
            assert header.hidden_size == arrived
        assert link.post(pb.Activations(), b"", TrafficClass.PREFILL)


@asynchronous
async def test_requests_beyond_the_limit_are_told_to_come_back_and_releases_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests_module, "MAX_REQUESTS_IN_FLIGHT", 2)
    go_on = asyncio.Event()
    begun = 0

    async def slow(link: Link, asked: pb.Request) -> tuple[pb.Response, bytes]:
        nonlocal begun
        begun += 1
        if asked.HasField("await_ready"):
            await go_on.wait()
        return await released(link, asked)

    def wait_request() -> pb.Request:
        return pb.Request(await_ready=pb.AwaitReady())

    async with End() as a, End() as b:
        b.handler.answer = slow
        link = await a.links.to(b.facts)
        first = [asyncio.create_task(link.request(wait_request(), DEADLINE_S)) for _ in range(2)]
        await until(lambda: begun == 2)
        response, _ = await link.request(wait_request(), DEADLINE_S)
        assert response.refusal.code == "busy"
        assert response.refusal.retry_after_ms > 0
        assert (await link.request(request(), DEADLINE_S))[0].HasField("released")
        go_on.set()
        assert [one.HasField("released") for one, _ in await asyncio.gather(*first)] == [True, True]
        assert (await link.request(wait_request(), DEADLINE_S))[0].HasField("released")


@asynchronous
async def test_a_taken_port_is_told_with_what_to_do() -> None:
    async with End() as a:
        port = int(a.facts.grpc_addresses[0].rsplit(":", 1)[1])
        with pytest.raises(PortInUse, match=f":{port}: .* --grpc-port"):
            async with Acceptor("127.0.0.1", port, Credentials(a.peer_id, a.certificate), a.links, a.handler):
                pass


async def forever(link: Link, asked: pb.Request) -> tuple[pb.Response, bytes]:
    await asyncio.Event().wait()
    return await released(link, asked)
