"""Anthropic's Messages API, asked by the official anthropic client over a scripted swarm."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from support.swarms.fake_swarm import DEADLINE_S, MODEL, FakeSwarm, gateway

from molink.client.api.generation import FinishReason
from molink.client.errors import SwarmUnavailable
from molink.client.text.demanded_calls import DemandedCalls

ASKED: Any = [{"role": "user", "content": "What is the weather in Bern?"}]
TOOL: Any = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
def client(swarm: FakeSwarm) -> Iterator[Anthropic]:
    with (
        gateway(swarm) as url,
        Anthropic(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as made,
    ):
        yield made


def test_a_message_has_text_usage_and_a_reason_to_end(client: Anthropic, swarm: FakeSwarm) -> None:
    swarm.cached_tokens = 2
    message = client.messages.create(
        model=MODEL,
        max_tokens=9,
        system="Be brief.",
        messages=ASKED,
        stop_sequences=["END"],
        extra_body={"top_k": 4},
    )
    assert [(block.type, block.text) for block in message.content if block.type == "text"] == [
        ("text", "But soft!")
    ]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "end_turn", None)
    assert (
        message.usage.input_tokens,
        message.usage.cache_read_input_tokens,
        message.usage.output_tokens,
    ) == (3, 2, 3)
    [(messages, params)] = swarm.calls
    assert messages == [{"role": "system", "content": "Be brief."}, *ASKED]
    assert (params.max_new_tokens, params.stop, params.top_k, params.temperature) == (9, ("END",), 4, 1.0)


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [("length", None, "max_tokens"), ("stop", "END", "stop_sequence"), ("stop", None, "end_turn")],
)
def test_why_it_ended_is_said(
    client: Anthropic, swarm: FakeSwarm, finish: FinishReason, stop: str | None, reason: str
) -> None:
    swarm.finish_reason, swarm.stop_string = finish, stop
    message = client.messages.create(model=MODEL, max_tokens=9, messages=ASKED)
    assert (message.stop_reason, message.stop_sequence) == (reason, stop)


def test_a_stream_makes_up_the_same_message(client: Anthropic, swarm: FakeSwarm) -> None:
    swarm.words = ("I look. ", CALL, CALL)
    with client.messages.stream(model=MODEL, max_tokens=9, messages=ASKED, tools=[TOOL]) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    whole = client.messages.create(model=MODEL, max_tokens=9, messages=ASKED, tools=[TOOL])
    assert text == "I look. "
    for one in (message, whole):
        assert [block.type for block in one.content] == ["text", "tool_use", "tool_use"]
        assert one.stop_reason == "tool_use"
        assert [block.input for block in one.content if block.type == "tool_use"] == [{"city": "Bern"}] * 2


def test_one_call_at_most_where_that_is_asked(client: Anthropic, swarm: FakeSwarm) -> None:
    swarm.words = (CALL, CALL)
    message = client.messages.create(
        model=MODEL,
        max_tokens=9,
        messages=ASKED,
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    assert [block.type for block in message.content] == ["tool_use"]


@pytest.mark.parametrize(
    ("choice", "demanded"),
    [
        ({"type": "any"}, DemandedCalls()),
        ({"type": "any", "disable_parallel_tool_use": True}, DemandedCalls(is_single=True)),
        ({"type": "tool", "name": TOOL["name"]}, DemandedCalls(TOOL["name"], is_single=True)),
    ],
)
def test_calls_are_demanded_of_the_swarm(
    client: Anthropic,
    swarm: FakeSwarm,
    choice: Any,  # noqa: ANN401 - of the client
    demanded: DemandedCalls,
) -> None:
    swarm.words = (CALL,)
    client.messages.create(model=MODEL, max_tokens=9, messages=ASKED, tools=[TOOL], tool_choice=choice)
    assert swarm.demanded == [demanded]


def test_blocks_become_messages_of_the_template(client: Anthropic, swarm: FakeSwarm) -> None:
    client.messages.create(
        model=MODEL,
        max_tokens=9,
        tools=[TOOL],
        messages=[
            *ASKED,
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bern"}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "a",
                        "content": [{"type": "text", "text": "rain"}],
                    },
                    {"type": "tool_result", "tool_use_id": "b", "content": "no such call", "is_error": True},
                    {"type": "text", "text": "Thanks."},
                ],
            },
        ],
    )
    [(messages, _)] = swarm.calls
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]  # type: ignore[attr-defined]
    assert [message["content"] for message in messages][2:] == ["rain", "Error: no such call", "Thanks."]  # type: ignore[attr-defined]
    assert swarm.tools[0][0]["function"]["name"] == "weather"


def test_tokens_are_counted_without_generating(client: Anthropic, swarm: FakeSwarm) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=ASKED, system="Be brief.", tools=[TOOL])
    assert counted.input_tokens == 18
    assert swarm.calls == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.5}, "temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"stop_sequences": ["x"] * 17}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}
                ]
            },
            "content",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_is_named_in_the_shape_of_the_api(
    more: dict[str, Any], named: str, refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    answer = refusing.post("/v1/messages", json={"model": MODEL, "max_tokens": 9, "messages": ASKED} | more)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]
    assert unasked.calls == []


def test_failures_are_the_clients_own_errors(client: Anthropic, swarm: FakeSwarm) -> None:
    with pytest.raises(anthropic.NotFoundError, match="serves"):
        client.messages.create(model="claude", max_tokens=9, messages=ASKED)
    swarm.error = SwarmUnavailable("full", busy=True)
    with pytest.raises(anthropic.RateLimitError):
        client.messages.create(model=MODEL, max_tokens=9, messages=ASKED)
    swarm.error, swarm.fails_at = SwarmUnavailable("gone"), 1
    with (
        pytest.raises(anthropic.APIStatusError),
        client.messages.stream(model=MODEL, max_tokens=9, messages=ASKED) as stream,
    ):
        list(stream)
