"""Links between peers that become slow or fast again change the circuit; nothing has to be started again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import psutil
import pytest
from support.links.delaying_relay import DelayingRelay
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, free_ports, generate, hops_of

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

RELAY_HOST = "127.0.0.2"
SLOW_S = 0.06
"""One way: far more than any difference between processes of one machine."""
STEADY = 6
REPLAN_TIMEOUT_S = 240.0
"""The round trip is the least of 8 pings, links are probed every 20 s, and a client looks every 10 s."""


class SlowLinks:
    """Which pairs of peers have a slow link now, whichever of the two dialled."""

    def __init__(self) -> None:
        self.slow: set[frozenset[str]] = set()
        self._diallers: dict[int, str | None] = {}

    def delay_s(self, dialler_port: int, accepter: str) -> float:
        if dialler_port not in self._diallers:
            self._diallers[dialler_port] = _peer_that_owns(dialler_port)
        return SLOW_S if frozenset((self._diallers[dialler_port], accepter)) in self.slow else 0.0


def _peer_that_owns(port: int) -> str | None:
    """The name of the peer process with a connection from this port; None if it is a client's."""
    for process in psutil.Process().children(recursive=True):
        try:
            if any(one.laddr.port == port for one in process.net_connections("tcp")):
                words = process.cmdline()
                return words[words.index("--name") + 1]
        except (psutil.Error, ValueError):
            continue
    return None


@asynccontextmanager
async def reached_over(links: SlowLinks, name: str) -> AsyncIterator[tuple[str, ...]]:
    """Options of a peer that others reach on another address only, where relays pass on what they send."""
    port, grpc_port = free_ports(2)
    async with (
        DelayingRelay(port, host=RELAY_HOST, port=port),
        DelayingRelay(
            grpc_port, host=RELAY_HOST, port=grpc_port, delay_of=lambda dialler: links.delay_s(dialler, name)
        ),
    ):
        yield ("--announce", RELAY_HOST, "--port", str(port), "--grpc-port", str(grpc_port))


async def until_steady(client: AsyncSwarm, names: tuple[str, ...]) -> Generation:
    """Generates until the circuit is the expected one, STEADY times in a row."""
    made, in_a_row = None, 0
    async with asyncio.timeout(REPLAN_TIMEOUT_S):
        while made is None or in_a_row < STEADY:
            made = await generate(client, "ROMEO:", 4)
            in_a_row = in_a_row + 1 if tuple(name for name, _, _ in hops_of(made)) == names else 0
    return made


@pytest.mark.timeout(600)
async def test_a_circuit_goes_round_a_link_that_becomes_slow(
    anyio_backend: str, references: References
) -> None:
    """Two peers hold the back half; the link of one of them with the front is slow, then that of the other."""
    folder, links = bundled_folder(), SlowLinks()
    expected = references.greedy(folder, references.ids(folder, "ROMEO:"), 4)
    links.slow = {frozenset(("front", "second"))}
    async with (
        reached_over(links, "front") as front,
        reached_over(links, "first") as first,
        reached_over(links, "second") as second,
        LocalSwarm() as swarm,
    ):
        await swarm.join("front", "--model", BUNDLED, "--layers", "0:6", *front)
        await swarm.join("first", "--model", BUNDLED, "--layers", "6:12", *first)
        await swarm.join("second", "--model", BUNDLED, "--layers", "6:12", *second)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            before = await until_steady(client, ("front", "first"))
            links.slow = {frozenset(("front", "first"))}
            after = await until_steady(client, ("front", "second"))
    assert before.token_ids == after.token_ids == expected
