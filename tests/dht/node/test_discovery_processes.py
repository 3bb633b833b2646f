"""Peers in processes of their own, which are killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from support.swarms.forked_peers import start_program
from support.swarms.swarm_examples import QUICK

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery

PROGRAM = Path(__file__).parents[2] / "support" / "swarms" / "lone_peer.py"
PATIENCE_S = 120.0


@asynccontextmanager
async def process(log: Path, *initial: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A peer's process and its address."""
    peer = await start_program(PROGRAM, ["0.5", *initial], log)
    try:
        assert peer.stdout is not None
        async with asyncio.timeout(PATIENCE_S):
            address = await peer.stdout.readline()
        assert address, await asyncio.to_thread(log.read_text)
        yield peer, address.decode().strip()
    finally:
        if peer.returncode is None:
            peer.kill()
        await peer.wait()


async def until_seen(client: Discovery, addresses: set[str]) -> None:
    ids = {address.rsplit("/", 1)[1] for address in addresses}
    async with asyncio.timeout(PATIENCE_S):
        while {view.peer_id for view in client.snapshot()} != ids:
            await client.changed(PATIENCE_S)


@pytest.mark.real
@pytest.mark.full
def test_a_swarm_forgets_who_is_killed_and_goes_on_without_its_first_peer(tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def scenario() -> None:
        async with AsyncExitStack() as processes:
            first, at_first = await processes.enter_async_context(process(log))
            _, at_second = await processes.enter_async_context(process(log, at_first))
            third, at_third = await processes.enter_async_context(process(log, at_first))
            async with Discovery(
                Identity.generate(), initial_peers=(at_first, at_second), timing=QUICK, listen=None
            ) as client:
                await until_seen(client, {at_first, at_second, at_third})
                first.kill()
                await until_seen(client, {at_second, at_third})
                _, at_fourth = await processes.enter_async_context(process(log, at_first, at_second))
                await until_seen(client, {at_second, at_third, at_fourth})
                third.kill()
                await until_seen(client, {at_second, at_fourth})

    asyncio.run(scenario())
