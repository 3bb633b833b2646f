"""Tools in chat completions, asked by the official openai client over a scripted swarm."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from support.swarms.fake_swarm import DEADLINE_S, MODEL, FakeSwarm, gateway

from molink.client.text.demanded_calls import DemandedCalls

ASKED = [{"role": "user", "content": "What is the weather in Bern?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'
WORDS = ("I look", " it up. ", CALL[:20], CALL[20:], "\n", CALL)


@pytest.fixture
def swarm() -> FakeSwarm:
    return FakeSwarm(words=WORDS)


@pytest.fixture
def client(swarm: FakeSwarm) -> Iterator[OpenAI]:
    with (
        gateway(swarm) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made,
    ):
        yield made


def ask(client: OpenAI, **more: Any) -> Any:  # noqa: ANN401 - of the client's own types
    return client.chat.completions.create(model=MODEL, messages=ASKED, tools=[WEATHER], **more)


def test_what_the_model_calls_is_in_the_answer(client: OpenAI, swarm: FakeSwarm) -> None:
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look it up. \n"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "weather"]
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [
        {"city": "Bern"}
    ] * 2
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert swarm.tools == [(WEATHER,)]


def test_a_stream_has_the_same_calls(client: OpenAI) -> None:
    chunks = [chunk.choices[0] for chunk in ask(client, stream=True)]
    calls = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [
        (0, "weather", '{"city": "Bern"}'),
        (1, "weather", '{"city": "Bern"}'),
    ]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I look it up. \n"
    assert chunks[-1].finish_reason == "tool_calls"


def test_without_parallel_calls_there_is_one(client: OpenAI) -> None:
    assert len(ask(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    chunks = [chunk.choices[0] for chunk in ask(client, parallel_tool_calls=False, stream=True)]
    assert sum(len(chunk.delta.tool_calls or ()) for chunk in chunks) == 1


@pytest.mark.parametrize(
    ("choice", "more", "demanded"),
    [
        ("required", {}, DemandedCalls()),
        ("required", {"parallel_tool_calls": False}, DemandedCalls(is_single=True)),
        ({"type": "function", "function": {"name": "weather"}}, {}, DemandedCalls("weather", is_single=True)),
        ("auto", {}, None),
        ("none", {}, None),
    ],
)
def test_calls_are_demanded_of_the_swarm(
    client: OpenAI, swarm: FakeSwarm, choice: object, more: dict[str, bool], demanded: DemandedCalls | None
) -> None:
    ask(client, tool_choice=choice, **more)
    assert swarm.demanded == [demanded]


def test_a_tool_that_is_not_there_cannot_be_chosen(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="'fly', which is not among the tools") as refused:
        ask(client, tool_choice={"type": "function", "function": {"name": "fly"}})
    assert refused.value.param == "tool_choice"


def test_a_model_that_is_not_to_call_is_told_of_no_tools(client: OpenAI, swarm: FakeSwarm) -> None:
    choice = ask(client, tool_choice="none").choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == "".join(WORDS)
    assert swarm.tools == [()]


def test_earlier_calls_and_their_answers_reach_the_template(client: OpenAI, swarm: FakeSwarm) -> None:
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
    }
    client.chat.completions.create(
        model=MODEL,
        messages=[
            *ASKED,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
        ],
        tools=[WEATHER],
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    [(messages, _)] = swarm.calls
    assert messages == [
        *ASKED,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Bern"}},
                }
            ],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
    ]
    assert swarm.template_variables == [{"enable_thinking": False}]
