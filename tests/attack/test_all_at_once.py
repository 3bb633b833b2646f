"""A swarm of ten peers stands under all attacks at once: no process ends, and every honest generation is right."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from attack.all_attacks import Attacks
from support.attackers.bystander import RECOVERY_S, Bystander, bystander
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.attack, pytest.mark.anyio]

ROUNDS = 6
"""Of each attack, of which the longest take 20 s."""
MOST_S = 800.0
BETWEEN_NEWCOMERS_S = 10.0
PEERS = {"front": "0:6", "back": "6:12", "middle": "3:9", "whole": "0:12"}


@asynccontextmanager
async def ten_peers() -> AsyncIterator[tuple[LocalSwarm, AsyncSwarm]]:
    async with ForkedSwarm() as swarm:
        for number in range(10):
            name, layers = list(PEERS.items())[number % len(PEERS)]
            other = f"{name}-{number}" if number >= len(PEERS) else name
            await swarm.join(other, "--model", BUNDLED, "--layers", layers, "--memory", "600MB")
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            yield swarm, client


async def newcomers(swarm: LocalSwarm, honest: Bystander, references: References) -> None:
    """Somebody new gets in and generates, soon after the one before, until cancelled."""
    while True:
        async with (
            asyncio.timeout(RECOVERY_S),
            AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as newcomer,
        ):
            await honest.generate(newcomer, references)
        await asyncio.sleep(BETWEEN_NEWCOMERS_S)


@pytest.mark.timeout(900)
async def test_ten_peers_stand_under_all_attacks_at_once_for_six_rounds_of_each(
    references: References,
) -> None:
    async with ten_peers() as (swarm, client):
        attacks = Attacks(swarm, client)
        async with bystander(swarm, client, references) as honest:
            quiet = honest.generations
            async with asyncio.TaskGroup() as group:
                raging = group.create_task(attacks.all_at_once())
                coming = group.create_task(newcomers(swarm, honest, references))
                async with asyncio.timeout(MOST_S):
                    while min(attacks.rounds[one.__name__] for one in attacks.each) < ROUNDS:  # noqa: ASYNC110
                        await asyncio.sleep(0.5)
                raging.cancel()
                coming.cancel()
        assert honest.generations > quiet
