"""A gateway that asks for keys, over a scripted swarm: who is let in, how far, and what that costs."""

import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, OpenAI, PermissionDeniedError, RateLimitError
from support.gateways.eventually import eventually
from support.gateways.gateway_keys import bearer, make_key, revoke_key
from support.swarms.fake_swarm import (
    CHAT,
    DEADLINE_S,
    MODEL,
    PROMPT_TOKENS,
    TEXT,
    FakeSwarm,
    error_of,
    gateway,
)

from molink.client.errors import SwarmUnavailable
from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope

OPERATE = frozenset({KeyScope.OPERATE})


@contextmanager
def serving(
    swarm: FakeSwarm, folder: Path, *, max_requests: int = 64, origins: Sequence[str] = ()
) -> Iterator[httpx.Client]:
    with (
        gateway(
            swarm,
            max_requests=max_requests,
            waiting_s=DEADLINE_S,
            accounts=(None, folder),
            allowed_origins=origins,
        ) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


def ask(http: httpx.Client, key: str, **changes: object) -> httpx.Response:
    return http.post("/v1/completions", json=TEXT | changes, headers=bearer(key))


def usage_of(http: httpx.Client, key: str) -> list[dict[str, Any]]:
    body = http.get("/v1/usage", headers=bearer(key)).json()
    assert body["object"] == "usage"
    return list(body["data"])


def test_without_any_key_everybody_is_let_in_until_the_first_one_is_made(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    with serving(swarm, tmp_path) as http:
        assert http.post("/v1/completions", json=TEXT, headers=bearer("unused")).status_code == 200
        assert http.get("/v1/usage").json() == {"object": "usage", "data": []}
        assert http.get("/metrics").status_code == 200
        key = make_key(tmp_path)
        eventually(lambda: http.get("/v1/models").status_code != 200)
        assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        assert http.post("/v1/completions", json=TEXT, headers=bearer("unused")).status_code == 401


@pytest.fixture
def key(tmp_path: Path) -> str:
    return make_key(tmp_path)


@pytest.fixture
def http(swarm: FakeSwarm, key: str, tmp_path: Path) -> Iterator[httpx.Client]:
    assert key
    with serving(swarm, tmp_path) as client:
        yield client


def test_keys_that_are_missing_wrong_expired_or_revoked_are_refused_in_openais_shape(
    http: httpx.Client, key: str, tmp_path: Path, swarm: FakeSwarm
) -> None:
    expired = make_key(tmp_path, expires_at_s=time.time() - 1)
    revoked = make_key(tmp_path)
    assert ask(http, revoked).status_code == 200
    revoke_key(tmp_path, revoked)
    eventually(lambda: ask(http, revoked).status_code != 200)
    calls = len(swarm.calls)
    said = {
        "asks for a key": {},
        "not one of this gateway's": bearer(key[:-1] + ("A" if key[-1] != "A" else "E")),
        "has expired": bearer(expired),
        "was revoked": bearer(revoked),
        "more than one key": bearer(key) | {"x-api-key": expired},
    }
    for words, headers in said.items():
        for request in (
            http.build_request("POST", "/v1/chat/completions", json=CHAT, headers=headers),
            http.build_request("GET", "/v1/models", headers=headers),
            http.build_request("GET", "/no/such/path", headers=headers),
        ):
            answer = http.send(request)
            error = error_of(answer)
            assert (answer.status_code, error["code"], error["type"]) == (
                401,
                "invalid_api_key",
                "invalid_request_error",
            )
            assert words in error["message"]
            assert answer.headers["www-authenticate"] == "Bearer"
    assert len(swarm.calls) == calls
    with httpx.Client(base_url=http.base_url) as other:
        assert (
            'molink_gateway_refused_total{reason="key_wrong"} 3.0'
            in other.get("/metrics", headers=bearer(make_key(tmp_path, scopes=OPERATE))).text
        )


def test_a_key_comes_in_either_header_and_with_any_case_of_bearer(http: httpx.Client, key: str) -> None:
    for headers in (
        {"Authorization": f"Bearer {key}"},
        {"authorization": f"bearer  {key}"},
        {"x-api-key": key},
        {"x-api-key": key, "Authorization": f"Bearer {key}"},
        {"x-api-key": key, "Authorization": "Basic dXNlcjpwYXNz"},
    ):
        assert http.get("/v1/models", headers=headers).status_code == 200, headers


def test_a_key_opens_what_its_scopes_say(http: httpx.Client, key: str, tmp_path: Path) -> None:
    operators = make_key(tmp_path, scopes=OPERATE)
    for path, opens, other in (("/v1/models", key, operators), ("/metrics", operators, key)):
        assert http.get(path, headers=bearer(opens)).status_code == 200
        refused = http.get(path, headers=bearer(other))
        assert (refused.status_code, error_of(refused)["code"]) == (403, "insufficient_scope")
    for path in ("/healthz", "/readyz"):
        assert http.get(path).status_code == 200


def test_a_key_sees_and_uses_the_models_that_it_may(
    swarm: FakeSwarm, http: httpx.Client, tmp_path: Path
) -> None:
    other = make_key(tmp_path, limits=KeyLimits(models=("some/other",)))
    by_hash = make_key(tmp_path, limits=KeyLimits(models=("x", swarm.model.model_hash)))
    assert http.get("/v1/models", headers=bearer(other)).json()["data"] == []
    assert http.get(f"/v1/models/{MODEL}", headers=bearer(other)).status_code == 404
    refused = ask(http, other)
    error = error_of(refused)
    assert (refused.status_code, error["code"], error["param"]) == (403, "model_not_allowed", "model")
    assert ask(http, by_hash).status_code == 200
    assert len(http.get("/v1/models", headers=bearer(by_hash)).json()["data"]) == 1


def test_the_openai_client_knows_the_refusals(http: httpx.Client, tmp_path: Path) -> None:
    limited = make_key(tmp_path, limits=KeyLimits(requests_per_minute=1))
    forbidden = make_key(tmp_path, limits=KeyLimits(models=("some/other",)))

    def complete(api_key: str) -> str:
        with OpenAI(
            base_url=f"{http.base_url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S
        ) as client:
            return client.chat.completions.create(**CHAT).choices[0].message.content or ""

    assert complete(limited) == "But soft!"
    with pytest.raises(RateLimitError, match="requests a minute"):
        complete(limited)
    with pytest.raises(PermissionDeniedError):
        complete(forbidden)
    with pytest.raises(AuthenticationError):
        complete("sk-nothing")


@pytest.mark.parametrize("stream", [False, True])
def test_answers_say_what_is_left_and_a_refusal_when_to_come_back(
    stream: bool, http: httpx.Client, tmp_path: Path
) -> None:
    key = make_key(tmp_path, limits=KeyLimits(requests_per_minute=3, tokens_per_minute=600))
    for left in (2, 1, 0):
        answer = ask(http, key, max_tokens=100, stream=stream)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "3"
        assert answer.headers["x-ratelimit-remaining-requests"] == str(left)
        assert answer.headers["x-ratelimit-limit-tokens"] == "600"
        assert 400 <= int(answer.headers["x-ratelimit-remaining-tokens"]) < 500
        assert answer.headers["x-ratelimit-reset-requests"].endswith("s")
    refused = ask(http, key, stream=stream)
    assert (refused.status_code, error_of(refused)["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"


def test_counting_tokens_costs_a_request_and_no_tokens(http: httpx.Client, tmp_path: Path) -> None:
    key = make_key(tmp_path, limits=KeyLimits(requests_per_minute=3, tokens_per_minute=600))
    asked: dict[str, dict[str, object]] = {
        "/tokenize": {"prompt": "one two"},
        "/detokenize": {"tokens": [1, 2]},
        "/v1/messages/count_tokens": CHAT,
    }
    for left, (path, body) in enumerate(reversed(asked.items())):
        answer = http.post(path, json=body, headers=bearer(key))
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-remaining-requests"] == str(2 - left)
        assert answer.headers["x-ratelimit-remaining-tokens"] == "600"
    for path, body in asked.items():
        refused = http.post(path, json=body, headers=bearer(key))
        assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    assert ask(http, key).status_code == 429


def test_tokens_are_counted_as_they_were_generated(
    http: httpx.Client, tmp_path: Path, swarm: FakeSwarm
) -> None:
    key = make_key(tmp_path, limits=KeyLimits(tokens_per_minute=160))
    for _ in range(5):  # each reserves about 110, and uses 5 of its prompt and 3 that it generates
        assert ask(http, key, max_tokens=100).status_code == 200
    swarm.words = ("word",) * 100
    assert ask(http, key, max_tokens=100).status_code == 200
    refused = ask(http, key, max_tokens=100)
    assert refused.status_code == 429
    assert "tokens a minute (160)" in error_of(refused)["message"]
    assert error_of(ask(http, key, max_tokens=500))["param"] == "max_tokens"
    assert ask(http, key, max_tokens=500).status_code == 400


def test_usage_is_kept_by_day_key_and_model(
    http: httpx.Client, key: str, tmp_path: Path, swarm: FakeSwarm
) -> None:
    other = make_key(tmp_path, name="bob")
    assert ask(http, key).status_code == 200
    assert ask(http, key, n=2, prompt=["one", "two"]).status_code == 200
    assert (
        http.post("/v1/chat/completions", json=CHAT | {"stream": True}, headers=bearer(key)).status_code
        == 200
    )
    swarm.error = SwarmUnavailable("nobody")
    assert ask(http, key).status_code == 503
    [line] = usage_of(http, key)
    assert line["model"] == MODEL
    assert (line["requests"], line["prompt_tokens"], line["completion_tokens"]) == (4, 20, 18)
    assert line["cached_tokens"] == 0
    assert usage_of(http, other) == []
    assert http.get("/v1/usage?days=0", headers=bearer(key)).status_code == 400


def test_what_was_generated_before_a_client_left_counts(
    http: httpx.Client, key: str, swarm: FakeSwarm
) -> None:
    swarm.words, swarm.hangs_at = ("a", "b", "c", "d"), 3
    with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}, headers=bearer(key)) as answer:
        events = answer.iter_lines()
        assert "c" in [line for _, line in zip(range(5), events, strict=False)][4]
    assert swarm.ended.acquire(timeout=DEADLINE_S)
    eventually(lambda: bool(usage_of(http, key)))
    line = usage_of(http, key)[0]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (PROMPT_TOKENS, 3)


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_of_a_client_that_leaves_before_the_first_token_counts(
    stream: bool, http: httpx.Client, key: str, swarm: FakeSwarm
) -> None:
    swarm.hangs_at = 0
    asked = CHAT | {"stream": stream, "n": 2}
    request = http.build_request("POST", "/v1/chat/completions", json=asked, headers=bearer(key))
    lines = [f"{name}: {value}" for name, value in request.headers.items()]
    head = "\r\n".join((f"POST {request.url.path} HTTP/1.1", *lines, "", "")).encode()
    with socket.create_connection((request.url.host, request.url.port or 80), DEADLINE_S) as connection:
        connection.sendall(head + request.read())
        eventually(lambda: len(swarm.calls) == 2)
    for _ in range(2):
        assert swarm.ended.acquire(timeout=DEADLINE_S)
    eventually(lambda: bool(usage_of(http, key)))
    line = usage_of(http, key)[0]
    assert (line["requests"], line["prompt_tokens"], line["completion_tokens"]) == (1, PROMPT_TOKENS, 0)


def test_streams_of_a_key_are_limited_and_free_again_when_one_ends(
    http: httpx.Client, swarm: FakeSwarm, tmp_path: Path
) -> None:
    key = make_key(tmp_path, limits=KeyLimits(streams=2))
    swarm.hangs_at = 1
    with ExitStack() as held:
        for _ in range(2):
            answer = held.enter_context(
                http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}, headers=bearer(key))
            )
            assert answer.status_code == 200
        refused = ask(http, key)
        assert refused.status_code == 429
        assert "as many generations under way as it may (2)" in error_of(refused)["message"]
    swarm.hangs_at = None
    eventually(lambda: ask(http, key).status_code != 429)
    assert ask(http, key).status_code == 200
    assert error_of(ask(http, key, n=3))["param"] == "n"


def test_a_light_key_has_its_turn_before_the_rest_of_a_flood(swarm: FakeSwarm, tmp_path: Path) -> None:
    flood, light = make_key(tmp_path, name="flood"), make_key(tmp_path, name="light")
    operator = bearer(make_key(tmp_path, scopes=OPERATE))
    swarm.hangs_at = 1
    with (
        serving(swarm, tmp_path, max_requests=8) as http,
        ThreadPoolExecutor(16) as users,
        ExitStack() as running,
    ):

        def until(words: str) -> None:
            eventually(lambda: words in http.get("/metrics", headers=operator).text)

        for _ in range(8):
            body = TEXT | {"stream": True}
            running.enter_context(http.stream("POST", "/v1/completions", json=body, headers=bearer(flood)))
        swarm.hangs_at = None
        waiting = [users.submit(ask, http, flood, prompt="flood") for _ in range(2)]
        until("waiting_requests 2.0")
        late = users.submit(ask, http, light, prompt="light")
        until("waiting_requests 3.0")
        calls = len(swarm.calls)
        running.pop_all().close()
        assert late.result(DEADLINE_S).status_code == 200
        assert [one.result(DEADLINE_S).status_code for one in waiting] == [200, 200]
    assert [prompt for prompt, _ in swarm.calls[calls:]] == ["light", "flood", "flood"]


def test_browsers_of_other_sites_are_let_in_only_if_their_origin_was_named(
    swarm: FakeSwarm, key: str, tmp_path: Path
) -> None:
    asked = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    with serving(swarm, tmp_path) as http:
        assert "access-control-allow-origin" not in http.options("/v1/models", headers=asked).headers
    with serving(swarm, tmp_path, origins=("https://chat.example",)) as http:
        allowed = http.options(
            "/v1/chat/completions", headers=asked | {"Access-Control-Request-Headers": "authorization"}
        )
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        other = http.options("/v1/models", headers=asked | {"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        answer = http.get("/v1/models", headers=bearer(key) | {"Origin": "https://chat.example"})
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        assert "x-ratelimit-remaining-tokens" in answer.headers["access-control-expose-headers"]
