"""A client that asks for a codec which does not exist hears so before anything is opened."""

import asyncio

import pytest

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import InvalidRequest


def test_an_unknown_activation_codec_is_refused() -> None:
    async def ask() -> None:
        async with AsyncSwarm(initial_peers=(), activation_codec="int4"):
            pass

    with pytest.raises(InvalidRequest, match="none, float16, bfloat16, int8, got 'int4'"):
        asyncio.run(ask())
