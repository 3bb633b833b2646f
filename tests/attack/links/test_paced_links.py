"""Who is not known is read at a pace: refusing costs a peer as much as asking costs a stranger."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from attack.links.test_leases_held import ask
from support.links.data_plane import DEADLINE_S, End, asynchronous
from support.swarms.served_peer import model, served

from molink.peer.models.model import LocalModel
from molink.peer.serving import request_limits
from molink.peer.serving.budgets import RequestRate, RequestRates
from molink.peer.wire.link.link import Link, LinkError
from molink.peer.wire.link.requests import MAX_REQUESTS_IN_FLIGHT, MAX_TURNED_AWAY, Requests
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.packet_engine import PacketEngine
from molink.peer.wire.transport.shared_uplink import SharedUplink

__all__ = ["model"]

FEW = RequestRates(RequestRate(0.001, 40.0), RequestRate(0.001, 60.0), RequestRate(0.001, 70.0))
"""Packets, and hardly any more."""


async def questions(link: Link, count: int) -> int:
    """How many of so many questions are answered, however, until nothing more is."""
    request = pb.Request(get_manifest=pb.GetManifest(model_hash="unknown"))
    answered = 0
    for _ in range(count):
        try:
            await link.request(request, 0.5 if answered else DEADLINE_S)
        except (LinkError, TimeoutError):
            break
        answered += 1
    return answered


@asynchronous
async def test_a_stranger_that_asks_without_end_is_read_as_often_as_it_may_be(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "PACKETS", FEW)
    async with served(model) as peer, AsyncExitStack() as stack:
        stranger = await stack.enter_async_context(End(is_client=True))
        link = await stranger.links.to(peer.facts)
        assert 0 < await questions(link, 100) <= 40
        newcomer = await stack.enter_async_context(End(is_client=True))
        other = await newcomer.links.to(peer.facts)
        assert (await ask(other, peer.alone(2))).HasField("reserved")


@asynchronous
async def test_requests_that_outrun_their_answers_end_the_link() -> None:
    never = asyncio.Event()
    sent: list[pb.Response] = []

    async def serve(_: pb.Request) -> tuple[pb.Response, bytes]:
        await never.wait()
        return pb.Response(), b""

    def send(response: pb.Response, _: bytes, __: TrafficClass) -> bool:
        sent.append(response)
        return True

    holder = MessageMemory().open("stranger")
    traffic = PacketEngine(SharedUplink(), lambda: None, lambda: None, 0.0, holder)
    requests = Requests(send, serve, traffic, holder)
    asked = pb.Request(get_manifest=pb.GetManifest(model_hash="unknown"))
    for _ in range(MAX_REQUESTS_IN_FLIGHT + MAX_TURNED_AWAY):
        requests.asked(asked, 100)
    assert len(sent) == MAX_TURNED_AWAY
    with pytest.raises(ProtocolError):
        requests.asked(asked, 100)
    never.set()
    await asyncio.gather(*requests.serving)
