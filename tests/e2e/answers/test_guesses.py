"""Guesses change how many trips a generation takes, and no token, whoever serves it."""

from typing import Any

import pytest
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, circuit_of, generate

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.e2e, pytest.mark.anyio]

PROMPT = "JULIET:\n"
NEW_TOKENS = 64


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 3, "logprobs": 2}])
async def test_tokens_and_log_probabilities_are_those_without_guesses(
    options: dict[str, float], wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    peers = {peer.name: peer for peer in wide_swarm.peers}
    for circuit in (
        {peers["whole"]: (0, 12)},
        {peers["front"]: (0, 5), peers["middle"]: (5, 8), peers["back"]: (8, 12)},
    ):
        with circuit_of(wide_client, circuit):
            off = await generate(wide_client, PROMPT, NEW_TOKENS, speculation="off", **options)
            predicted = [*off.token_ids[:20], (off.token_ids[20] + 1) % 1000, *off.token_ids[21:]]
            on = await generate(wide_client, PROMPT, NEW_TOKENS, prediction=predicted, **options)
        assert on.token_ids == off.token_ids
        assert [one.logprob for one in on.logprobs] == pytest.approx(
            [one.logprob for one in off.logprobs], abs=1e-4
        )
        assert (off.trips, off.guessed_tokens, off.accepted_tokens) == (NEW_TOKENS, 0, 0)
        # whether a wrong guess travels is decided by times; that refused ones change nothing is tested at the peers
        assert 0 < on.accepted_tokens <= on.guessed_tokens
        assert on.trips + on.accepted_tokens == NEW_TOKENS


async def test_a_prediction_may_be_text_and_guesses_are_told_of(wide_client: AsyncSwarm) -> None:
    said = await generate(wide_client, PROMPT, NEW_TOKENS, speculation="off")
    predicted = await generate(wide_client, PROMPT, NEW_TOKENS, prediction=said.text)
    assert predicted.text == said.text
    assert predicted.tokens_per_trip > 2


async def test_what_heads_guess_with_is_announced_and_what_that_is_expected_to_bring_is_explained(
    wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    peers: Any = (await wide_client.snapshot())["peers"]
    assert {tuple(draft["name"] for draft in one["drafts"]) for one in peers} == {("lookup", "tables")}
    head = next(peer for peer in wide_swarm.peers if peer.name == "whole")
    with circuit_of(wide_client, {head: (0, 12)}):
        explanation = await wide_client.explain(PROMPT, max_new_tokens=NEW_TOKENS)
    [hop] = explanation.hops
    # whether guesses are expected to pay is decided by times
    guesses_ms = sum(term.ms for term in hop.terms if term.name == "guesses")
    assert (guesses_ms < 0) == (explanation.predicted_tokens_per_trip > 1)
    assert explanation.predicted_trip_ms == pytest.approx(explanation.predicted_tpot_ms - guesses_ms)
    assert explanation.predicted_tpot_ms > 0


async def test_a_peer_drafts_with_a_model_on_its_device() -> None:
    """Here the one that it serves: what is guessed is right as far as guesses travel, and tokens stay the same."""
    async with ForkedSwarm() as swarm:
        await swarm.join("head", "--model", BUNDLED, "--layers", "0:6", "--draft", BUNDLED)
        await swarm.join("tail", "--model", BUNDLED, "--layers", "6:12")
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            peers: Any = (await client.snapshot())["peers"]
            drafts = {peer["name"]: [draft["name"] for draft in peer["drafts"]] for peer in peers}
            assert drafts["head"] == ["lookup", "tables", "tiny-shakespeare"]
            for options in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}):
                off = await generate(client, PROMPT, NEW_TOKENS, speculation="off", **options)
                on = await generate(client, PROMPT, NEW_TOKENS, **options)
                assert on.token_ids == off.token_ids
                # how many guesses travel is decided by times
                assert on.accepted_tokens <= on.guessed_tokens
                assert on.trips + on.accepted_tokens == NEW_TOKENS
