"""Peers whose owners have chosen no layers share the model out between them, and again when they hold the same.

Each has room for nine of the twelve layers.
"""

import asyncio

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NINE_LAYERS = ("--model", BUNDLED, "--memory", "30MB")
ONE_LAYER = ("--model", BUNDLED, "--layers", "0:1")
TAKING = "Taking layers "
FIRST_NINE = f"{TAKING}[0, 9)"


async def check_that_they_serve_together(swarm: LocalSwarm, references: References) -> None:
    """A generation gets its circuit within its deadline, and the right tokens, from the two peers."""
    folder = bundled_folder()
    async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
        generation = await generate(client, "ROMEO:", 12)
    assert generation.token_ids == references.greedy(folder, references.ids(folder, "ROMEO:"), 12)
    assert {hop.name for hop in generation.circuit.hops} >= {"one", "two"}


async def test_two_peers_that_join_at_the_same_moment_do_not_take_the_same_layers(
    anyio_backend: str, references: References
) -> None:
    async with ForkedSwarm() as swarm:
        await swarm.join("founder", *ONE_LAYER)
        peers = await asyncio.gather(*(swarm.join(name, *NINE_LAYERS) for name in ("one", "two")))
        taken = [line.partition(" (")[0] for peer in peers for line in peer.lines if TAKING in line]
        assert len(taken) == len(set(taken)) == 2
        await check_that_they_serve_together(swarm, references)


async def test_two_peers_that_hold_the_same_layers_come_to_serve_all_of_them(
    anyio_backend: str, references: References
) -> None:
    """Each has founded a swarm of its own, and so taken the first layers; then a third peer makes the two one."""
    async with ForkedSwarm() as swarm:
        names = ("one", "two")
        peers = await asyncio.gather(*(swarm.join(name, *NINE_LAYERS, initial_peers=()) for name in names))
        assert all(any(FIRST_NINE in line for line in peer.lines) for peer in peers)
        await swarm.join("bridge", *ONE_LAYER)
        await check_that_they_serve_together(swarm, references)
