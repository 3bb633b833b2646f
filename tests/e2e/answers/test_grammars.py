"""Generated text is of the grammar that was asked for, on any circuit, beside others, and after the tail was lost."""

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator
from support.chaos.losses import lose_in_decode
from support.models.random_schemas import random_schema
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, circuit_of, generate

from molink.client.api.generation import Generation
from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import InvalidRequest, NoCircuit
from molink.client.local.local_swarm import LocalPeer, LocalSwarm
from molink.client.text.demanded_calls import DemandedCalls, grammar_of_calls
from molink.client.text.tool_calls import ToolCallStream, form_of, types_of
from molink.dht.records.records import PeerView
from molink.shards.grammar import Grammar
from molink.shards.spec import PENALTIES

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

PROMPT = "KING RICHARD III:\n"
MOST_TOKENS = 400
AT_ONCE = 8
CIRCUITS = {
    1: {"whole": (0, 12)},
    2: {"front": (0, 6), "back": (6, 12)},
    3: {"front": (0, 5), "middle": (5, 8), "back": (8, 12)},
    4: {"front": (0, 3), "middle": (3, 6), "whole": (6, 8), "back": (8, 12)},
}
ROSTER = r'(\{"name": "[A-Z][a-z]{2,7}", "house": "(York|Lancaster)", "age": [1-9][0-9]\}\n){3}'
"""Most of its text is forced."""
LINES = Grammar.regex(r"([A-Z][a-z]{2,8}( [a-z]{1,8}){3,8}[.!?]\n){40}")
"""Long enough for a peer to be lost in it."""


def circuit(swarm: LocalSwarm, hops: int) -> dict[LocalPeer, tuple[int, int]]:
    peers = {peer.name: peer for peer in swarm.peers}
    return {peers[name]: span for name, span in CIRCUITS[hops].items()}


def check_document(generation: Generation, schema: dict[str, object]) -> None:
    assert generation.finish_reason == "stop", generation.text
    Draft202012Validator(schema).validate(json.loads(generation.text))


async def answer(client: AsyncSwarm, seed: int) -> tuple[Generation, dict[str, object]]:
    schema = random_schema(seed)
    asked = {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}
    return (
        await generate(client, PROMPT, MOST_TOKENS, response_format=asked, temperature=1.0, seed=seed),
        schema,
    )


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(8, 200, 8))])
async def test_every_answer_is_json_that_is_valid_for_its_schema(first: int, wide_client: AsyncSwarm) -> None:
    answers = await asyncio.gather(*(answer(wide_client, seed) for seed in range(first, first + AT_ONCE)))
    for generation, schema in answers:
        check_document(generation, schema)


async def test_a_grammar_gives_the_same_tokens_on_one_to_four_peers(
    wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    found = []
    for hops in CIRCUITS:
        with circuit_of(wide_client, circuit(wide_swarm, hops)):
            generation, schema = await answer(wide_client, 3)
        assert len(generation.circuit.hops) == hops
        check_document(generation, schema)
        found.append(generation.token_ids)
    assert found == found[:1] * len(CIRCUITS)


async def test_tokens_that_a_grammar_leaves_little_choice_of_are_guessed_and_are_the_same(
    wide_swarm: LocalSwarm, wide_client: AsyncSwarm
) -> None:
    asked, guessed, accepted = Grammar.regex(ROSTER), 0, 0
    for hops in (1, 3):
        for options in ({}, {"temperature": 1.0, "seed": 4, "logprobs": 2, "frequency_penalty": 0.5}):
            with circuit_of(wide_client, circuit(wide_swarm, hops)):
                off, on = [
                    await generate(wide_client, PROMPT, MOST_TOKENS, grammar=asked, **options, **how)
                    for how in ({"speculation": "off"}, {})
                ]
            assert re.fullmatch(ROSTER, on.text)
            assert on.token_ids == off.token_ids
            assert [one.logprob for one in on.logprobs] == pytest.approx(
                [one.logprob for one in off.logprobs], abs=1e-4
            )
            assert (off.trips, off.guessed_tokens) == (len(off.token_ids), 0)
            assert on.trips + on.accepted_tokens == len(on.token_ids)
            guessed, accepted = guessed + on.guessed_tokens, accepted + on.accepted_tokens
    assert 0 < accepted < guessed


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (
            Grammar.regex("(to be|not to be)( or (to be|not to be)){2}"),
            "(to be|not to be)( or (to be|not to be)){2}",
        ),
        (
            Grammar.lark('start: name ": " /[a-z]{3,9}/ "!"\nname: "KING" | "QUEEN"'),
            "(KING|QUEEN): [a-z]{3,9}!",
        ),
    ],
    ids=["regex", "lark"],
)
async def test_text_is_of_the_regular_expression_or_the_grammar(
    grammar: Grammar, pattern: str, wide_client: AsyncSwarm
) -> None:
    generation = await generate(wide_client, PROMPT, 100, grammar=grammar, min_tokens=90, logprobs=2)
    assert generation.finish_reason == "stop"
    assert re.fullmatch(pattern, generation.text)
    assert len(generation.logprobs) == len(generation.token_ids)


async def test_where_a_call_is_demanded_the_answer_is_one(wide_client: AsyncSwarm) -> None:
    template = '{{ tools }}<tool_call>{"name": ..., "arguments": ...}</tool_call>'
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
    city |= {"additionalProperties": False}
    tools = ({"type": "function", "function": {"name": "weather", "parameters": city}},)
    form = form_of(template)
    assert form is not None
    grammar = grammar_of_calls(
        DemandedCalls("weather", is_single=True), tools, form, template, lambda _: None
    )
    generation = await generate(wide_client, PROMPT, MOST_TOKENS, grammar=grammar)
    text, [call] = ToolCallStream(form, types_of(tools)).push(generation.text)
    assert (text, call.name, generation.finish_reason) == ("", "weather", "stop")
    Draft202012Validator(city).validate(json.loads(call.arguments))


async def test_sessions_without_a_grammar_have_the_tokens_that_they_have_alone(
    wide_client: AsyncSwarm,
) -> None:
    settings = {"temperature": 0.9, "seed": 5}
    alone = await generate(wide_client, PROMPT, 60, **settings)
    bad = Grammar.lark(
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000)) + '\nr3000: "a"'
    )
    beside, (document, schema), failed = await asyncio.gather(
        generate(wide_client, PROMPT, 60, **settings),
        answer(wide_client, 4),
        generate(wide_client, PROMPT, 60, grammar=bad),
        return_exceptions=True,
    )
    assert isinstance(beside, Generation)
    assert beside.token_ids == alone.token_ids
    check_document(document, schema)
    assert isinstance(failed, InvalidRequest)
    assert failed.parameter == "grammar"
    assert "more than can be followed" in str(failed)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar.regex("(("), "unclosed group"),
        (Grammar.lark("start: nothing"), "unknown name"),
        (Grammar.json_schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    ],
    ids=["regex", "lark", "schema"],
)
async def test_a_grammar_that_is_not_understood_is_the_callers_mistake(
    grammar: Grammar, said: str, wide_client: AsyncSwarm
) -> None:
    with pytest.raises(InvalidRequest, match=said) as refused:
        await generate(wide_client, PROMPT, 20, grammar=grammar)
    assert refused.value.parameter == "grammar"


@contextmanager
def peers_without_the_extra(client: AsyncSwarm, names: set[str]) -> Iterator[None]:
    """While it is open the client takes these peers for ones that draw by no grammar."""
    connection, whole_view = client.connection, client.connection.snapshot

    def lesser(view: PeerView) -> PeerView:
        return replace(view, facts=replace(view.facts, sampling_abilities=(PENALTIES,)))

    def snapshot(model_hash: str | None = None) -> tuple[PeerView, ...]:
        return tuple(lesser(view) if view.facts.name in names else view for view in whole_view(model_hash))

    connection.snapshot = snapshot  # type: ignore[method-assign]
    try:
        yield
    finally:
        del connection.snapshot  # type: ignore[method-assign]


async def test_only_peers_with_the_extra_are_tails_and_without_any_the_error_says_what_is_missing(
    wide_client: AsyncSwarm,
) -> None:
    with peers_without_the_extra(wide_client, {"whole", "front", "middle"}):
        generation, schema = await answer(wide_client, 5)
        check_document(generation, schema)
        assert generation.circuit.hops[-1].name == "back"
    with (
        peers_without_the_extra(wide_client, {"whole", "front", "middle", "back"}),
        pytest.raises(NoCircuit, match=r"molink\[grammars\]"),
    ):
        await wide_client.generate(PROMPT, max_new_tokens=20, grammar=LINES, timeout_s=1.0)


@pytest.mark.parametrize(
    ("way", "at"),
    [
        ("killed", 1),
        pytest.param("killed", 0, marks=pytest.mark.full),
        pytest.param("leaves", 1, marks=pytest.mark.full),
    ],
)
async def test_the_tokens_are_the_same_after_a_peer_has_gone(way: str, at: int, anyio_backend: str) -> None:
    settings = {"grammar": LINES, "temperature": 0.9, "seed": 2}
    async with ForkedSwarm() as swarm:
        for span in ("0:6", "6:12"):
            for one in "ab":
                await swarm.join(f"{span}-{one}", "--model", BUNDLED, "--layers", span)
        async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
            expected = await generate(client, PROMPT, 160, **settings)
            generation, victim = await lose_in_decode(
                client, swarm, at, PROMPT, 160, leaves=way == "leaves", **settings
            )
    assert generation.token_ids == expected.token_ids
    assert victim.peer_id not in [hop.peer_id for hop in generation.circuit.hops]
    assert re.match(r"([A-Z][a-z]{2,8}( [a-z]{1,8}){3,8}[.!?]\n)+", generation.text)
