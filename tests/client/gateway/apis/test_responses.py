"""OpenAI's Responses API, asked by the official openai client over a scripted swarm."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import BadRequestError, OpenAI
from support.swarms.fake_swarm import DEADLINE_S, MODEL, FakeSwarm, error_of, gateway

from molink.client.errors import SwarmUnavailable
from molink.shards.grammar import Grammar

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call>'


@pytest.fixture
def client(swarm: FakeSwarm) -> Iterator[OpenAI]:
    with (
        gateway(swarm) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S) as made,
    ):
        yield made


def test_a_response_has_text_and_usage(client: OpenAI, swarm: FakeSwarm) -> None:
    swarm.cached_tokens = 2
    response = client.responses.create(
        model=MODEL, input="Speak!", instructions="Be brief.", max_output_tokens=9, temperature=0.5, top_p=0.9
    )
    assert response.output_text == "But soft!"
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        5,
        3,
        8,
    )
    assert response.usage.input_tokens_details.cached_tokens == 2
    [(messages, params)] = swarm.calls
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Speak!"},
    ]
    assert (params.max_new_tokens, params.temperature, params.top_p) == (9, 0.5, 0.9)


def test_an_answer_that_was_cut_off_is_incomplete(client: OpenAI, swarm: FakeSwarm) -> None:
    swarm.finish_reason = "length"
    response = client.responses.create(model=MODEL, input="Speak!")
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in response.output if item.type == "message"] == ["incomplete"]
    with client.responses.stream(model=MODEL, input="Speak!") as stream:
        *_, done, _ = stream
    assert done.type == "response.output_item.done"
    assert done.item.type == "message"
    assert done.item.status == "incomplete"


def test_events_come_in_order_and_make_up_the_whole(client: OpenAI, swarm: FakeSwarm) -> None:
    swarm.words = ("But", " soft. ", CALL)
    with client.responses.stream(model=MODEL, input="Speak!", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert final.output_text == "But soft. "
    message, call = final.output
    assert message.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')


def test_text_of_a_schema_is_drawn_by_it(client: OpenAI, swarm: FakeSwarm) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    form: Any = {"type": "json_schema", "name": "place", "schema": schema, "strict": True}
    response = client.responses.create(model=MODEL, input="Speak!", text={"format": form})
    client.responses.create(model=MODEL, input="Speak!", text={"format": {"type": "json_object"}})
    client.responses.create(model=MODEL, input="Speak!", text={"format": {"type": "text"}})
    assert [params.grammar for _, params in swarm.calls] == [
        Grammar.json_schema(schema),
        Grammar.json_object(),
        None,
    ]
    assert response.text is not None
    assert response.text.format is not None
    assert response.text.format.type == "json_schema"


def test_an_answer_without_a_word_is_an_empty_message(client: OpenAI, swarm: FakeSwarm) -> None:
    swarm.words = ("",)
    assert client.responses.create(model=MODEL, input="Speak!").output_text == ""
    with client.responses.stream(model=MODEL, input="Speak!") as stream:
        assert stream.get_final_response().output_text == ""


def test_a_conversation_of_items_becomes_one_of_messages(client: OpenAI, swarm: FakeSwarm) -> None:
    client.responses.create(
        model=MODEL,
        tools=[TOOL],
        input=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "The weather"},
                    {"type": "input_text", "text": "in Bern?"},
                ],
            },
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "rain"},
        ],
    )
    [(messages, _)] = swarm.calls
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool"]  # type: ignore[attr-defined]
    assert messages[1]["content"] == "The weather\nin Bern?"  # type: ignore[index]
    assert [call["id"] for call in messages[2]["tool_calls"]] == ["a", "b"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("more", "parameter"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"input": []}, "input"),
        ({"input": [{"type": "file_search_call"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"title": "a" * 70_000}}}},
            "text.format",
        ),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused_by_name(
    more: dict[str, Any], parameter: str, refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    answer = refusing.post("/v1/responses", json={"model": MODEL, "input": "Speak!"} | more)
    assert answer.status_code == 400, answer.text
    assert str(error_of(answer)["param"]).startswith(parameter)
    assert unasked.calls == []


def test_what_is_not_kept_may_be_asked_not_to_be_kept(http: httpx.Client) -> None:
    answer = http.post("/v1/responses", json={"model": MODEL, "input": "Speak!", "store": False})
    assert answer.json()["store"] is False


def test_a_stream_that_cannot_be_finished_says_why(client: OpenAI, swarm: FakeSwarm) -> None:
    swarm.error, swarm.fails_at = SwarmUnavailable("nobody is there"), 1
    *_, last = client.responses.create(model=MODEL, input="Speak!", stream=True)
    assert last.type == "response.failed"
    assert last.response.error is not None
    assert last.response.error.code == "swarm_unavailable"


def test_an_unknown_model_is_named(client: OpenAI) -> None:
    with pytest.raises(Exception, match="serves molink/tiny-shakespeare") as raised:
        client.responses.create(model="gpt-4", input="Speak!")
    assert not isinstance(raised.value, BadRequestError)
