"""A client that asks for what does not exist hears so, with the choices, before anything is opened."""

import asyncio
from typing import Any

import pytest

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import InvalidRequest


def test_an_unknown_activation_codec_is_refused() -> None:
    async def ask() -> None:
        async with AsyncSwarm(initial_peers=(), activation_codec="int4"):
            pass

    with pytest.raises(InvalidRequest, match="none, float16, bfloat16, int8, got 'int4'"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("parameter", "choices"),
    [("dtype", "auto, float32, bfloat16, float16"), ("quantization", "none, int8, nf4")],
)
def test_numbers_that_nobody_computes_in_are_the_callers_mistake(parameter: str, choices: str) -> None:
    wrong: dict[str, Any] = {parameter: "int3"}

    async def ask() -> None:
        async with AsyncSwarm(initial_peers=(), **wrong):
            pass

    with pytest.raises(InvalidRequest, match=f"{parameter} must be one of {choices}, got 'int3'") as refused:
        asyncio.run(ask())
    assert refused.value.parameter == parameter
