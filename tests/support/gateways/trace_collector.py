"""A collector of traces in a thread of this process, which takes spans over OTLP."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@contextmanager
def collector() -> Iterator[tuple[str, list[Span]]]:
    """Takes spans over OTLP: its URL, and what it has got so far."""
    spans: list[Span] = []

    class Taking(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = ExportTraceServiceRequest()
            request.ParseFromString(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.path == "/v1/traces"
            for of in request.resource_spans:
                for scope in of.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


def value_of(span: Span, name: str) -> object:
    """The value of a span's attribute; None if it has none of that name."""
    for attribute in span.attributes:
        if attribute.key == name:
            return getattr(attribute.value, str(attribute.value.WhichOneof("value")))
    return None
