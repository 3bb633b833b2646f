"""Trace contexts as the W3C writes them, and spans as a collector gets them."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.gateways.trace_collector import collector

from molink.tracing import CONTEXT_BYTES, TraceContext, check_endpoint, open_traces, parse_traceparent

EXAMPLE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
CONTEXTS = st.builds(
    TraceContext,
    st.binary(min_size=16, max_size=16).filter(any),
    st.binary(min_size=8, max_size=8).filter(any),
    st.booleans(),
)


@given(CONTEXTS)
def test_a_context_is_the_same_after_its_way_in_a_descriptor(context: TraceContext) -> None:
    assert len(context.to_bytes()) == CONTEXT_BYTES
    assert TraceContext.from_bytes(context.to_bytes()) == context


@given(st.binary(max_size=40))
def test_bytes_are_a_context_nothing_or_refused(content: bytes) -> None:
    try:
        context = TraceContext.from_bytes(content)
    except ValueError:
        assert len(content) != CONTEXT_BYTES or not any(content[:16]) or not any(content[16:24])
    else:
        assert (context is None) == (not content)


@given(CONTEXTS)
def test_a_header_names_the_context_that_it_was_made_of(context: TraceContext) -> None:
    header = f"00-{context.trace_id.hex()}-{context.span_id.hex()}-0{int(context.sampled)}"
    assert parse_traceparent(header) == context


@given(st.text())
def test_no_header_is_an_error(header: str) -> None:
    parse_traceparent(header)


@pytest.mark.parametrize(
    "header",
    ["", "00", EXAMPLE.replace("00-", "ff-", 1), EXAMPLE + "-more", EXAMPLE.upper(), EXAMPLE[:-1],
     f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01"],
)  # fmt: skip
def test_an_invalid_header_begins_a_new_trace(header: str) -> None:
    assert parse_traceparent(header) is None


def test_a_later_version_of_the_header_is_read_as_far_as_it_is_known() -> None:
    known = parse_traceparent(EXAMPLE)
    assert known is not None
    assert known.sampled
    assert parse_traceparent(EXAMPLE.replace("00-", "cc-", 1) + "-what-comes-later") == known


@pytest.mark.parametrize("url", ["", "collector", "ftp://collector:4318", "http://", "http://c:4318?a=b"])
def test_what_is_no_collectors_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not the URL of a collector"):
        check_endpoint(url)


def test_a_collectors_url_leads_to_its_traces() -> None:
    assert check_endpoint("http://127.0.0.1:4318") == "http://127.0.0.1:4318/v1/traces"
    assert check_endpoint("https://example.org/otlp/v1/traces") == "https://example.org/otlp/v1/traces"


def test_spans_reach_the_collector_as_parts_of_who_asked() -> None:
    async def trace(url: str) -> None:
        async with open_traces(url, "test", {}) as traces:
            assert traces is not None
            request = traces.begin("request", parse_traceparent(EXAMPLE), {"status": 200}, kind="server")
            assert request is not None
            part = request.begin("part")
            assert part is not None
            part.note("something")
            part.end(fault="PeerLost")
            request.record("earlier", 10, 20)
            request.end({"tokens": 3}, name="renamed")

    with collector() as (url, spans):
        asyncio.run(trace(url))
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"renamed", "part", "earlier"}
    assert {span.trace_id.hex() for span in spans} == {"4bf92f3577b34da6a3ce929d0e0e4736"}
    request = by_name["renamed"]
    assert request.parent_span_id.hex() == "00f067aa0ba902b7"
    assert by_name["part"].parent_span_id == by_name["earlier"].parent_span_id == request.span_id
    assert by_name["part"].status.code == 2
    assert [event.name for event in by_name["part"].events] == ["something"]
    earlier = by_name["earlier"]
    assert (earlier.start_time_unix_nano, earlier.end_time_unix_nano) == (10, 20)


def test_what_its_client_does_not_keep_is_not_traced() -> None:
    async def trace(url: str) -> None:
        async with open_traces(url, "test", {}) as traces:
            assert traces is not None
            assert traces.begin("request", parse_traceparent(EXAMPLE[:-1] + "0")) is None

    with collector() as (url, spans):
        asyncio.run(trace(url))
    assert spans == []


def test_without_an_endpoint_there_are_no_traces() -> None:
    async def trace() -> bool:
        async with open_traces(None, "test", {}) as traces:
            return traces is None

    assert asyncio.run(trace())


def test_without_the_extra_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("molink.tracing.find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'molink\[traces\]'"):
        check_endpoint("http://127.0.0.1:4318")
