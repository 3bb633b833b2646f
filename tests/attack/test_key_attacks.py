"""People without a key, and people with one, who want more of a gateway than they may have."""

import json
import logging
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.gateways.gateway_keys import bearer, id_of, make_key
from support.swarms.fake_swarm import DEADLINE_S, TEXT, FakeSwarm, error_of, gateway

from molink.client.gateway.accounts.api_keys import KeyLimits, key_text, new_key_id, new_secret

SQL = ("' OR '1'='1", "'; DROP TABLE api_keys; --", "\\", "%s", ":id", "%27%20OR%201=1", "\u0000x")
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = '{"model": "molink/tiny-shakespeare", "prompt": "x"}'


@pytest.fixture
def key(tmp_path: Path) -> str:
    return make_key(tmp_path, limits=KeyLimits(requests_per_minute=30))


@pytest.fixture
def swarm() -> FakeSwarm:
    return FakeSwarm()


@pytest.fixture
def http(swarm: FakeSwarm, key: str, tmp_path: Path) -> Iterator[httpx.Client]:
    assert key
    with (
        gateway(swarm, accounts=(None, tmp_path), waiting_s=DEADLINE_S) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


@pytest.mark.parametrize("count", [100, pytest.param(4000, marks=pytest.mark.attack)])
def test_wrong_keys_by_the_thousand_learn_nothing_and_keep_nobody_out(
    count: int, http: httpx.Client, key: str, swarm: FakeSwarm
) -> None:
    strangers = [key_text(new_key_id(), new_secret()) for _ in range(count // 2)]
    guesses = [key_text(id_of(key), new_secret()) for _ in range(count // 2)]

    def ask(wrong: str) -> tuple[int, bytes]:
        answer = http.post("/v1/completions", json=TEXT, headers=bearer(wrong))
        return answer.status_code, answer.content

    with ThreadPoolExecutor(16) as users:
        wrong = users.map(ask, [*strangers, *guesses])
        assert http.get("/v1/models", headers=bearer(key)).status_code == 200
        answers = set(wrong)
    assert len(answers) == 1
    assert answers.pop()[0] == 401
    assert swarm.calls == []
    assert http.post("/v1/completions", json=TEXT, headers=bearer(key)).status_code == 200


@pytest.mark.parametrize("text", SQL)
def test_sql_in_any_field_is_text(http: httpx.Client, key: str, text: str) -> None:
    for headers in ({"x-api-key": text.replace("\u0000", "?")}, bearer(key[:-3] + "'--")):
        assert http.get("/v1/models", headers=headers).status_code == 401
    own = bearer(key)
    assert http.get("/v1/usage", params={"days": text}, headers=own).status_code == 400
    assert http.get(f"/v1/models/{text.strip(chr(0))}", headers=own).status_code in (404, 401)
    answer = http.post("/v1/completions", json=TEXT | {"model": text, "user": text}, headers=own)
    assert (answer.status_code, error_of(answer)["code"]) == (404, "model_not_found")
    assert http.post("/v1/completions", json=TEXT | {"user": text}, headers=own).status_code == 200
    assert http.get("/v1/usage", headers=own).json()["data"][0]["requests"] >= 1


def test_one_key_over_many_connections_keeps_its_limits(
    http: httpx.Client, key: str, swarm: FakeSwarm
) -> None:
    def ask(_: int) -> int:
        return http.post("/v1/completions", json=TEXT, headers=bearer(key)).status_code

    began_s = time.monotonic()
    with ThreadPoolExecutor(16) as users:
        done = list(users.map(ask, range(200)))
    refilled = int((time.monotonic() - began_s) / 2) + 1
    assert set(done) == {200, 429}
    assert 30 <= done.count(200) <= 30 + refilled
    assert len(swarm.calls) == done.count(200)


@pytest.mark.parametrize(
    "headers",
    [
        "Authorization: Bearer {key}\r\nAuthorization: Bearer sk-molink-other\r\n",
        "Authorization: Bearer sk-molink-other\r\nX-Api-Key: {key}\r\n",
        "Authorization: Bearer {key}, Bearer {key}\r\n",
        "Authorization: Bearer {key}\x00\r\n",
        "Authorization : Bearer {key}\r\n",
        "Authorization: Bearer sk-molink-{key}\r\n",
        "X-Forwarded-Authorization: Bearer {key}\r\nX-Original-URL: /healthz\r\n",
        "Transfer-Encoding: chunked\r\nAuthorization: Bearer {key}\r\n",
        "Authorization: Basic {key}\r\nCookie: authorization={key}\r\n",
    ],
)
def test_a_key_in_a_smuggled_header_opens_nothing(
    headers: str, http: httpx.Client, key: str, swarm: FakeSwarm
) -> None:
    request = f"{HEAD}{headers.format(key=key)}Content-Length: {len(BODY)}\r\n\r\n{BODY}"
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), DEADLINE_S) as connection:
        connection.sendall(request.encode("latin-1"))
        answer = b""
        while more := connection.recv(2**16):
            answer += more
    assert answer.split()[1] in (b"400", b"401"), answer
    assert key.encode() not in answer
    assert swarm.calls == []


@pytest.mark.parametrize(
    "path", ["/healthz/../v1/models", "//v1/models", "/v1/models;/healthz", "/V1/models", "/healthz%2f"]
)
def test_no_path_goes_round_the_key(path: str, http: httpx.Client) -> None:
    with socket.create_connection((http.base_url.host, http.base_url.port or 0), DEADLINE_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert connection.recv(2**12).split()[1] == b"401"


def test_who_is_refused_hears_why_although_his_body_comes_late(http: httpx.Client) -> None:
    body = json.dumps(TEXT | {"prompt": "a" * 60_000}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    ).encode()
    for _ in range(100):
        with socket.create_connection((http.base_url.host, http.base_url.port or 80), DEADLINE_S) as asker:
            asker.sendall(head)
            asker.sendall(body)
            answer = b"".join(iter(lambda asker=asker: asker.recv(65536), b""))  # type: ignore[misc]
            assert answer.startswith(b"HTTP/1.1 401")
            assert answer.endswith(b"}")


def test_keys_are_in_no_log_no_metric_and_no_file(
    http: httpx.Client, key: str, tmp_path: Path, swarm: FakeSwarm, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = key[:-1] + ("A" if key[-1] != "A" else "E")
    swarm.error = RuntimeError("unforeseen")
    for headers in (bearer(key), bearer(wrong), {"x-api-key": key}, bearer(key) | {"x-api-key": wrong}):
        http.post("/v1/completions", json=TEXT, headers=headers)
        http.get("/no/such/path", headers=headers)
    swarm.error = None
    http.get("/v1/usage", headers=bearer(key))
    loggers = ("molink", "sqlalchemy", "aiosqlite", "alembic", "uvicorn")
    own = [record.getMessage() for record in caplog.records if record.name.startswith(loggers)]
    assert any("unforeseen RuntimeError" in text for text in own)
    secrets = (key[-43:], wrong[-43:])
    assert not [text for text in own for secret in secrets if secret in text]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content], path
