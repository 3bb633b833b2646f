"""Who is not known is read at a pace: refusing costs a peer as much as asking costs a stranger."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from data_plane import DEADLINE_S, End, asynchronous, soon, until
from served_peer import model, served
from test_leases_held import ask

from molink.peer.link.link import Link, LinkError
from molink.peer.models.model import LocalModel
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.serving import service
from molink.peer.serving.budgets import Rate, Rates

__all__ = ["model"]

FEW = Rates(Rate(0.001, 40.0), Rate(0.001, 60.0), Rate(0.001, 70.0))
"""Packets, and hardly any more."""


async def questions(link: Link, count: int) -> int:
    """How many of so many questions are answered, however, until nothing more is."""
    request = pb.Request(get_manifest=pb.GetManifest(model_hash="unknown"))
    answered = 0
    for _ in range(count):
        try:
            await link.request(request, 0.5)
        except (LinkError, TimeoutError):
            break
        answered += 1
    return answered


@asynchronous
async def test_a_stranger_that_asks_without_end_is_read_as_often_as_it_may_be(
    model: LocalModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "PACKETS", FEW)
    async with served(model) as peer, AsyncExitStack() as stack:
        stranger = await stack.enter_async_context(End(is_client=True))
        link = await stranger.links.to(peer.facts)
        assert 0 < await questions(link, 100) <= 40
        newcomer = await stack.enter_async_context(End(is_client=True))
        other = await newcomer.links.to(peer.facts)
        assert (await ask(other, peer.alone(2))).HasField("reserved")


@asynchronous
async def test_requests_that_outrun_their_answers_end_the_link(model: LocalModel) -> None:
    async with served(model) as peer, AsyncExitStack() as stack:
        stranger = await stack.enter_async_context(End(is_client=True))
        link = await stranger.links.to(peer.facts)
        asked = [asyncio.create_task(ask(link, peer.alone(session % 250 + 1))) for session in range(900)]
        await soon(until(lambda: link.closed_because is not None))
        answers = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), DEADLINE_S)
        assert any(isinstance(answer, LinkError) for answer in answers)
