"""A client that asks for much more at once than a small swarm has room for gets all of it."""

import asyncio

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, GENERATION_TIMEOUT_S, References, bundled_folder

from molink.client.api.swarm import AsyncSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

ROOM, CROWD, TOKENS = "4", 80, 4


async def test_generations_of_one_client_all_come_through_a_swarm_with_room_for_a_few(
    references: References,
) -> None:
    async with ForkedSwarm() as swarm:
        for name, layers in (("front", "0:6"), ("back", "6:12")):
            await swarm.join(name, "--model", BUNDLED, "--layers", layers, "--sessions-per-client", ROOM)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            async with asyncio.timeout(GENERATION_TIMEOUT_S):
                generations = await asyncio.gather(
                    *(
                        client.generate("ROMEO:", max_new_tokens=TOKENS, timeout_s=GENERATION_TIMEOUT_S)
                        for _ in range(CROWD)
                    )
                )
    folder = bundled_folder()
    expected = references.greedy(folder, references.ids(folder, "ROMEO:"), TOKENS)
    assert {generation.token_ids for generation in generations} == {expected}
