"""Spans of a peer's hops: parts of their clients' traces, summed up, bounded, and only where a trace is asked for."""

from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.links.data_plane import SPEC, describe, hop_of

from molink.dht.identity.identity import Identity
from molink.peer.engine.hop_traces import MOST_TRACED, HopTraces
from molink.peer.engine.sessions import ServedSession, SessionTable, read_plan
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.shards.spec import Span
from molink.tracing import TraceContext, Traces

PEER, OTHER = Identity.generate(), Identity.generate()
CONTEXT = TraceContext(bytes(range(16)), bytes(range(1, 9)), sampled=True)


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def traces(spans: InMemorySpanExporter) -> HopTraces:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return HopTraces(Traces(provider))


def session(number: int, context: bytes, epoch: int = 1) -> ServedSession:
    hops = [hop_of(PEER, Span(0, 4)), hop_of(OTHER, Span(4, SPEC.layers))]
    descriptor = describe(hops, session=number, epoch=epoch)
    descriptor.trace_context = context
    return ServedSession(read_plan(descriptor, SPEC), 0, owner=None)  # type: ignore[arg-type]


def serve(traces: HopTraces, sessions: Sequence[ServedSession]) -> None:
    """All of them at once, two steps each."""
    table = SessionTable(traces)
    for one in sessions:
        table.add(one)
    for one in sessions:
        for queue_us in (500, 1500):
            traces.record_step(one, pb.HopTiming(queue_us=queue_us, compute_us=3000, link_rtt_us=20_000))
    for one in sessions:
        table.remove(one.key)


def test_a_hop_is_one_span_of_its_clients_trace_with_the_sums_of_its_steps(
    traces: HopTraces, spans: InMemorySpanExporter
) -> None:
    serve(traces, [session(1, CONTEXT.to_bytes())])
    (span,) = spans.get_finished_spans()
    assert span.name == "hop [0, 4)"
    assert span.parent is not None
    assert span.parent.span_id.to_bytes(8) == CONTEXT.span_id
    assert span.context.trace_id.to_bytes(16) == CONTEXT.trace_id
    said = dict(span.attributes or {})
    assert (said["molink.hop.steps"], said["molink.hop.queue_ms"], said["molink.hop.compute_ms"]) == (
        2,
        2.0,
        6.0,
    )
    assert said["molink.hop.link_rtt_ms"] == 20.0
    assert [event.name for event in span.events] == ["first step"]


def test_a_session_that_nobody_traces_or_whose_trace_is_not_kept_has_none(
    traces: HopTraces, spans: InMemorySpanExporter
) -> None:
    unkept = TraceContext(CONTEXT.trace_id, CONTEXT.span_id, sampled=False)
    serve(traces, [session(1, b""), session(2, unkept.to_bytes())])
    assert spans.get_finished_spans() == ()


def test_who_asks_for_many_traces_gets_so_many_at_a_time(
    traces: HopTraces, spans: InMemorySpanExporter
) -> None:
    sessions = [session(number, CONTEXT.to_bytes(), epoch) for number in range(1, 151) for epoch in (1, 2)]
    assert len(sessions) > MOST_TRACED
    for _ in range(2):
        spans.clear()
        for one in sessions:
            traces.begin(one)
        for one in sessions:
            traces.end(one)
        assert len(spans.get_finished_spans()) == MOST_TRACED


@pytest.mark.parametrize("context", [b"x", bytes(25), CONTEXT.to_bytes() + b"x", CONTEXT.to_bytes()[:-1]])
def test_a_context_that_is_none_is_refused(context: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"trace|all zero"):
        session(1, context)
