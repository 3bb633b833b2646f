"""Connections of people who send half a request, or none, or read nothing: they cost nobody else anything."""

import json
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from support.swarms.fake_swarm import CHAT, DEADLINE_S, TEXT, FakeSwarm, error_of, gateway

from molink.client.gateway.connections import (
    BODY_WITHIN_S,
    HEADERS_WITHIN_S,
    UNREAD_S,
    ConnectionPhase,
    Connections,
)

MOST = 20
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


class ClockedConnections(Connections):
    """Connections whose gateway's clock a test sets forward."""

    ahead_s = 0.0

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.looked = threading.Condition()

    def look(self, now_s: float) -> None:
        super().look(now_s + self.ahead_s)
        with self.looked:
            self.looked.notify_all()

    def after(self, seconds: float) -> None:
        """Returns when they have been looked at as if so many seconds had passed, and then once more."""
        for self.ahead_s in (seconds, 2 * seconds):
            with self.looked:
                for _ in range(2):
                    assert self.looked.wait(DEADLINE_S)


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> ClockedConnections:
    monkeypatch.setattr("molink.client.gateway.server.LOOKS_EVERY_S", 0.1)
    return ClockedConnections(MOST)


@pytest.fixture
def http(swarm: FakeSwarm, connections: ClockedConnections) -> Iterator[httpx.Client]:
    with (
        gateway(swarm, max_requests=2, waiting_s=DEADLINE_S, connections=connections) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as client,
    ):
        yield client


def connect(http: httpx.Client, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection((http.base_url.host, http.base_url.port or 0), DEADLINE_S)
    made.sendall(sent)
    return made


def rest_of(connection: socket.socket) -> bytes:
    """All that still comes before the other end closes."""
    content = b""
    try:
        while more := connection.recv(2**16):
            content += more
    except ConnectionResetError:
        pass
    return content


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example"])
def test_a_name_that_somebody_pointed_here_is_not_answered(
    host: str, http: httpx.Client, swarm: FakeSwarm
) -> None:
    answer = http.post("/v1/completions", json=TEXT, headers={"Host": host})
    assert answer.status_code == 421
    assert error_of(answer)["code"] == "host_not_allowed"
    assert "--allow-host" in answer.text
    assert swarm.calls == []
    assert http.get("/healthz", headers={"Host": "localhost:8000"}).status_code == 200


@pytest.mark.parametrize(
    "framing",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n",
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n{}  ",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"Content-Length: 00x\r\n\r\n",
    ],
)
def test_a_body_of_two_lengths_is_refused_and_its_connection_ends(
    framing: bytes, http: httpx.Client, swarm: FakeSwarm
) -> None:
    with connect(http, HEAD + framing + b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        head, _, body = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert swarm.calls == []


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /v1/models HTTP/1.1\r\nHost:", HEAD + b"Content-Length: 9\r\n\r\n{"],
    ids=["nothing", "half a head", "half a body"],
)
def test_a_connection_that_sends_no_whole_request_is_ended(
    sent: bytes, http: httpx.Client, connections: ClockedConnections
) -> None:
    with connect(http, sent) as connection:
        connections.after(BODY_WITHIN_S + HEADERS_WITHIN_S)
        assert rest_of(connection) == b""


def test_who_sends_the_next_request_half_is_ended_as_well(
    http: httpx.Client, connections: ClockedConnections
) -> None:
    whole = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(http, whole) as connection:
        assert connection.recv(2**16).startswith(b"HTTP/1.1 200 ")
        connection.sendall(whole[:-1])
        connections.after(2 * HEADERS_WITHIN_S)
        assert b"HTTP/1.1" not in rest_of(connection)


@pytest.mark.parametrize("sent", [b"", b"GET /", HEAD + b"Content-Length: 9\r\n\r\n{"])
def test_many_that_wait_for_nothing_keep_nobody_out(sent: bytes, http: httpx.Client) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(connect(http, sent)) for _ in range(3 * MOST)]
        for _ in range(3):
            assert http.post("/v1/completions", json=TEXT).status_code == 200
        assert rest_of(held[0]) == b""


def test_who_came_last_is_refused_where_all_others_are_being_answered(
    swarm: FakeSwarm, connections: ClockedConnections
) -> None:
    swarm.hangs_at = 0
    body = json.dumps(TEXT).encode()
    with (
        gateway(swarm, max_requests=MOST, connections=connections) as url,
        httpx.Client(base_url=url) as http,
        ExitStack() as stack,
    ):
        for _ in range(MOST):
            stack.enter_context(connect(http, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body))
        with connections.looked:
            assert connections.looked.wait_for(lambda: len(swarm.calls) == MOST, DEADLINE_S)
        with connect(http) as connection:
            head, _, said = rest_of(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 429 ")
    assert b"Retry-After: 1" in head
    assert json.loads(said)["error"]["code"] == "rate_limit_exceeded"


def test_unfinished_bodies_take_no_turn(http: httpx.Client) -> None:
    with ExitStack() as stack:
        for _ in range(MOST // 2):
            stack.enter_context(connect(http, HEAD + b"Content-Length: 9\r\n\r\n{"))
        assert http.post("/v1/completions", json=TEXT).status_code == 200


def test_unfinished_bodies_together_have_a_limit(swarm: FakeSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molink.client.gateway.middleware.UNFINISHED_BYTES", 2**15)
    unfinished = HEAD + b"Content-Length: 100000\r\n\r\n" + b"x" * 20_000
    with (
        gateway(swarm) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S) as http,
        connect(http, unfinished) as one,
        connect(http, unfinished) as other,
    ):
        [refused], _, _ = select.select([one, other], [], [], DEADLINE_S)
        assert refused.recv(2**16).startswith(b"HTTP/1.1 429 ")
        assert http.post("/v1/completions", json=TEXT).status_code == 200


@pytest.mark.full
def test_a_stream_that_is_not_read_ends_and_gives_its_turn_to_others(
    http: httpx.Client, swarm: FakeSwarm, connections: ClockedConnections
) -> None:
    swarm.words = ("x" * 2**20,) * 64
    body = json.dumps(TEXT | {"stream": True}).encode()
    with connect(http, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body) as unread:
        assert unread.recv(8) == b"HTTP/1.1"
        assert "molink_gateway_active_requests 1.0" in http.get("/metrics").text
        connections.after(2 * UNREAD_S)
        assert "molink_gateway_active_requests 0.0" in http.get("/metrics").text


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    http: httpx.Client, swarm: FakeSwarm
) -> None:
    long = "word " * 100_000
    answers = [
        http.post("/v1/completions", json=TEXT | {"prompt": long, "n": 2}),
        http.post("/v1/chat/completions", json=CHAT | {"messages": [{"role": "user", "content": long}]}),
    ]
    assert [(answer.status_code, error_of(answer)["param"]) for answer in answers] == [
        (400, "prompt"),
        (400, "messages"),
    ]
    assert swarm.calls == []


def test_too_large_requests_are_counted_under_their_route(http: httpx.Client) -> None:
    http.post("/v1/completions", json=TEXT | {"user": "x" * 2**20})
    assert (
        'molink_gateway_requests_total{method="POST",route="/v1/completions",status="413"} 1.0'
        in http.get("/metrics").text
    )


def test_of_several_users_the_greediest_makes_room() -> None:
    connections = Connections(4)

    class Idle:
        def __init__(self, since_s: float) -> None:
            self.phase, self.waits_since_s, self.aborted = ConnectionPhase.IDLE, since_s, False

        def abort(self) -> None:
            self.aborted = True

    greedy = [Idle(float(n)) for n in range(3)]
    modest = Idle(-1.0)
    assert connections.admit(modest, "203.0.113.1")  # type: ignore[arg-type]
    for one in greedy:
        assert connections.admit(one, "127.0.0.1")  # type: ignore[arg-type]
    assert connections.admit(Idle(9.0), "203.0.113.2")  # type: ignore[arg-type]
    assert [one.aborted for one in greedy] == [True, False, False]
    assert not modest.aborted
