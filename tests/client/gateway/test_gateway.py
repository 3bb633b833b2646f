"""The gateway over a scripted swarm, asked by the official openai client through a real socket."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
from openai import NotFoundError, OpenAI
from support.swarms.fake_swarm import DEADLINE_S, MODEL, FakeSwarm, gateway

from molink.shards.grammar import Grammar

CHAT = [{"role": "user", "content": "Speak!"}]


@pytest.fixture
def client(swarm: FakeSwarm) -> Iterator[OpenAI]:
    with (
        gateway(swarm) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made,
    ):
        yield made


def test_a_completion_has_text_usage_and_a_reason_to_end(client: OpenAI, swarm: FakeSwarm) -> None:
    answer = client.completions.create(model=MODEL, prompt="ROMEO:", max_tokens=7, stop=["\n", "END"], seed=3)

    assert answer.choices[0].text == "But soft!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
        5,
        3,
        8,
    )
    [(prompt, params)] = swarm.calls
    assert prompt == "ROMEO:"
    assert (params.max_new_tokens, params.stop, params.seed, params.temperature) == (7, ("\n", "END"), 3, 1.0)


def test_every_sampling_parameter_reaches_the_swarm(client: OpenAI, swarm: FakeSwarm) -> None:
    client.completions.create(
        model=MODEL,
        prompt=[4, 5, 6],
        temperature=0,
        top_p=0.9,
        logit_bias={"7": -100, "8": 2.5},
        logprobs=2,
        stop="x",
        user="someone",
        extra_body={"top_k": 40, "ignore_eos": True, "stop_token_ids": [9]},
    )

    [(prompt, params)] = swarm.calls
    assert prompt == [4, 5, 6]
    assert (params.temperature, params.top_p, params.top_k, params.ignore_eos) == (0.0, 0.9, 40, True)
    assert params.logit_bias == ((7, -100.0), (8, 2.5))
    assert (params.logprobs, params.stop, params.stop_token_ids) == (2, ("x",), (9,))
    assert params.max_new_tokens == 16


def test_several_prompts_and_choices_are_numbered_prompt_by_prompt(client: OpenAI, swarm: FakeSwarm) -> None:
    answer = client.completions.create(model=MODEL, prompt=["one", "two"], n=2, seed=2**63 - 1, echo=True)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["one", "one", "two", "two"]
    assert all(choice.text[3:] == "But soft!" for choice in answer.choices)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 12)
    assert sorted((prompt, params.seed) for prompt, params in swarm.calls) == [
        ("one", 2**63 - 1),
        ("one", 2**63),
        ("two", 2**63 - 1),
        ("two", 2**63),
    ]


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: OpenAI) -> None:
    chunks = list(client.completions.create(model=MODEL, prompt="ROMEO:", stream=True, echo=True))

    assert [chunk.choices[0].text for chunk in chunks] == ["ROMEO:", "But", " soft", "!"]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_a_prompt_that_is_echoed_with_logprobs_has_its_own_and_maybe_nothing_behind_it(
    client: OpenAI, swarm: FakeSwarm
) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": [7, 8], "echo": True, "logprobs": 1}
    both = client.completions.create(**asked).choices[0]
    alone = client.completions.create(**asked, max_tokens=0)

    assert (both.text, alone.choices[0].text) == ("<7><8>But soft!", "<7><8>")
    assert both.logprobs is not None
    assert both.logprobs.tokens == ["the", " secret", "But", " soft", "!"]
    assert both.logprobs.token_logprobs == [None, -1.5, -0.5, -0.5, -0.5]
    assert both.logprobs.text_offset == [0, 3, 10, 13, 18]
    told = alone.choices[0].logprobs
    assert told is not None
    assert (told.tokens, told.token_logprobs) == (["the", " secret"], [None, -1.5])
    assert told.top_logprobs == [None, {"likely0": -0.25, " secret": -1.5}]
    assert alone.choices[0].finish_reason == "length"
    assert alone.usage is not None
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (5, 0)
    assert [(params.prompt_logprobs, params.max_new_tokens) for _, params in swarm.calls] == [(1, 16), (1, 1)]


@pytest.mark.parametrize("max_tokens", [0, 16])
def test_a_scored_prompt_is_streamed_as_it_comes_whole(client: OpenAI, max_tokens: int) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "prompt": "the secret", "echo": True, "logprobs": 2, "max_tokens": max_tokens
    }  # fmt: skip
    whole = client.completions.create(**asked).choices[0]
    pieces = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]

    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == whole.finish_reason
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(piece.logprobs, name) for piece in pieces if piece.logprobs is not None]
        assert list(chain.from_iterable(parts)) == getattr(whole.logprobs, name)


def test_completion_logprobs_have_tokens_alternatives_and_offsets(client: OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="x", logprobs=2).choices[0].logprobs
    streamed = [
        chunk.choices[0].logprobs
        for chunk in client.completions.create(model=MODEL, prompt="x", logprobs=2, stream=True)
    ]

    assert whole is not None
    assert whole.tokens == ["But", " soft", "!"]
    assert whole.token_logprobs == [-0.5] * 3
    assert whole.text_offset == [0, 3, 8]
    assert whole.top_logprobs is not None
    assert whole.top_logprobs[2] == {"!": -0.5, "!0": -1.0, "!1": -2.0}
    assert [piece.text_offset for piece in streamed if piece is not None] == [[0], [3], [8]]


def test_a_chat_completion_has_a_message_and_usage(client: OpenAI, swarm: FakeSwarm) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}],
                "name": "A",
            },
            {"role": "assistant", "content": "three"},
        ],
        max_tokens=9,
        temperature=0.5,
    )

    message = answer.choices[0].message
    assert (message.role, message.content, answer.choices[0].finish_reason) == (
        "assistant",
        "But soft!",
        "stop",
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 8
    [(messages, params)] = swarm.calls
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo", "name": "A"},
        {"role": "assistant", "content": "three"},
    ]
    assert (params.max_new_tokens, params.temperature) == (9, 0.5)


def test_max_completion_tokens_is_the_newer_name_of_max_tokens(client: OpenAI, swarm: FakeSwarm) -> None:
    client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=9, max_completion_tokens=4)
    client.chat.completions.create(model=MODEL, messages=CHAT)

    assert [params.max_new_tokens for _, params in swarm.calls] == [4, 512]


def test_penalties_and_the_parameters_of_other_servers_reach_the_swarm(
    client: OpenAI, swarm: FakeSwarm
) -> None:
    others = {"min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3}
    client.chat.completions.create(
        model=MODEL, messages=CHAT, frequency_penalty=0.5, presence_penalty=-0.5, extra_body=others
    )
    client.completions.create(model=MODEL, prompt="A", frequency_penalty=1.5, extra_body=others)

    (_, chat), (_, plain) = swarm.calls
    assert (chat.frequency_penalty, chat.presence_penalty, plain.frequency_penalty) == (0.5, -0.5, 1.5)
    for params in (chat, plain):
        assert (params.min_p, params.repetition_penalty, params.min_tokens) == (0.1, 1.2, 3)


def test_a_prediction_reaches_every_choice_and_usage_says_what_was_guessed(
    client: OpenAI, swarm: FakeSwarm
) -> None:
    swarm.guessed_tokens, swarm.accepted_tokens = 5, 2
    parts = [{"type": "text", "text": "But soft"}, {"type": "text", "text": "!"}]
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        n=2,
        prediction={"type": "content", "content": parts},  # type: ignore[typeddict-item]
    )
    client.chat.completions.create(
        model=MODEL, messages=CHAT, prediction={"type": "content", "content": "But"}
    )
    client.chat.completions.create(model=MODEL, messages=CHAT)

    assert [one.get("prediction") for one in swarm.hints] == ["But soft!", "But soft!", "But", None]
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 4
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 6


def test_a_users_generations_have_a_scope_that_says_nothing_of_him(client: OpenAI, swarm: FakeSwarm) -> None:
    client.chat.completions.create(model=MODEL, messages=CHAT)
    list(client.chat.completions.create(model=MODEL, messages=CHAT, stream=True))

    assert len(set(swarm.scopes)) == 1
    assert len(swarm.scopes[0]) == 16


def test_grammars_reach_the_swarm_as_openai_and_as_vllm_have_them(client: OpenAI, swarm: FakeSwarm) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "a", "schema": schema, "strict": True},
        },
    )
    client.chat.completions.create(model=MODEL, messages=CHAT, response_format={"type": "json_object"})
    for asked in ({"json": schema}, {"regex": "a+"}, {"grammar": 'start: "a"'}, {"json_object": True}):
        client.completions.create(model=MODEL, prompt="A", extra_body={"structured_outputs": asked})

    assert [params.grammar for _, params in swarm.calls] == [
        Grammar.json_schema(schema),
        Grammar.json_object(),
        Grammar.json_schema(schema),
        Grammar.regex("a+"),
        Grammar.lark('start: "a"'),
        Grammar.json_object(),
    ]


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_usage(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
        )
    )
    *pieces, last = chunks

    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in pieces) == "But soft!"
    assert [chunk.choices[0].finish_reason for chunk in pieces] == [None] * 4 + ["stop"]
    assert all(chunk.usage is None for chunk in pieces)
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (5, 3)


def test_streamed_choices_are_told_apart_by_their_index(client: OpenAI) -> None:
    texts = ["", "", ""]
    ends = 0
    for chunk in client.chat.completions.create(model=MODEL, messages=CHAT, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        ends += chunk.choices[0].finish_reason == "stop"

    assert texts == ["But soft!"] * 3
    assert ends == 3


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_have_bytes_and_alternatives(client: OpenAI, stream: bool) -> None:
    asked = {"model": MODEL, "messages": CHAT, "logprobs": True, "top_logprobs": 1}
    if stream:
        found = [
            scored
            for chunk in client.chat.completions.create(**asked, stream=True)
            for scored in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else None) or []
        ]
    else:
        logprobs = client.chat.completions.create(**asked).choices[0].logprobs
        assert logprobs is not None
        found = logprobs.content or []

    assert [scored.token for scored in found] == ["But", " soft", "!"]
    assert [scored.logprob for scored in found] == [-0.5] * 3
    assert found[2].bytes == [33]
    assert [(top.token, top.logprob) for top in found[2].top_logprobs] == [("!0", -1.0)]


def test_logprobs_without_alternatives_ask_for_none(client: OpenAI, swarm: FakeSwarm) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, logprobs=True)

    assert swarm.calls[0][1].logprobs == 0
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


def test_the_model_is_listed_and_found_by_name(client: OpenAI) -> None:
    [listed] = client.models.list().data

    assert listed.id == MODEL
    assert client.models.retrieve(MODEL) == listed
    with pytest.raises(NotFoundError, match="serves molink/tiny-shakespeare"):
        client.models.retrieve("gpt-4")


def test_characters_beyond_ascii_arrive_as_they_are(client: OpenAI, swarm: FakeSwarm) -> None:
    swarm.words = ("Dänemark ", "☃", "\u2028", "🙂")
    whole = client.completions.create(model=MODEL, prompt="x").choices[0].text
    streamed = "".join(
        chunk.choices[0].text for chunk in client.completions.create(model=MODEL, prompt="x", stream=True)
    )

    assert whole == streamed == "Dänemark ☃\u2028🙂"
