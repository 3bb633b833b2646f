"""Traces of requests: spans that are sent to a collector over OTLP, by OpenTelemetry (extra `molink[traces]`).

A trace goes with its request: from the W3C `traceparent` header of whoever asks, through the gateway, in the session's
descriptor, to each hop of the circuit. What is written into spans are names, numbers and kinds of errors: never what
was asked or answered. Nothing of OpenTelemetry is loaded before `open_traces` is given an endpoint.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Literal, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

CONTEXT_BYTES: Final = 25
"""Of a trace context in a session's descriptor: trace id, span id, flags."""
CLOSES_WITHIN_S: Final = 3.0
"""For so long a process that ends waits for its last spans to be taken."""
_PATH: Final = "/v1/traces"
_EXPORTER: Final = "opentelemetry.exporter.otlp.proto.http"
_SAMPLED: Final = 1
_HEADER: Final = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
Attribute = str | bool | int | float | Sequence[str] | Sequence[float]
SpanKind = Literal["server", "internal"]


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Trace context (W3C Trace Context, level 1): which span of which trace something is a part of."""

    trace_id: bytes
    """16 bytes, not all zero."""
    span_id: bytes
    """8 bytes, not all zero."""
    sampled: bool
    """Whether spans of the trace are kept."""

    def __post_init__(self) -> None:
        if len(self.trace_id) != 16 or len(self.span_id) != 8:
            raise ValueError("a trace has an id of 16 bytes, and a span one of 8")
        if not any(self.trace_id) or not any(self.span_id):
            raise ValueError("the id of a trace or a span is not all zero")

    def to_bytes(self) -> bytes:
        """CONTEXT_BYTES bytes, as they stand in a session's descriptor."""
        return self.trace_id + self.span_id + bytes([_SAMPLED if self.sampled else 0])

    @classmethod
    def from_bytes(cls, content: bytes) -> Self | None:
        """What `to_bytes` made; None of no bytes, which are no trace.

        Raises:
            ValueError: it is something else.
        """
        if not content:
            return None
        if len(content) != CONTEXT_BYTES:
            raise ValueError(f"a trace context has {CONTEXT_BYTES} bytes, not {len(content)}")
        return cls(content[:16], content[16:24], bool(content[24] & _SAMPLED))


def parse_traceparent(header: str) -> TraceContext | None:
    """The context that a `traceparent` header names; None if it is not valid, and then a new trace begins.

    Of versions to come what this one has is read, as the recommendation asks (section 4.3).
    """
    found = _HEADER.fullmatch(header.strip())
    if found is None or found["version"] == "ff" or (found["version"] == "00" and found["more"]):
        return None
    try:
        return TraceContext(
            bytes.fromhex(found["trace"]),
            bytes.fromhex(found["span"]),
            bool(int(found["flags"], 16) & _SAMPLED),
        )
    except ValueError:
        return None


class TraceSpan:
    """Span of a trace that is under way. All of its times are of the system's clock, in nanoseconds."""

    def __init__(self, traces: "Traces", span: "Span") -> None:
        self._traces = traces
        self._span = span

    @property
    def context(self) -> TraceContext:
        """By which others become parts of this span."""
        of = self._span.get_span_context()
        return TraceContext(of.trace_id.to_bytes(16), of.span_id.to_bytes(8), of.trace_flags.sampled)

    def begin(
        self, name: str, attributes: Mapping[str, Attribute] = {}, began_ns: int | None = None
    ) -> "TraceSpan | None":
        """Begins a part of this span."""
        return self._traces.begin(name, self.context, attributes, began_ns=began_ns)

    def record(
        self, name: str, began_ns: int, ended_ns: int, attributes: Mapping[str, Attribute] = {}
    ) -> None:
        """Records a part of this span that is over."""
        if (part := self.begin(name, attributes, began_ns)) is not None:
            part.end(at_ns=ended_ns)

    def note(self, event: str, attributes: Mapping[str, Attribute] = {}) -> None:
        """Notes that something has happened now."""
        self._span.add_event(event, dict(attributes))

    def end(
        self,
        attributes: Mapping[str, Attribute] = {},
        *,
        name: str = "",
        fault: str = "",
        at_ns: int | None = None,
    ) -> None:
        """Ends it. `name`: instead of that which it began with. `fault`: the kind of error that it ended with, in a
        word; not a sentence, which may quote somebody."""
        if name:
            self._span.update_name(name)
        self._span.set_attributes(dict(attributes))
        if fault:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", fault)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(at_ns)


class Traces:
    """Traces of one process, as its sampler keeps them. Spans wait in a bounded queue; if it is full, they are lost."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("molink")

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Mapping[str, Attribute] = {},
        *,
        kind: SpanKind = "internal",
        began_ns: int | None = None,
    ) -> TraceSpan | None:
        """Begins a span as a part of `parent`, or a trace; None if the sampler keeps none of it.

        Unless OTEL_TRACES_SAMPLER says otherwise, what the parent says is kept, and every new trace.
        """
        from opentelemetry import trace

        context = trace.set_span_in_context(trace.INVALID_SPAN)
        if parent is not None:
            of = trace.SpanContext(
                int.from_bytes(parent.trace_id),
                int.from_bytes(parent.span_id),
                is_remote=True,
                trace_flags=trace.TraceFlags(_SAMPLED if parent.sampled else 0),
            )
            context = trace.set_span_in_context(trace.NonRecordingSpan(of), context)
        span = self._tracer.start_span(
            name,
            context,
            trace.SpanKind.SERVER if kind == "server" else trace.SpanKind.INTERNAL,
            dict(attributes),
            start_time=began_ns,
        )
        return TraceSpan(self, span) if span.is_recording() else None

    def close(self) -> None:
        """Sends what waits. It may wait for the collector."""
        self._provider.shutdown()


CURRENT_SPAN: ContextVar[TraceSpan | None] = ContextVar("CURRENT_SPAN", default=None)
"""The span that whatever is begun now is a part of; None: it is not traced."""


def check_endpoint(url: str) -> str:
    """Where spans are sent for the collector at `url`.

    Raises:
        ValueError: it is not the URL of one, or the extra `molink[traces]` is not installed.
    """
    if not _is_available():
        raise ValueError("sending traces needs OpenTelemetry: pip install 'molink[traces]'")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(
            f"{url!r} is not the URL of a collector: give one such as http://127.0.0.1:4318, to which spans are sent "
            "over OTLP (HTTP)"
        )
    return url if parts.path.strip("/") else url.rstrip("/") + _PATH


def _is_available() -> bool:
    """The interfaces of OpenTelemetry come with other packages; what sends spans comes with the extra."""
    try:
        return find_spec("opentelemetry.sdk") is not None and find_spec(_EXPORTER) is not None
    except ModuleNotFoundError:
        return False


@asynccontextmanager
async def open_traces(
    endpoint: str | None, service: str, attributes: Mapping[str, str]
) -> AsyncGenerator[Traces | None, None]:
    """Traces that are sent to the collector at `endpoint`; None without one.

    Headers, certificates, compression and sampling are OpenTelemetry's own settings (OTEL_EXPORTER_OTLP_HEADERS, ...).

    Raises:
        ValueError: as `check_endpoint`.
    """
    if not endpoint:
        yield None
        return
    url = check_endpoint(endpoint)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, **attributes})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    traces = Traces(provider)
    try:
        yield traces
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSES_WITHIN_S):
                await asyncio.to_thread(traces.close)
