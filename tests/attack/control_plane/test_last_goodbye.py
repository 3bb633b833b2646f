"""A client whose only peer has left knows it, and says so in its own words."""

import asyncio
import re

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import SwarmError

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NOTICED_S = 120.0
ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|ipv4|grpc|unavailable:", re.IGNORECASE)


@pytest.mark.parametrize("linked", [False, True], ids=["never used", "used before"])
async def test_after_the_only_peers_goodbye_the_view_is_empty_and_no_address_is_told(linked: bool) -> None:
    async with ForkedSwarm() as swarm:
        peer = await swarm.join("only", "--model", BUNDLED, "--memory", "600MB")
        async with AsyncSwarm(initial_peers=swarm.addresses) as client:
            if linked:
                await client.generate("ROMEO:", max_new_tokens=2, timeout_s=NOTICED_S)
            assert (await client.snapshot())["ready"]
            await swarm.stop(peer)
            async with asyncio.timeout(NOTICED_S):
                while (await client.snapshot())["ready"]:  # noqa: ASYNC110 - a view has no event for tests
                    await asyncio.sleep(0.05)
            with pytest.raises(SwarmError) as caught:
                await client.generate("ROMEO:", max_new_tokens=2, timeout_s=1.0)
    assert not ADDRESS.search(str(caught.value)), str(caught.value)
