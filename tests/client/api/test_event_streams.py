"""A generation that has been returned is over, for its hops as well."""

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import cast

import pytest

from molink.client.api.event_streams import PROMPT_COUNTED, generation_events, texts, whole
from molink.client.api.generation import Generation, TextPiece
from molink.client.api.opened_swarm import OpenedSwarm
from molink.client.errors import SwarmUnavailable
from molink.shards.spec import SamplingParams

pytestmark = pytest.mark.anyio


class Pieces:
    """Of a generation that goes on behind its text, as far as whoever reads it can tell."""

    def __init__(self) -> None:
        self.generation = cast("Generation", object())
        self.has_ended = False

    async def come(self) -> AsyncGenerator[TextPiece, None]:
        try:
            yield TextPiece("to ")
            yield TextPiece("be", generation=self.generation)
            yield TextPiece("never asked for")
        finally:
            self.has_ended = True


async def test_a_whole_generation_has_ended_when_it_is_returned() -> None:
    pieces = Pieces()
    assert await whole(pieces.come()) is pieces.generation
    assert pieces.has_ended


async def test_a_text_that_nobody_reads_on_has_ended_when_it_is_closed() -> None:
    pieces = Pieces()
    text = texts(pieces.come())
    assert await anext(text) == "to "
    assert not pieces.has_ended
    await text.aclose()
    assert pieces.has_ended


async def test_how_long_a_prompt_is_is_known_before_anything_is_computed() -> None:
    async def speculation(_: object) -> None:
        return None

    async def encoded() -> tuple[int, ...]:
        return (7, 8, 9)

    def session(*_: object, **__: object) -> None:
        raise SwarmUnavailable("nobody is there")

    opened = SimpleNamespace(spec=SimpleNamespace(name="poet"), speculation=speculation, session=session)
    told: list[int] = []
    PROMPT_COUNTED.set(told.append)
    with pytest.raises(SwarmUnavailable):
        await whole(generation_events(cast("OpenedSwarm", opened), encoded, SamplingParams(), {}, 1.0))
    assert told == [3]
