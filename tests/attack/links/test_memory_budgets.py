"""What strangers leave unfinished or unacknowledged is bounded over all their links, and soon forgotten."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from support.attackers.bystander import BEYOND_BYTES, RECOVERY_S, bystander, resident_bytes
from support.attackers.memory_attack import LyingLink
from support.links.raw_links import facts_of
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm
from molink.dht.identity.identity import Identity
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transport.message_memory import STRANGER_BYTES
from molink.shards.checkpoint import store

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]
MIB = 1024 * 1024
LINKS = 24
ASKED = 700
UNFINISHED_BYTES = 62 * MIB


@pytest.mark.parametrize("identities", [1, pytest.param(LINKS, marks=pytest.mark.attack)])
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
        assert resident_bytes(front) - before < BEYOND_BYTES
        for task in alive:
            task.cancel()
        await asyncio.gather(*alive, return_exceptions=True)


@pytest.mark.attack
async def test_what_makes_no_progress_is_forgotten_and_memory_comes_back(
    attacked: LocalSwarm, client: AsyncSwarm, references: References
) -> None:
    facts, front = facts_of(client, "front"), attacked.peers[0]
    async with bystander(attacked, client, references) as honest, AsyncExitStack() as stack:
        await honest.generate(client, references)
        before = resident_bytes(front)
        links = [await LyingLink.dial(facts, Identity.generate(), bytes(16), stack) for _ in range(LINKS)]
        alive = [asyncio.create_task(link.keep_alive()) for link in links]
        await asyncio.gather(*(link.begin_messages(STRANGER_BYTES - MIB) for link in links))
        async with asyncio.timeout(2 * RECOVERY_S):
            await asyncio.gather(*alive)  # each has been closed
        await honest.generate(client, references)
        assert resident_bytes(front) - before < 128 * MIB
