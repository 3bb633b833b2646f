"""A user's first peers serve at once, and have what few rows are multiplied by compiled once, beside that."""

import asyncio
import platform
import sys
from pathlib import Path

import pytest
from support.swarms.live_swarms import References, bundled_folder, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [
    pytest.mark.real,
    pytest.mark.anyio,
    pytest.mark.full,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64",
        reason="it is compiled on Linux for x86-64 only",
    ),
]

PROMPT = tuple(range(40, 72))
NEW_TOKENS = 48
COMPILED_WITHIN_S = 300
"""At the lowest priority, beside whatever else runs."""


async def test_tokens_are_those_of_transformers_before_and_as_the_library_comes_and_behind_it(
    tmp_path: Path, references: References
) -> None:
    expected = references.greedy(bundled_folder(), PROMPT, NEW_TOKENS)
    cache = tmp_path / "cache"
    async with LocalSwarm({"XDG_CACHE_HOME": str(cache)}) as local:
        for name, span in (("front", "0:6"), ("back", "6:12")):
            await local.join(name, "--model", str(bundled_folder()), "--layers", span)
        async with AsyncSwarm(str(bundled_folder()), initial_peers=[local.addresses[0]]) as swarm:
            async with asyncio.timeout(COMPILED_WITHIN_S):
                while not (kept := list(cache.glob("molink/native/*.so"))):
                    assert (await generate(swarm, PROMPT, NEW_TOKENS)).token_ids == expected
            for _ in range(3):
                assert (await generate(swarm, PROMPT, NEW_TOKENS)).token_ids == expected
    assert len(kept) == len(list(cache.glob("molink/native/*.so"))) == 1
