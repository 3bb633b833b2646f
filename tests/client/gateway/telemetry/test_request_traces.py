"""Spans and log lines of requests: parts of their clients' traces, and without a word of what was asked."""

import json
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from support.gateways.eventually import eventually
from support.swarms.fake_swarm import CHAT, DEADLINE_S, PRIVATE_WORD, TEXT, FakeSwarm, gateway

from molink.client.errors import InvalidRequest, PeerLost
from molink.logs import JsonFormatter
from molink.tracing import Traces

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE_ID}-00f067aa0ba902b7-01"


class Spans(SpanExporter):
    """Keeps spans as they end, which is a moment after their clients have the last byte."""

    def __init__(self) -> None:
        self._ended: list[ReadableSpan] = []
        self._changed = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._changed:
            self._ended += spans
            self._changed.notify_all()
        return SpanExportResult.SUCCESS

    def ended(self, count: int) -> list[ReadableSpan]:
        """The first so many; waits for them."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._ended) >= count, DEADLINE_S)
            return self._ended[:]


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def traced(swarm: FakeSwarm, spans: Spans) -> Iterator[httpx.Client]:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    swarm.traces = Traces(provider)
    with gateway(swarm) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_its_generation_are_parts_of_the_clients_trace(
    traced: httpx.Client, swarm: FakeSwarm, spans: Spans, stream: bool
) -> None:
    asked = CHAT | {"stream": stream}
    assert traced.post("/v1/chat/completions", json=asked, headers={"traceparent": TRACEPARENT}).is_success
    (span,) = spans.ended(1)
    assert span.name == "POST /v1/chat/completions"
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, "00f067aa0ba902b7")
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 200
    assert [one.hex() for one in swarm.trace_ids] == [TRACE_ID]


@pytest.mark.parametrize("header", ["", "nonsense", "00-0-0-0"])
def test_a_request_without_a_valid_context_has_a_trace_of_its_own(
    traced: httpx.Client, spans: Spans, header: str
) -> None:
    assert traced.post("/v1/completions", json=TEXT, headers={"traceparent": header}).is_success
    (span,) = spans.ended(1)
    assert span.parent is None


def test_two_requests_at_once_have_a_trace_each(traced: httpx.Client, swarm: FakeSwarm, spans: Spans) -> None:
    for _ in range(2):
        traced.post("/v1/completions", json=TEXT | {"n": 2})
    assert len({span.context.trace_id for span in spans.ended(2)}) == 2
    assert len(swarm.trace_ids) == 4
    assert len(set(swarm.trace_ids)) == 2


def test_what_watches_the_process_is_not_traced_nor_what_its_client_does_not_keep(
    traced: httpx.Client, spans: Spans
) -> None:
    for path in ("/healthz", "/metrics", "/v1/models", "/no/such/path", "/"):
        traced.get(path, headers={"traceparent": TRACEPARENT})
    traced.post("/v1/completions", json=TEXT, headers={"traceparent": f"{TRACEPARENT[:-1]}0"})
    traced.post("/tokenize", json=TEXT, headers={"traceparent": TRACEPARENT})
    assert [span.name for span in spans.ended(1)] == ["POST /tokenize"]


def test_without_traces_generations_are_parts_of_none(http: httpx.Client, swarm: FakeSwarm) -> None:
    assert http.post("/v1/completions", json=TEXT, headers={"traceparent": TRACEPARENT}).is_success
    assert swarm.trace_ids == []


ERRORS: list[Exception | None] = [
    None,
    PeerLost("12D3", None, "gone"),
    InvalidRequest("too long", "prompt"),
    RuntimeError(f"cannot split {PRIVATE_WORD}"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("stream", [False, True])
def test_no_log_metric_trace_or_error_has_a_word_of_the_prompt(
    traced: httpx.Client,
    swarm: FakeSwarm,
    spans: Spans,
    caplog: pytest.LogCaptureFixture,
    error: Exception | None,
    stream: bool,
) -> None:
    caplog.set_level(logging.DEBUG, logger="molink")
    swarm.error = error
    said = []
    for path, body in (
        ("/v1/completions", TEXT | {"stream": stream}),
        ("/v1/chat/completions", CHAT | {"stream": stream}),
        ("/v1/messages", CHAT | {"max_tokens": 5, "stream": stream}),
        ("/v1/responses", {"model": TEXT["model"], "input": TEXT["prompt"], "stream": stream}),
        ("/v1/completions", TEXT | {"temperature": PRIVATE_WORD}),
        ("/v1/chat/completions", CHAT | {PRIVATE_WORD: 1}),
        (f"/v1/{PRIVATE_WORD}", TEXT),
    ):
        said.append(traced.post(path, json=body).text)
    said.append(traced.post("/v1/completions", content=f'{{"prompt": "{PRIVATE_WORD}').text)
    told = [span.to_json() for span in spans.ended(7)]
    logged = [JsonFormatter().format(record) for record in caplog.records]
    assert any("was answered with" in str(json.loads(line)["message"]) for line in logged)
    for text in (*told, *logged, traced.get("/metrics").text):
        assert PRIVATE_WORD not in text
    assert not [text for text in said if PRIVATE_WORD in text]


def test_a_line_of_the_log_says_which_request_it_was(
    traced: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="molink")
    headers = {"x-request-id": "mine-1", "traceparent": TRACEPARENT}
    traced.post("/v1/completions", json=TEXT, headers=headers)

    def lines() -> list[dict[str, Any]]:
        said = [json.loads(JsonFormatter().format(record)) for record in tuple(caplog.records)]
        return [one for one in said if one.get("request_id") == "mine-1"]

    eventually(lambda: bool(lines()))
    (line,) = lines()
    assert (line["route"], line["status"], line["trace_id"]) == ("/v1/completions", 200, TRACE_ID)
    assert line["duration_s"] >= 0
