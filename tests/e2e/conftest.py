"""Swarms of real peer processes that the tests of this folder share, and what transformers says they should generate.

Tests and fixtures run on one asyncio loop (anyio's plugin), so that a swarm that one test has used serves the next.
"""

import asyncio
from collections.abc import AsyncIterator

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm


@pytest.fixture(scope="session", autouse=True)
async def _one_loop(anyio_backend: str) -> None:
    """Keeps the loop open to the end. Without a fixture that lasts, anyio closes it behind each test, and what gRPC
    still had to tell it of calls that were given up fails the next test, whose loop is told."""


@pytest.fixture(scope="session")
def references() -> References:
    return References()


@pytest.fixture(scope="module")
async def wide_swarm(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    """The bundled model's 12 layers on four peers, so overlapping that a circuit may have 1, 2, 3 or 4 hops."""
    async with ForkedSwarm() as swarm:
        await swarm.join("whole", "--model", BUNDLED, "--layers", "0:12")
        await asyncio.gather(
            swarm.join("front", "--model", BUNDLED, "--layers", "0:6"),
            swarm.join("middle", "--model", BUNDLED, "--layers", "3:9"),
            swarm.join("back", "--model", BUNDLED, "--layers", "6:12"),
        )
        yield swarm


@pytest.fixture(scope="module")
async def wide_client(wide_swarm: LocalSwarm) -> AsyncIterator[AsyncSwarm]:
    async with AsyncSwarm(BUNDLED, initial_peers=wide_swarm.addresses) as client:
        yield client
