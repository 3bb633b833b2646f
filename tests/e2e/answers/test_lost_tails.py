"""The tail is lost, or leaves, while its draws depend on the tokens before: whoever is the tail then draws the same."""

from typing import Any

import pytest
from support.chaos.losses import lose_in_decode
from support.pairwise import usually
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, generate

from molink.client.api.swarm import AsyncSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 160
SETTINGS: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 11,
    "repetition_penalty": 1.1,
    "frequency_penalty": 0.05,
    "min_p": 0.02,
    "ignore_eos": True,
    "prompt_logprobs": 1,
}


@pytest.mark.parametrize(
    ("way", "at"),
    usually(
        [("killed", 1)],
        [("killed", 0), ("leaves", 1), ("leaves", 0)],
    ),
)
async def test_penalised_tokens_are_the_same_after_a_peer_has_gone(
    way: str, at: int, anyio_backend: str
) -> None:
    async with ForkedSwarm() as swarm:
        for span in ("0:6", "6:12"):
            for one in "ab":
                await swarm.join(f"{span}-{one}", "--model", BUNDLED, "--layers", span)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            expected = await generate(client, PROMPT, NEW_TOKENS, **SETTINGS)
            generation, victim = await lose_in_decode(
                client, swarm, at, PROMPT, NEW_TOKENS, leaves=way == "leaves", **SETTINGS
            )
    assert generation.token_ids == expected.token_ids
    scored = [one.logprob for one in expected.prompt_logprobs[1:]]
    assert [one.logprob for one in generation.prompt_logprobs[1:]] == pytest.approx(scored, abs=1e-4)
    assert victim.peer_id not in [hop.peer_id for hop in generation.circuit.hops]
    if way == "killed":
        assert generation.epochs >= 2
