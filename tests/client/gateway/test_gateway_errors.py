"""What the gateway says and does when something goes wrong: always in OpenAI's shape, never silently."""

import json
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from openai import APIError, BadRequestError, OpenAI, RateLimitError
from support.swarms.fake_swarm import CHAT, DEADLINE_S, MODEL, TEXT, FakeSwarm, error_of

from molink.client.errors import (
    InvalidRequest,
    ModelNotFound,
    NoCircuit,
    PeerLost,
    SwarmError,
    SwarmUnavailable,
)
from molink.routing import NoCircuit as NoCircuitFound
from molink.shards.spec import Span


@pytest.fixture
def client(http: httpx.Client) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=str(http.base_url.join("/v1")), api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as made:
        yield made


NO_CIRCUIT = NoCircuit(MODEL, 3, NoCircuitFound("no peer holds them", (Span(1, 2),), 64))


FAILURES = [
    (
        InvalidRequest("the prompt has 2000 tokens, the model takes 1024", "prompt"),
        (400, None, "prompt", "the prompt has 2000 tokens"),
    ),
    (
        InvalidRequest("this model has no chat template", "messages", "no_chat_template"),
        (400, "no_chat_template", "messages", "this model has no chat template"),
    ),
    (ModelNotFound("other", "nobody serves it"), (404, "model_not_found", "model", "model 'other' was not")),
    (
        NO_CIRCUIT,
        (503, "no_circuit", None, "The 3 peers alive do not cover molink/tiny-shakespeare: no circuit"),
    ),
    (
        SwarmUnavailable("no room", busy=True, retry_after_s=2.5),
        (429, "rate_limit_exceeded", None, "The swarm has no room"),
    ),
    (
        SwarmUnavailable("12D3: connect to ipv4:203.0.113.7:4001 failed"),
        (503, "swarm_unavailable", None, "No peer of the swarm could be reached in time."),
    ),
    (PeerLost("12D3", Span(0, 1), "its link closed"), (502, "peer_lost", None, "A peer was lost")),
    (SwarmError("something else"), (503, "swarm_error", None, "The swarm could not serve this")),
    (RuntimeError("about the prompt: xyzzy"), (500, "internal_error", None, "The gateway failed to answer.")),
]


IDS = [type(failure[0]).__name__ for failure in FAILURES]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "expected"), FAILURES, ids=IDS)
def test_a_failure_before_the_first_token_has_its_own_status(
    error: Exception,
    expected: tuple[int, str | None, str | None, str],
    stream: bool,
    http: httpx.Client,
    swarm: FakeSwarm,
) -> None:
    swarm.error = error
    response = http.post("/v1/chat/completions", json=CHAT | {"stream": stream})

    said = error_of(response)
    *values, message = expected
    assert [response.status_code, said["code"], said["param"]] == values
    assert said["message"].startswith(message)
    assert "12D3" not in response.text
    assert "203.0.113.7" not in response.text
    if isinstance(error, SwarmUnavailable):
        assert response.headers["retry-after"] == ("3" if error.busy else "1")


def test_a_failure_in_mid_stream_is_an_event_and_no_done_follows(
    http: httpx.Client, client: OpenAI, swarm: FakeSwarm
) -> None:
    swarm.error, swarm.fails_at = PeerLost("12D3", Span(0, 1), "its link closed"), 2
    response = http.post("/v1/completions", json=TEXT | {"stream": True})
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]

    assert response.status_code == 200
    assert "[DONE]" not in events
    assert [json.loads(event)["choices"][0]["text"] for event in events[:-1]] == ["But", " soft"]
    assert json.loads(events[-1])["error"]["code"] == "peer_lost"
    with pytest.raises(APIError, match="A peer was lost"):
        list(client.completions.create(**TEXT, stream=True))


def test_a_whole_stream_ends_with_done(http: httpx.Client) -> None:
    response = http.post("/v1/completions", json=TEXT | {"stream": True})

    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


def test_one_failing_choice_ends_the_others(http: httpx.Client, swarm: FakeSwarm) -> None:
    swarm.error, swarm.fails_at = PeerLost("12D3", None, "gone"), 1
    assert http.post("/v1/completions", json=TEXT | {"n": 3}).status_code == 502


def test_the_openai_client_raises_its_own_errors(client: OpenAI, swarm: FakeSwarm) -> None:
    with pytest.raises(BadRequestError, match="tool_choice is required, and there are no tools"):
        client.chat.completions.create(**CHAT, tool_choice="required")
    swarm.error = SwarmUnavailable("12D3: full", busy=True)
    with pytest.raises(RateLimitError, match="no room"):
        client.chat.completions.create(**CHAT)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hangs_at", [0, 2])
def test_a_client_that_leaves_ends_its_generations(
    hangs_at: int, stream: bool, http: httpx.Client, swarm: FakeSwarm
) -> None:
    swarm.hangs_at = hangs_at
    body = json.dumps(CHAT | {"stream": stream, "n": 2}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), DEADLINE_S) as connection:
        connection.sendall(sent)
        assert swarm.hanging.wait(DEADLINE_S)
    for _ in range(2):
        assert swarm.ended.acquire(timeout=DEADLINE_S)

    swarm.hangs_at = None  # and the two places are free again
    assert http.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_beyond_the_most_requests_at_once_a_client_is_asked_to_come_back(
    http: httpx.Client, swarm: FakeSwarm
) -> None:
    swarm.hangs_at = 1
    with ExitStack() as stack:
        held = []
        for _ in range(2):
            streamed = stack.enter_context(
                http.stream("POST", "/v1/completions", json=TEXT | {"stream": True})
            )
            held.append(streamed.iter_bytes())  # to drop the iterator would close the response
            assert next(held[-1]).startswith(b"data: ")
        refused = http.post("/v1/chat/completions", json=CHAT)
        assert error_of(refused)["code"] == "rate_limit_exceeded"
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert http.get("/healthz").status_code == 200
        assert "molink_gateway_active_requests 2.0" in http.get("/metrics").text
    for _ in range(2):
        assert swarm.ended.acquire(timeout=DEADLINE_S)


def test_where_nobody_serves_the_model_nobody_waits_for_a_circuit(
    http: httpx.Client, swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("molink.client.gateway.generating.UNSERVED_S", 0.0)
    swarm.hangs_at, swarm.is_served = 0, False
    for stream in (False, True):
        answer = http.post("/v1/completions", json=TEXT | {"stream": stream})
        assert (answer.status_code, error_of(answer)["code"]) == (503, "swarm_unavailable")


def test_nothing_of_a_prompt_is_logged(
    http: httpx.Client, swarm: FakeSwarm, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    swarm.error = RuntimeError("about the prompt: xyzzy")
    with caplog.at_level(logging.DEBUG):
        http.post("/v1/completions", json=TEXT)
        http.post("/v1/completions", json=TEXT | {"stream": True})
        http.post("/v1/completions", json=TEXT | {"temperature": "xyzzy"})

    assert "unforeseen RuntimeError at fake_swarm.py" in caplog.text
    assert "xyzzy" not in "".join([caplog.text, *capfd.readouterr()])
