"""Connections between peers, and to their clients, break again and again: the tokens are the same, in one epoch."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cutting_proxy import CuttingProxy
from live_swarms import BUNDLED, References, bundled_folder, circuit_of, generate

from molink.client.local_swarm import LocalSwarm
from molink.client.swarm import AsyncSwarm
from molink.peer.transmission.policies import POLICIES

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.anyio]

THIRDS = ((0, 4), (4, 8), (8, 12))
PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 60
GENERATIONS = 20
CUTS = 50


@asynccontextmanager
async def thirds(*options: str) -> AsyncIterator[tuple[LocalSwarm, AsyncSwarm]]:
    """Three peers with a third of the layers each, and a client whose circuit they are."""
    async with LocalSwarm() as swarm:
        spans = {}
        for number, (start, stop) in enumerate(THIRDS):
            peer = await swarm.join(
                f"third-{number}", "--model", BUNDLED, "--layers", f"{start}:{stop}", *options
            )
            spans[peer] = (start, stop)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            with circuit_of(client, spans):
                yield swarm, client


@pytest.mark.timeout(400)
async def test_generations_go_on_as_if_nothing_had_broken(
    anyio_backend: str, references: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(3)
    folder = bundled_folder()
    expected = references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS)
    async with CuttingProxy() as proxy:
        monkeypatch.setenv("MOLINK_HTTP_PROXY", proxy.url)
        async with thirds() as (_, client):
            await generate(client, PROMPT, NEW_TOKENS)
            cuts = 0

            async def cut() -> None:
                nonlocal cuts
                while True:
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    cuts += proxy.cut() > 0

            made = []
            while len(made) < GENERATIONS or cuts < CUTS:
                cutting = asyncio.create_task(cut())
                try:
                    made.append(await generate(client, PROMPT, NEW_TOKENS))
                finally:
                    cutting.cancel()
                    await asyncio.gather(cutting, return_exceptions=True)
    assert [(one.token_ids, one.epochs) for one in made] == [(expected, 1)] * len(made)


@pytest.mark.parametrize("policy", POLICIES)
async def test_every_policy_of_transmission_gives_the_same_tokens(
    policy: str, anyio_backend: str, references: References
) -> None:
    folder = bundled_folder()
    prompts = [PROMPT, "ROMEO:", "What say you, my lord?\n" * 30]
    expected = [references.greedy(folder, references.ids(folder, prompt), 12) for prompt in prompts]
    async with thirds("--transmission-policy", policy) as (_, client):
        made = await asyncio.gather(*(generate(client, prompt, 12) for prompt in prompts))
    assert [one.token_ids for one in made] == expected
