"""What the gateway refuses, what it ignores, and what it tells about itself."""

import json
import socket
import threading
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from support.swarms.fake_swarm import CHAT, DEADLINE_S, MODEL, TEXT, FakeSwarm, error_of

from molink.client.gateway.apis.openai import ChatRequest, CompletionRequest

WRONG: list[tuple[dict[str, Any], str]] = [
    (TEXT | {"prompt": ""}, "prompt"),
    (TEXT | {"prompt": []}, "prompt"),
    (TEXT | {"prompt": ["a", ""]}, "prompt"),
    (TEXT | {"prompt": [1.5]}, "prompt"),
    (TEXT | {"prompt": [-1]}, "prompt"),
    (TEXT | {"prompt": {"a": 1}}, "prompt"),
    ({"model": MODEL}, "prompt"),
    ({"prompt": "a"}, "model"),
    (TEXT | {"max_tokens": 0}, "max_tokens"),
    (TEXT | {"max_tokens": "many"}, "max_tokens"),
    (TEXT | {"n": 17}, "n"),
    (TEXT | {"prompt": ["a"] * 5, "n": 4}, "n"),
    (TEXT | {"temperature": -1}, "temperature"),
    (TEXT | {"temperature": 3}, "temperature"),
    (TEXT | {"top_p": 0}, "top_p"),
    (TEXT | {"seed": 2**64}, "seed"),
    (TEXT | {"logprobs": 6}, "logprobs"),
    (TEXT | {"logprobs": 1, "echo": True, "response_format": {"type": "json_object"}}, "echo"),
    (TEXT | {"logprobs": 1, "echo": True, "structured_outputs": {"regex": "a"}}, "echo"),
    (TEXT | {"best_of": 3}, "best_of"),
    (TEXT | {"stop": ["x"] * 17}, "stop"),
    (TEXT | {"logit_bias": {"a": 1}}, "logit_bias"),
    (TEXT | {"logit_bias": {"1": 1000}}, "logit_bias"),
    (TEXT | {"suffix": "end"}, "suffix"),
    (TEXT | {"stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT | {"frequency_penalty": 2.5}, "frequency_penalty"),
    (TEXT | {"presence_penalty": -3}, "presence_penalty"),
    (CHAT | {"repetition_penalty": 0}, "repetition_penalty"),
    (CHAT | {"min_p": 1.5}, "min_p"),
    (CHAT | {"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    (CHAT | {"prediction": {"type": "content", "content": "a" * 65_537}}, "prediction"),
    (CHAT | {"prediction": {"type": "tokens", "content": "a"}}, "prediction.type"),
    (CHAT | {"prediction": {"type": "content", "content": [1]}}, "prediction.content"),
    (TEXT | {"guided_regex": "a*"}, "guided_regex"),
    (CHAT | {"messages": []}, "messages"),
    (CHAT | {"messages": [{"role": "judge", "content": "7"}]}, "messages.0.role"),
    (CHAT | {"messages": [{"role": "tool", "content": "7"}]}, "messages.0.tool_call_id"),
    (CHAT | {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (
        CHAT | {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        "messages.0.tool_calls.0.id",
    ),
    (
        CHAT
        | {
            "messages": [
                {
                    "role": "user",
                    "content": "",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}],
                }
            ]
        },
        "messages.0.tool_calls",
    ),
    (CHAT | {"tools": [{"type": "function"}]}, "tools.0.function"),
    (CHAT | {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    (CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}] * 2}, "tools"),
    (CHAT | {"tool_choice": "required"}, "tool_choice"),
    (CHAT | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT | {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT | {"response_format": {"type": "xml"}}, "response_format"),
    (CHAT | {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, "response_format"),
    (TEXT | {"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    (TEXT | {"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
    (TEXT | {"structured_outputs": {"json": "{"}}, "structured_outputs"),
    (TEXT | {"structured_outputs": {"regex": "a" * 65_537}}, "structured_outputs"),
    (CHAT | {"top_logprobs": 2}, "top_logprobs"),
    (CHAT | {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
]


def errors_in(body: dict[str, Any]) -> int:
    try:
        (CompletionRequest if "prompt" in body else ChatRequest).model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    ("body", "parameter"),
    [
        (TEXT | {"prompt": [{}] * 50_000}, "prompt"),
        (TEXT | {"prompt": [[{}] * 50_000] * 2}, "prompt"),
        (TEXT | {"stop_token_ids": ["a"] * 50_000}, "stop_token_ids"),
        (TEXT | {"logit_bias": {str(at): "a" for at in range(50_000)}}, "logit_bias"),
        (TEXT | {"logit_bias": {"1" * 5_000: 1.0}}, "logit_bias"),
        (CHAT | {"messages": [{}] * 50_000}, "messages"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_of_much_that_is_wrong_one_thing_is_told(
    body: dict[str, Any], parameter: str, refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    """Each error that is found costs a thousand times what was sent for it."""
    assert errors_in(body) < 20
    response = refusing.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)
    assert response.status_code == 400
    assert error_of(response)["param"].startswith(parameter)
    assert unasked.calls == []


def test_an_echo_of_more_ids_than_the_context_takes_is_refused_before_they_are_read(
    refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    body = TEXT | {"prompt": [1] * 100_000, "echo": True, "n": 16}
    response = refusing.post("/v1/completions", json=body)
    assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    assert "100000 tokens" in error_of(response)["message"]
    assert unasked.calls == []


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_what_is_no_text_is_refused_by_saying_so(
    kind: str, refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    answer = refusing.post(
        "/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": parts}]}
    )
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == "messages.0.content"
    assert "images, sound and files are not supported" in error["message"]
    assert unasked.calls == []


@pytest.mark.parametrize(("body", "parameter"), WRONG, ids=lambda value: str(value)[-40:])
def test_a_wrong_or_unsupported_parameter_is_named(
    body: dict[str, Any], parameter: str, refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    response = refusing.post("/v1/chat/completions" if "messages" in body else "/v1/completions", json=body)

    said = error_of(response)
    assert (response.status_code, said["type"], said["param"]) == (400, "invalid_request_error", parameter)
    assert unasked.calls == []


def test_parameters_that_change_nothing_are_ignored(http: httpx.Client) -> None:
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "tools": None,
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "response_format": {"type": "text"},
        "tool_choice": "none",
        "chat_template_kwargs": None,
        "parallel_tool_calls": True,
        "something_new": 1,
        "n": None,
        "stop": None,
        "seed": -5,
    }
    assert http.post("/v1/chat/completions", json=CHAT | harmless).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/v1/chat/completions", {}, 405),
        ("DELETE", "/v1/models", {}, 405),
        ("POST", "/v1/completions", {"json": TEXT | {"model": "gpt-4"}}, 404),
        ("POST", "/v1/completions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        (
            "POST",
            "/v1/completions",
            {"content": b"[" * 10**5, "headers": {"content-type": "application/json"}},
            400,
        ),
        (
            "POST",
            "/v1/completions",
            {"content": b"\xff", "headers": {"content-type": "application/json"}},
            400,
        ),
        ("POST", "/v1/completions", {"json": [1]}, 400),
        ("POST", "/v1/completions", {}, 400),
        (
            "POST",
            "/v1/completions",
            {"content": json.dumps(TEXT), "headers": {"content-type": "text/plain"}},
            400,
        ),
        ("POST", "/v1/completions", {"json": TEXT | {"user": "x" * 2**20}}, 413),
        ("POST", "/v1/completions", {"content": iter([b"x" * 2**19] * 3)}, 413),
    ],
)
def test_requests_that_no_route_takes_are_answered_in_the_same_shape(
    method: str, path: str, options: dict[str, Any], status: int, refusing: httpx.Client, unasked: FakeSwarm
) -> None:
    response = refusing.request(method, path, **options)

    assert response.status_code == status
    assert error_of(response)["type"] == "invalid_request_error"
    assert unasked.calls == []


def test_the_process_lives_and_is_ready_only_with_a_circuit(http: httpx.Client, swarm: FakeSwarm) -> None:
    assert http.get("/healthz").json() == {"status": "ok"}
    assert http.get("/readyz").json() == {"status": "ready"}
    assert http.get("/v1/swarm").json() == swarm.state
    swarm.state = {"ready": False, "reason": "layers [1, 2) are missing", "peers": []}
    response = http.get("/readyz")

    assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")
    assert "layers [1, 2) are missing" in response.text
    assert http.get("/healthz").status_code == 200


def test_a_body_that_stops_halfway_holds_nobody_else_up(http: httpx.Client) -> None:
    address = (http.base_url.host, http.base_url.port or 0)
    with socket.create_connection(address, DEADLINE_S) as slow:
        slow.sendall(b"POST /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
        answered = threading.Event()
        thread = threading.Thread(target=lambda: (http.get("/healthz"), answered.set()))
        thread.start()
        assert answered.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
