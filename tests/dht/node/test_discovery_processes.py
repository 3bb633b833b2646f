"""Peers in processes of their own, which are killed."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.swarms.swarm_examples import QUICK

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery

PROGRAM = Path(__file__).parents[2] / "support" / "swarms" / "lone_peer.py"
PATIENCE_S = 60.0


@contextmanager
def process(*initial: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A peer's process and its address."""
    command = [sys.executable, str(PROGRAM), "0.5", *initial]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as peer:
        try:
            assert peer.stdout is not None
            yield peer, peer.stdout.readline().strip()
        finally:
            peer.kill()


async def until_seen(client: Discovery, addresses: set[str]) -> None:
    ids = {address.rsplit("/", 1)[1] for address in addresses}
    async with asyncio.timeout(PATIENCE_S):
        while {view.peer_id for view in client.snapshot()} != ids:
            await client.changed(PATIENCE_S)


@pytest.mark.e2e
def test_a_swarm_forgets_who_is_killed_and_goes_on_without_its_first_peer() -> None:
    async def scenario(processes: ExitStack) -> None:
        first, at_first = processes.enter_context(process())
        _, at_second = processes.enter_context(process(at_first))
        third, at_third = processes.enter_context(process(at_first))
        async with Discovery(
            Identity.generate(), initial_peers=(at_first, at_second), timing=QUICK, listen=None
        ) as client:
            await until_seen(client, {at_first, at_second, at_third})
            first.kill()
            await until_seen(client, {at_second, at_third})
            _, at_fourth = processes.enter_context(process(at_first, at_second))
            await until_seen(client, {at_second, at_third, at_fourth})
            third.kill()
            await until_seen(client, {at_second, at_fourth})

    with ExitStack() as processes:
        asyncio.run(scenario(processes))
