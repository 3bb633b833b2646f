"""Links over real sockets whose connections break: what was on its way arrives, once; who may resume what."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from support.links.cutting_proxy import CuttingProxy
from support.links.data_plane import DEADLINE_S, PATIENT_LINKS, End, asynchronous, soon, until
from support.links.delaying_relay import DelayingRelay
from support.links.raw_end import LINK_ID, ended, proven, raw_call, raw_link

from molink.dht.identity.identity import Identity
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.link_resources import LINK_TIMES, LinkTimes
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.frames import encode, expect
from molink.peer.wire.protocol.packets import Data
from molink.peer.wire.transmission.classes import TrafficClass

CUTS = 30
MESSAGES = 60
SLOW_WAY_S = 0.3
"""More than the time between the dials of two addresses."""
ROUND_TRIPS = 3
CLASSES = list(TrafficClass)


PATIENT = replace(PATIENT_LINKS, resume_s=DEADLINE_S)
"""A link waits for its next connection for as long as a busy machine takes."""


@asynccontextmanager
async def linked(
    proxy: CuttingProxy, times: LinkTimes = PATIENT
) -> AsyncIterator[tuple[End, End, Link, Link]]:
    """Two ends, and the link between them at either, through the proxy."""
    async with End(http_proxy=proxy.url, times=times) as a, End(times=times) as b:
        there = await a.links.to(b.facts)
        yield a, b, there, await b.linked(a.peer_id)


async def send_all(link: Link, seed: int) -> list[tuple[TrafficClass, int, bytes]]:
    """MESSAGES of all classes and many sizes; waits where there is no room."""
    rng = random.Random(seed)
    sent = []
    for number in range(MESSAGES):
        traffic_class = rng.choice(CLASSES)
        payload = rng.randbytes(rng.choice((0, 10, 16_000, 100_000, 1_500_000)))
        while not link.post(  # noqa: ASYNC110 - that there is room again is told to nobody
            pb.Activations(hidden_size=number, dtype=traffic_class.name), payload, traffic_class
        ):
            await asyncio.sleep(0.005)
        sent.append((traffic_class, number, payload))
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.01)))
    return sent


async def take_all(end: End) -> list[tuple[TrafficClass, int, bytes]]:
    taken = []
    for _ in range(MESSAGES):
        _, frame = await soon(end.handler.frames.get())
        header = expect(frame, pb.Activations)
        taken.append((TrafficClass[header.dtype], header.hidden_size, bytes(frame.payload)))
    return taken


@asynchronous
async def test_whatever_breaks_each_message_arrives_once_and_in_the_order_of_its_class() -> None:
    rng = random.Random(5)

    async def cut(proxy: CuttingProxy, link: Link) -> None:
        """In the middle of what is carried, and every third time while the link is dialled anew. No more often in a
        row: on a busy machine, where that takes long, it would be dialled in vain for as often as it tries."""
        dialled, broken = [0], list[object]()
        for number in range(CUTS):
            await asyncio.sleep(rng.uniform(0.0, 0.12))
            if number % 3:
                await until(lambda: link.connection not in broken[-1:])
            else:
                await until(lambda: len(proxy.targets) > dialled[-1])
            dialled.append(len(proxy.targets))
            broken.append(link.connection)
            proxy.cut()

    async with CuttingProxy() as proxy, linked(proxy) as (a, b, there, back):
        cutting = asyncio.create_task(cut(proxy, there))
        sent_there, sent_back, taken_there, taken_back = await asyncio.gather(
            send_all(there, 1), send_all(back, 2), take_all(b), take_all(a)
        )
        await cutting
        assert len(proxy.targets) >= CUTS
        for sent, taken in ((sent_there, taken_there), (sent_back, taken_back)):
            for one in CLASSES:
                assert [m for m in taken if m[0] == one] == [m for m in sent if m[0] == one]
        # nothing comes twice, and the link is the same
        assert there.post(pb.Tokens())
        assert isinstance((await soon(b.handler.frames.get()))[1].header, pb.Tokens)
        assert b.handler.frames.empty()
        assert a.handler.frames.empty()
        assert a.links.find(b.peer_id) is there
        assert b.links.find(a.peer_id) is back


@asynchronous
async def test_a_request_whose_connection_breaks_is_answered_over_the_next() -> None:
    async with CuttingProxy() as proxy, linked(proxy) as (_, b, there, _):
        asked, answers = asyncio.Event(), asyncio.Event()

        async def slow(_: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
            asked.set()
            await answers.wait()
            return pb.Response(released=pb.Released()), b""

        b.handler.answer = slow
        request = pb.Request(release=pb.Release(session=bytes(16), epoch=1))
        waiting = asyncio.create_task(there.request(request, DEADLINE_S))
        await soon(asked.wait())
        assert proxy.cut() == 1
        answers.set()
        assert (await soon(waiting))[0].HasField("released")
        assert len(proxy.targets) == 2


@pytest.mark.full
def test_a_link_over_two_slow_addresses_is_resumed_once_and_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other address is dialled while the proof over the first one is on its way: it must not take the link."""

    @asynchronous
    async def run() -> None:
        async with (
            CuttingProxy() as proxy,
            End(http_proxy=proxy.url, times=PATIENT) as a,
            End(times=PATIENT) as b,
        ):
            port = int(b.facts.grpc_addresses[0].rpartition(":")[2])
            async with DelayingRelay(port) as one, DelayingRelay(port) as two:
                addresses = tuple(f"127.0.0.1:{slow.port}" for slow in (one, two))
                there = await a.links.to(replace(b.facts, grpc_addresses=addresses))
                back = await b.linked(a.peer_id)
                one.delay_s = two.delay_s = SLOW_WAY_S
                asked: list[bytes] = []
                accepted = b.links.accepted

                def count(peer_id: str, link_id: bytes) -> Link | None:
                    asked.append(link_id)
                    return accepted(peer_id, link_id)

                monkeypatch.setattr(b.links, "accepted", count)
                before = there.connection
                for number in range(MESSAGES):
                    assert there.post(pb.Activations(hidden_size=number))
                    assert back.post(pb.Activations(hidden_size=number))
                proxy.cut()
                await until(lambda: there.connection is not before)
                resumed = there.connection
                assert set(addresses) <= set(proxy.targets[1:])  # both were dialled
                for end in (a, b):
                    frames = [(await soon(end.handler.frames.get()))[1] for _ in range(MESSAGES)]
                    numbers = [expect(frame, pb.Activations).hidden_size for frame in frames]
                    assert numbers == list(range(MESSAGES))
                for _ in range(
                    ROUND_TRIPS
                ):  # in which the acceptor's end of a connection that it left would arrive
                    await there.request(pb.Request(release=pb.Release()), DEADLINE_S)
                assert asked == [there.link_id]
                assert there.connection is resumed
                assert (there.closed_because, back.closed_because) == (None, None)
                assert (a.links.find(b.peer_id), b.links.find(a.peer_id)) == (there, back)

    run()


@asynchronous
async def test_what_is_posted_without_a_connection_waits_for_the_next() -> None:
    async with CuttingProxy() as proxy, linked(proxy) as (a, b, there, back):
        proxy.refuses = True
        proxy.cut()
        await until(lambda: there._carried is None and back._carried is None)
        assert there.post(pb.Tokens())
        assert back.post(pb.Tokens())
        proxy.refuses = False
        await soon(a.handler.frames.get())
        await soon(b.handler.frames.get())


@asynchronous
async def test_a_link_that_cannot_be_resumed_is_lost_at_both_ends() -> None:
    async with CuttingProxy() as proxy, linked(proxy, LINK_TIMES) as (a, b, there, back):
        proxy.refuses = True
        proxy.cut()
        assert (await soon(a.handler.closed.get()))[0] == b.peer_id
        assert (await soon(b.handler.closed.get()))[0] == a.peer_id
        for link in (there, back):
            with pytest.raises(LinkError):
                await link.request(pb.Request(), DEADLINE_S)


@asynchronous
async def test_a_link_is_lost_at_once_when_nobody_listens() -> None:
    times = replace(PATIENT, resume_s=10 * DEADLINE_S)
    async with End(times=times) as a, End(times=times) as b:
        async with DelayingRelay(int(b.facts.grpc_addresses[0].rsplit(":", 1)[1])) as relay:
            await a.links.to(replace(b.facts, grpc_addresses=(f"127.0.0.1:{relay.port}",)))
        peer_id, reason = await soon(a.handler.closed.get())
        assert peer_id == b.peer_id
        assert "cannot be reached" in reason


@asynchronous
async def test_an_end_that_stops_says_so() -> None:
    async with End() as a:
        async with End() as b:
            await a.links.to(b.facts)
            await until(lambda: b.links.find(a.peer_id) is not None)
        _, reason = await soon(a.handler.closed.get())
        assert reason == "the other end closed it: this end is stopping"


@asynchronous
async def test_the_new_connection_takes_the_place_of_the_old_and_nothing_is_sent_twice() -> None:
    async with End() as end, raw_link(end) as raw:
        link = end.links.find(raw.peer_id)
        assert link is not None
        for number in range(3):
            assert link.post(pb.Activations(hidden_size=number))
        first = await until_chunk(raw.packet)
        assert first.sequence == 1
        async with raw_call(end) as call:  # the old one still seems open
            welcome = await proven(call, end, raw.identity, resumes=True, received=1)
            assert (welcome.resumed, welcome.received) == (True, 0)
            again = packets.decode(await soon(call.read()))  # type: ignore[arg-type]
            assert isinstance(again, Data)
            assert again.sequence == 2
            assert await ended(raw.call) is grpc.StatusCode.OK
            content = encode(pb.Tokens())
            await call.write(packets.encode_data(TrafficClass.DECODE, 1, len(content), 0, 1, content))
            await soon(end.handler.frames.get())
            assert link.closed_because is None
            assert end.links.find(raw.peer_id) is link


async def until_chunk(read: object) -> Data:
    while True:
        packet = await read()  # type: ignore[operator]
        if isinstance(packet, Data):
            return packet


@asynchronous
async def test_a_link_is_resumed_for_the_peer_that_opened_it_and_for_no_other() -> None:
    async with End() as end, raw_link(end) as raw:
        link = end.links.find(raw.peer_id)
        async with raw_call(end) as call:
            assert not (await proven(call, end, Identity.generate(), resumes=True)).resumed
            assert await ended(call) is grpc.StatusCode.OK
        async with raw_call(end) as call:
            assert not (await proven(call, end, raw.identity, link_id=bytes(16), resumes=True)).resumed
        assert end.links.find(raw.peer_id) is link
        assert end.handler.closed.empty()


@asynchronous
async def test_a_link_id_that_is_taken_opens_no_second_link() -> None:
    async with End() as end, raw_link(end) as raw, raw_call(end) as call:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await proven(call, end, raw.identity, link_id=LINK_ID)
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


@asynchronous
async def test_who_resumes_from_what_was_never_sent_loses_the_link() -> None:
    async with End() as end, raw_link(end) as raw, raw_call(end) as call:
        await proven(call, end, raw.identity, resumes=True, received=7)
        closed, reason = await soon(end.handler.closed.get())
        assert closed == raw.peer_id
        assert "7 is acknowledged" in reason


@asynchronous
async def test_an_end_that_reads_nothing_fills_no_more_than_a_bounded_queue() -> None:
    async with End() as end, raw_link(end) as raw:
        link = end.links.find(raw.peer_id)
        assert link is not None
        posted = 0
        while link.post(pb.Activations(), bytes(1024 * 1024), TrafficClass.PREFILL):
            posted += 1
            assert posted <= 64
        assert link.post(pb.Tokens(), traffic_class=TrafficClass.DECODE)  # which has room of its own


@asynchronous
async def test_a_cancelled_session_takes_what_is_queued_for_it_off_the_line() -> None:
    async with End() as end, raw_link(end) as raw:
        link = end.links.find(raw.peer_id)
        assert link is not None
        assert link.post(pb.Activations(), bytes(4_000_000), TrafficClass.PREFILL, (b"gone",))
        chunk = await until_chunk(raw.packet)
        end.links.cancel(b"gone")
        while not isinstance(packet := await raw.packet(), packets.Cancel):
            pass
        assert packet.message == chunk.message
        assert link.post(pb.Tokens(), traffic_class=TrafficClass.DECODE)
        following = await until_chunk(raw.packet)
        assert following.traffic_class is TrafficClass.DECODE


@asynchronous
async def test_a_connection_that_swallows_everything_without_a_word_is_replaced_before_the_link_is_lost() -> (
    None
):
    async with CuttingProxy() as proxy, linked(proxy) as (a, b, there, back):
        before = there.connection
        assert proxy.mute() == 1
        sending = asyncio.create_task(send_all(there, 5))
        taken, sent = await take_all(b), await soon(sending)
        for one in CLASSES:
            assert [m for m in taken if m[0] == one] == [m for m in sent if m[0] == one]
        assert there.connection is not before
        assert (there.closed_because, back.closed_because) == (None, None)
        assert a.links.find(b.peer_id) is there


@pytest.mark.full
@asynchronous
async def test_a_link_whose_connection_swallows_everything_and_that_cannot_be_dialled_again_is_lost() -> None:
    async with CuttingProxy() as proxy, linked(proxy, LINK_TIMES) as (a, b, there, _):
        proxy.refuses = True
        proxy.mute()
        there.post(pb.Activations(hidden_size=1), b"", TrafficClass.DECODE)
        closed, reason = await soon(a.handler.closed.get())
        assert closed == b.peer_id
        assert "nothing heard for" in reason
