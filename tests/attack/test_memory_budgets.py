"""What strangers leave unfinished or unacknowledged is bounded over all their links, and soon forgotten."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from bystander import RECOVERY_S, bystander, resident_bytes
from live_swarms import BUNDLED, References, bundled_folder
from memory_attack import LyingLink
from raw_links import facts_of

from molink.client.local_swarm import LocalSwarm
from molink.client.swarm import AsyncSwarm
from molink.dht.identity import Identity
from molink.peer.protocol import molink_pb2 as pb
from molink.shards import store

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]
MIB = 1024 * 1024
LINKS = 24
ASKED = 700
UNFINISHED_BYTES = 62 * MIB


@pytest.mark.parametrize("identities", [1, LINKS])
async def test_links_of_62_mib_of_unfinished_messages_leave_memory_and_users_as_they_were(
    identities: int, attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts = facts_of(client, "front")
    names = [Identity.generate() for _ in range(identities)]
    async with bystander(attacked, client, references) as honest, AsyncExitStack() as stack:
        links = [
            await LyingLink.dial(facts, names[number % identities], number.to_bytes(16), stack)
            for number in range(LINKS)
        ]
        alive = [asyncio.create_task(link.keep_alive()) for link in links]
        await asyncio.gather(*(link.begin_messages(UNFINISHED_BYTES) for link in links))
        await honest.generate(client, references)
        async with AsyncSwarm(BUNDLED, initial_peers=attacked.addresses) as newcomer:
            await honest.generate(newcomer, references)
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)


async def test_files_that_nobody_acknowledges_wait_on_the_disk(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts, front = facts_of(client, "front"), attacked.peers[0]
    manifest = store.read_manifest(bundled_folder())
    largest = max(manifest.files.items(), key=lambda item: (bundled_folder() / item[0]).stat().st_size)[1]
    request = pb.Request(get_file=pb.GetFile(model_hash=facts.model.model_hash, sha256=largest))
    async with bystander(attacked, client, references), AsyncExitStack() as stack:
        before = resident_bytes(front)
        links = [await LyingLink.dial(facts, Identity.generate(), bytes(16), stack) for _ in range(LINKS)]
        alive = [asyncio.create_task(link.keep_alive()) for link in links]
        await asyncio.gather(*(link.ask(request, ASKED) for link in links))
        async with asyncio.timeout(RECOVERY_S):
            while not all(link.received_bytes for link in links):  # noqa: ASYNC110 - no event for tests
                await asyncio.sleep(0.05)
        assert resident_bytes(front) - before < 4 * LINKS * MIB
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)
