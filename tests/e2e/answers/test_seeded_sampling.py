"""A seed gives the same text on any circuit."""

import pytest
from support.pairwise import usually
from support.swarms.live_swarms import circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "JULIET:\n"
NEW_TOKENS = 32
SETTINGS = {
    "temperature": {"temperature": 0.9},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "top_k": {"temperature": 1.5, "top_k": 20},
    "all": {"temperature": 0.7, "top_k": 50, "top_p": 0.95},
}


def by_name(swarm: LocalSwarm) -> dict[str, LocalPeer]:
    return {peer.name: peer for peer in swarm.peers}


@pytest.mark.parametrize("setting", usually(["all"], ["temperature", "top_p", "top_k"]))
async def test_a_seed_gives_the_same_tokens_on_one_peer_and_on_three(
    setting: str, wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    peers, options = by_name(wide_swarm), SETTINGS[setting]
    with circuit_of(wide_client, {peers["whole"]: (0, 12)}):
        alone = await generate(wide_client, PROMPT, NEW_TOKENS, seed=7, **options)
        other = await generate(wide_client, PROMPT, NEW_TOKENS, seed=8, **options)
    with circuit_of(wide_client, {peers["front"]: (0, 5), peers["middle"]: (5, 8), peers["back"]: (8, 12)}):
        together = await generate(wide_client, PROMPT, NEW_TOKENS, seed=7, **options)
    assert (len(alone.circuit.hops), len(together.circuit.hops)) == (1, 3)
    assert together.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids


async def test_sampling_without_a_seed_differs_from_time_to_time(wide_client: AsyncSwarm) -> None:
    first = await generate(wide_client, PROMPT, NEW_TOKENS, temperature=1.0)
    second = await generate(wide_client, PROMPT, NEW_TOKENS, temperature=1.0)
    assert first.token_ids != second.token_ids
