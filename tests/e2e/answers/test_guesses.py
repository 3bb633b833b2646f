"""Guesses change how many trips a generation takes, and no token, whoever serves it.

How many travel, if any, heads choose by measured times: tests of `peer/speculation` show that choice.
"""

import asyncio
from typing import Any

import pytest
from support.attackers.bystander import BEYOND_BYTES, resident_bytes
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import (
    BUNDLED,
    FORMATION_TIMEOUT_S,
    References,
    bundled_folder,
    circuit_of,
    generate,
    mostly_right,
)

from molink.client.api.swarm import AsyncSwarm
from molink.client.local.local_swarm import LocalSwarm

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "JULIET:\n"
NEW_TOKENS = 64
CONTEXT = 1024
"""Of the bundled model."""
BLOCK_TOKENS = 16


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
            predicted = mostly_right(off.token_ids, wrong_every=7)
            on = await generate(wide_client, PROMPT, NEW_TOKENS, prediction=predicted, **options)
        assert on.token_ids == off.token_ids
        assert [one.logprob for one in on.logprobs] == pytest.approx(
            [one.logprob for one in off.logprobs], abs=1e-4
        )
        assert (off.trips, off.guessed_tokens, off.accepted_tokens) == (NEW_TOKENS, 0, 0)
        assert on.accepted_tokens <= on.guessed_tokens
        assert on.trips + on.accepted_tokens == NEW_TOKENS


async def test_a_stop_string_among_the_guesses_ends_the_text_before_it_and_the_chat_goes_on_behind(
    wide_client: AsyncSwarm, references: References
) -> None:
    """What was accepted behind it is no part of the answer, and of no use to the next turn."""
    said = await generate(wide_client, PROMPT, NEW_TOKENS, speculation="off")
    begin, folder = len(said.text) // 2, bundled_folder()
    stop = said.text[begin : begin + 6]
    at = said.text.index(stop)
    for predicted in (list(said.token_ids), mostly_right(said.token_ids, wrong_every=9)):
        stopped = await generate(wide_client, PROMPT, NEW_TOKENS, prediction=predicted, stop=[stop])
        assert (stopped.text, stopped.finish_reason, stopped.stop_string) == (said.text[:at], "stop", stop)
        assert stopped.token_ids == said.token_ids[: len(stopped.token_ids)]
    chat = (*references.ids(folder, PROMPT), *stopped.token_ids, *references.ids(folder, "\nROMEO:\n"))
    again = await generate(wide_client, chat, 12)
    assert again.token_ids == references.greedy(folder, chat, 12)


@pytest.mark.full
async def test_guesses_fill_the_context_to_its_last_token(
    wide_client: AsyncSwarm, references: References
) -> None:
    folder, left = bundled_folder(), 24
    prompt = (references.ids(folder, PROMPT) * CONTEXT)[: CONTEXT - left]
    expected = references.greedy(folder, prompt, left)
    predicted = [*mostly_right(expected, wrong_every=7), *expected]
    full = await generate(wide_client, prompt, 200, prediction=predicted)
    assert (full.token_ids, full.finish_reason) == (expected, "length")
    assert full.trips + full.accepted_tokens == left


@pytest.mark.parametrize("tokens", [2, *(pytest.param(one, marks=pytest.mark.full) for one in (1, 3))])
async def test_no_more_tokens_come_than_were_asked_for_whatever_is_guessed(
    tokens: int, wide_client: AsyncSwarm
) -> None:
    said = await generate(wide_client, PROMPT, 20, speculation="off")
    asked = await generate(wide_client, PROMPT, tokens, prediction=list(said.token_ids))
    assert (asked.token_ids, asked.finish_reason) == (said.token_ids[:tokens], "length")
    assert asked.guessed_tokens <= max(0, tokens - 2)


async def test_a_stream_that_is_given_up_in_mid_trip_leaves_its_beginning_to_the_next(
    wide_swarm: LocalSwarm, wide_client: AsyncSwarm, references: References
) -> None:
    """The next prompt begins with what had come, of which hops computed some and refused some."""
    folder, peers = bundled_folder(), {peer.name: peer for peer in wide_swarm.peers}
    prompt = references.ids(
        folder, "ROMEO:\nBut, soft! what light through yonder window breaks?\n\nJULIET:\n"
    )
    said = references.greedy(folder, prompt, NEW_TOKENS)
    with circuit_of(wide_client, {peers["front"]: (0, 6), peers["back"]: (6, 12)}):
        predicted = mostly_right(said, wrong_every=5)
        pieces = wide_client.stream_events(
            prompt, max_new_tokens=NEW_TOKENS, prediction=predicted, timeout_s=FORMATION_TIMEOUT_S
        )
        got: list[int] = []
        while len(got) < NEW_TOKENS // 2:
            got += (await anext(pieces)).token_ids
        await pieces.aclose()
        assert tuple(got) == said[: len(got)]
        chat = (*prompt, *got, *references.ids(folder, "\nROMEO:\n"))
        again = await generate(wide_client, chat, 12)
        assert again.token_ids == references.greedy(folder, chat, 12)
        assert again.cached_tokens == (len(prompt) + len(got) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


async def test_a_prediction_may_be_text_and_guesses_are_told_of(wide_client: AsyncSwarm) -> None:
    said = await generate(wide_client, PROMPT, NEW_TOKENS, speculation="off")
    predicted = await generate(wide_client, PROMPT, NEW_TOKENS, prediction=said.text)
    assert predicted.text == said.text
    assert predicted.trips + predicted.accepted_tokens == NEW_TOKENS
    assert predicted.tokens_per_trip == pytest.approx(NEW_TOKENS / predicted.trips)


async def test_what_heads_guess_with_is_announced_and_what_that_is_expected_to_bring_is_explained(
    wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    peers: Any = (await wide_client.snapshot())["peers"]
    assert {tuple(draft["name"] for draft in one["drafts"]) for one in peers} == {("lookup", "tables")}
    head = next(peer for peer in wide_swarm.peers if peer.name == "whole")
    with circuit_of(wide_client, {head: (0, 12)}):
        explanation = await wide_client.explain(PROMPT, max_new_tokens=NEW_TOKENS)
    [hop] = explanation.hops
    guesses_ms = sum(term.ms for term in hop.terms if term.name == "guesses")
    assert (guesses_ms < 0) == (explanation.predicted_tokens_per_trip > 1)
    assert explanation.predicted_trip_ms == pytest.approx(explanation.predicted_tpot_ms - guesses_ms)
    assert explanation.predicted_tpot_ms > 0
    assert bool(explanation.why_no_guesses) == (explanation.generation.guessed_tokens == 0)
    predicted = await wide_client.explain(
        PROMPT, max_new_tokens=NEW_TOKENS, prediction=explanation.generation.text
    )
    counts = [(one.guessed_tokens, one.accepted_tokens) for one in predicted.guess_sources]
    generation = predicted.generation
    assert [sum(one) for one in zip(*counts, strict=True)] == [
        generation.guessed_tokens,
        generation.accepted_tokens,
    ]
    off = await wide_client.explain(PROMPT, max_new_tokens=2, speculation="off")
    assert off.why_no_guesses == "speculation is off"


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
                assert on.accepted_tokens <= on.guessed_tokens
                assert on.trips + on.accepted_tokens == NEW_TOKENS


@pytest.mark.full
@pytest.mark.parametrize("draft", [f"{BUNDLED}-draft", BUNDLED])
async def test_with_a_draft_model_and_full_caches_a_peer_takes_no_more_than_it_may(draft: str) -> None:
    """Weights, KV caches, work space and the draft's together; the interpreter and its libraries are beside them."""
    memory_bytes = 600 * 1000 * 1000
    async with ForkedSwarm() as swarm:
        peer = await swarm.join("head", "--model", BUNDLED, "--memory", "600MB", "--draft", draft)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            await generate(client, PROMPT, NEW_TOKENS)
            most = 0
            for _ in range(2):
                prompts = [[one, *range(2, CONTEXT - NEW_TOKENS - 1)] for one in range(2, 26)]
                asked = [asyncio.create_task(generate(client, prompt, NEW_TOKENS)) for prompt in prompts]
                waiting = set(asked)
                while waiting:
                    _, waiting = await asyncio.wait(waiting, timeout=0.5)
                    most = max(most, resident_bytes(peer))
                assert all(len(one.result().token_ids) == NEW_TOKENS for one in asked)
    assert most < memory_bytes + BEYOND_BYTES
