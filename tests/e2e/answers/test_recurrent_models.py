"""A model whose layers keep states of a session gives the tokens of transformers through a circuit of peers."""

import asyncio
from pathlib import Path

import pytest
from support.models.tiny_models import LAYERS, VOCABULARY, make_tiny_model
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import References, circuit_of, generate, hops_of

from molink.client.api.swarm import AsyncSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NEW_TOKENS = 12
LENGTHS = (1, 17, 65, 5)


async def test_sessions_together_and_alone_give_the_tokens_of_transformers(
    tmp_path: Path, references: References
) -> None:
    folder = make_tiny_model("qwen3_next", tmp_path)
    prompts = [
        tuple((31 * number + 7 * place * place + place) % (VOCABULARY - 2) + 2 for place in range(length))
        for number, length in enumerate(LENGTHS)
    ]
    async with ForkedSwarm() as swarm:
        front = await swarm.join("front", "--model", str(folder), "--layers", "0:3")
        back = await swarm.join("back", "--model", str(folder), "--layers", f"3:{LAYERS}")
        async with AsyncSwarm(str(folder), initial_peers=swarm.addresses) as client:
            with circuit_of(client, {front: (0, 3), back: (3, LAYERS)}):
                together = await asyncio.gather(*(generate(client, prompt, NEW_TOKENS) for prompt in prompts))
                again = await generate(client, prompts[2], NEW_TOKENS)
    assert hops_of(again) == [("front", 0, 3), ("back", 3, LAYERS)]
    expected = [references.greedy(folder, prompt, NEW_TOKENS) for prompt in prompts]
    assert [generation.token_ids for generation in together] == expected
    assert again.token_ids == expected[2]
