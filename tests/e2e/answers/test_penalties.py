"""Penalties, min_p and min_tokens: what transformers draws with them, and the same on any circuit."""

from typing import Any

import pytest
from support.pairwise import usually
from support.swarms.live_swarms import References, bundled_folder, circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalPeer, LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\nNow is the winter of our discontent"
NEW_TOKENS = 40
CIRCUITS = {
    1: {"whole": (0, 12)},
    2: {"front": (0, 6), "back": (6, 12)},
    3: {"front": (0, 5), "middle": (5, 8), "back": (8, 12)},
    4: {"front": (0, 3), "middle": (3, 6), "whole": (6, 8), "back": (8, 12)},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "all": {
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "min_p": 0.02,
        "top_p": 0.95,
        "logprobs": 2,
    },
    "repetition": {"repetition_penalty": 1.2},
    "frequency": {"frequency_penalty": 1.0, "temperature": 1.0, "seed": 3},
    "min_p": {"min_p": 0.1, "temperature": 1.3, "seed": 4},
}


def circuit(swarm: LocalSwarm, hops: int) -> dict[LocalPeer, tuple[int, int]]:
    peers = {peer.name: peer for peer in swarm.peers}
    return {peers[name]: span for name, span in CIRCUITS[hops].items()}


@pytest.mark.parametrize("hops", [1, 3])
@pytest.mark.parametrize("penalty", usually([1.3], [0.8, 2.0]))
async def test_greedy_with_a_repetition_penalty_is_transformers_token_for_token(
    hops: int, penalty: float, wide_swarm: LocalSwarm, wide_client: AsyncSwarm, references: References
) -> None:
    prompt = references.ids(bundled_folder(), PROMPT)
    with circuit_of(wide_client, circuit(wide_swarm, hops)):
        generation = await generate(wide_client, prompt, NEW_TOKENS, repetition_penalty=penalty)
    assert len(generation.circuit.hops) == hops
    assert generation.token_ids == references.greedy(bundled_folder(), prompt, NEW_TOKENS, penalty)
    assert generation.token_ids != references.greedy(bundled_folder(), prompt, NEW_TOKENS)


@pytest.mark.parametrize("setting", usually(["all"], ["repetition", "frequency", "min_p"]))
async def test_the_tokens_are_the_same_on_one_to_four_peers(
    setting: str, wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    found = []
    for hops in CIRCUITS:
        with circuit_of(wide_client, circuit(wide_swarm, hops)):
            generation = await generate(wide_client, PROMPT, NEW_TOKENS, **SETTINGS[setting])
        assert len(generation.circuit.hops) == hops
        found.append(generation.token_ids)
    assert found == found[:1] * len(CIRCUITS)


async def test_nothing_ends_before_as_many_tokens_as_were_asked_for(wide_client: AsyncSwarm) -> None:
    free = await generate(wide_client, PROMPT, NEW_TOKENS)
    stop = free.token_ids[3]
    short = await generate(wide_client, PROMPT, NEW_TOKENS, stop_token_ids=[stop])
    long = await generate(wide_client, PROMPT, NEW_TOKENS, stop_token_ids=[stop], min_tokens=20)
    assert (short.token_ids[-1], short.finish_reason) == (stop, "stop")
    assert len(short.token_ids) <= 4
    assert len(long.token_ids) >= 20
    assert stop not in long.token_ids[:20]
