"""Generations of one request: in what order their pieces come, and what is left of them when they are ended."""

import asyncio
from collections.abc import AsyncIterator
from itertools import count

import pytest

from molink.client.api.generation import TextPiece
from molink.client.gateway.slots import GatewayStopping
from molink.client.gateway.streams import QUEUED_PIECES, Choices

DEADLINE_S = 120.0

pytestmark = pytest.mark.anyio


async def numbers(queue_full: asyncio.Event) -> AsyncIterator[TextPiece]:
    for number in count():
        if number == QUEUED_PIECES:
            queue_full.set()
        yield TextPiece(str(number), (number,))


async def test_generations_that_are_ended_before_a_slow_reader_have_no_gap() -> None:
    queue_full = asyncio.Event()
    async with Choices([numbers(queue_full)]) as choices, asyncio.timeout(DEADLINE_S):
        await queue_full.wait()
        choices.fail(GatewayStopping())
        assert [int(piece.text) for _, piece in await choices.next()] == [*range(QUEUED_PIECES)]
        for _ in range(2):
            with pytest.raises(GatewayStopping):
                await choices.next()


async def test_who_waits_for_a_piece_hears_that_they_are_ended() -> None:
    async def silent() -> AsyncIterator[TextPiece]:
        await asyncio.Event().wait()
        yield TextPiece("never")

    async with Choices([silent(), silent()]) as choices, asyncio.timeout(DEADLINE_S):
        waiting = asyncio.create_task(choices.next())
        await asyncio.sleep(0)
        choices.fail(GatewayStopping())
        with pytest.raises(GatewayStopping):
            await waiting
