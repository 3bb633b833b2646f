"""What bodies hold that no answer in JSON could say again: refused before anything is computed."""

import json
from typing import Any

import httpx
import pytest
from support.swarms.fake_swarm import CHAT, MODEL, TEXT, FakeSwarm, error_of

from molink.client.gateway.apis.json_bodies import parsed_body
from molink.client.gateway.error_handlers import BodyRefused

JSON = {"content-type": "application/json"}
RESPONSES, CHATS, MESSAGES = "/v1/responses", "/v1/chat/completions", "/v1/messages"
HALF, NUMBER = "half of a character", "a number must be finite"
ASKED: dict[str, Any] = {"model": MODEL, "input": "hi"}
MESSAGE = CHAT | {"max_tokens": 9}


def tool(value: object) -> dict[str, Any]:
    function = {"type": "function", "name": "f", "parameters": {"a": [0, value]}}
    return {"tool_choice": "none", "tools": [function]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "parameter", "said"),
    [
        (RESPONSES, ASKED | {"metadata": {"a": "\ud800"}}, "metadata.a", HALF),
        (RESPONSES, ASKED | {"metadata": {"\udfff": "a"}}, "metadata", HALF),
        (
            RESPONSES,
            ASKED | {"text": {"format": {"type": "text", "description": "a\udc00b"}}},
            "text.format.description",
            HALF,
        ),
        (RESPONSES, ASKED | tool("\ud83d"), "tools.0.parameters.a.1", HALF),
        (RESPONSES, ASKED | tool(float("nan")), "tools.0.parameters.a.1", NUMBER),
        (RESPONSES, ASKED | tool(float("-inf")), "tools.0.parameters.a.1", NUMBER),
        (CHATS, CHAT | {"temperature": float("nan")}, "temperature", NUMBER),
        (CHATS, CHAT | {"response_format": {"type": "\ud800"}}, "response_format.type", HALF),
        ("/v1/completions", TEXT | {"prompt": "\ud800", "echo": True}, "prompt", HALF),
        ("/tokenize", {"prompt": "\ud800"}, "prompt", HALF),
        (CHATS, CHAT | {"\ud800": 1}, None, HALF),
        (CHATS, CHAT | {"x" * 65: "\ud800"}, None, HALF),
    ],
    ids=lambda value: str(value).encode(errors="replace").decode()[-40:],
)
def test_what_no_json_can_say_again_is_refused_by_saying_what_and_where(
    path: str,
    body: dict[str, Any],
    parameter: str | None,
    said: str,
    stream: bool,
    refusing: httpx.Client,
    unasked: FakeSwarm,
) -> None:
    answer = refusing.post(path, content=json.dumps(body | {"stream": stream}), headers=JSON)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", parameter)
    assert error["message"].startswith(f"{parameter or 'The body'}: ")
    assert said in error["message"]
    assert unasked.calls == []


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [("\ud800", "metadata.user_id: a text holds half"), (float("inf"), "metadata.user_id: a number")],
    ids=["half a character", "no finite number"],
)
def test_anthropics_api_refuses_it_in_its_own_shape(
    path: str, wrong: object, said: str, refusing: httpx.Client
) -> None:
    body = json.dumps(MESSAGE | {"metadata": {"user_id": wrong}})
    answer = refusing.post(path, content=body, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(said)


@pytest.mark.parametrize(
    "body",
    [
        '{"a": "\\ud83d\\ude42", "b": "\\\\ud800", "\\uD83D\\uDE42": "☃"}',
        '{"a": NaN, "a": 1.5e308}',
        "[-0.0, 1e-999, 12345678901234567890, true, null]",
        '"\\ud7ff \\ue000"',
    ],
)
def test_what_json_can_say_again_is_taken_as_it_is(body: str) -> None:
    value = parsed_body(b"\xef\xbb\xbf" + body.encode())
    assert value == json.loads(body)
    assert json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"a": 1e309}', "a: a number"),
        (b"[" * 50 + b"NaN" + b"]" * 50, "0.0.0.0.0.0.0.0: a number"),
        (b'{"a": "\\\\\\ud83d\\\\ude42"}', "a: a text holds half"),
        (b'"\\ude42\\ud83d"', "The body: a text holds half"),
        (b'{"a": "\xed\xa0\x80"}', "The body is not UTF-8 at byte 7"),
        ('{"a": 1}'.encode("utf-16"), "The body is not UTF-8 at byte 0"),
    ],
)
def test_it_is_found_however_it_is_written(body: bytes, said: str) -> None:
    with pytest.raises(BodyRefused) as refused:
        parsed_body(body)
    assert refused.value.detail.startswith(said)
