"""A swarm to be attacked, shared by the tests of this folder: what one attack leaves behind, the next one finds."""

from collections.abc import AsyncIterator

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm


@pytest.fixture(scope="session")
async def one_loop(anyio_backend: str) -> None:
    """Keeps the loop open to the end. Without a fixture that lasts, anyio closes it behind each test, and what gRPC
    still had to tell it of calls that were given up fails the next test, whose loop is told."""


@pytest.fixture(autouse=True)
def _on_one_loop(request: pytest.FixtureRequest) -> None:
    """Not so a state machine's case: Hypothesis runs it, and takes no parameter of anyio's."""
    if request.node.get_closest_marker("anyio") is not None:
        request.getfixturevalue("one_loop")


@pytest.fixture(scope="session")
def references() -> References:
    return References()


@pytest.fixture(scope="session")
async def attacked(anyio_backend: str) -> AsyncIterator[LocalSwarm]:
    """The bundled model's 12 layers on two peers, so that every generation needs both."""
    async with ForkedSwarm() as swarm:
        await swarm.join("front", "--model", BUNDLED, "--layers", "0:6", "--memory", "600MB")
        await swarm.join("back", "--model", BUNDLED, "--layers", "6:12", "--memory", "600MB")
        yield swarm


@pytest.fixture(scope="module")
async def client(attacked: LocalSwarm) -> AsyncIterator[AsyncSwarm]:
    """Ends with the file, and what it holds against peers that were attacked with it."""
    async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as client:
        yield client
