"""Request traces and the request log: of each request a span, where traces are on, and a line. Never what was asked."""

import logging
from collections.abc import Collection
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from molink.tracing import CURRENT_SPAN, Traces, parse_traceparent

_log = logging.getLogger(__name__)
_TRACEPARENT: Final = b"traceparent"
_CLIENT_LEFT: Final = 499


class RequestTraces:
    """Request traces (ASGI): what is done for a request is a part of its span, and that a part of its client's."""

    def __init__(self, app: ASGIApp, traces: Traces, paths: Collection[str]) -> None:
        """`paths` are those that are traced."""
        self._app = app
        self._traces = traces
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        span = None
        if scope["type"] == "http" and scope["path"] in self._paths:
            name = f"{scope['method']} {scope['path']}"
            parent = parse_traceparent(_header(scope, _TRACEPARENT))
            attributes = {"http.request.method": scope["method"], "http.route": scope["path"]}
            span = self._traces.begin(name, parent, attributes, kind="server")
        if span is None:
            await self._app(scope, receive, send)
            return
        status = _CLIENT_LEFT

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        before = CURRENT_SPAN.set(span)
        try:
            await self._app(scope, receive, watched)
        finally:
            CURRENT_SPAN.reset(before)
            span.end({"http.response.status_code": status}, fault=str(status) if status >= 500 else "")


def log_request(request_id: str, method: str, route: str, status: int, took_s: float) -> None:
    """Logs that a request was answered. `route` is the route as declared, never the path that was asked for."""
    span = CURRENT_SPAN.get()
    fields: dict[str, Any] = {
        "request_id": request_id,
        "method": method,
        "route": route,
        "status": status,
        "duration_s": round(took_s, 6),
    }
    if span is not None:
        fields["trace_id"] = span.context.trace_id.hex()
    _log.info("%s %s was answered with %d in %.3f s", method, route, status, took_s, extra=fields)


def _header(scope: Scope, name: bytes) -> str:
    """The header's value; empty if there is none, or more than one, which no trace context may have."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0].decode("latin-1") if len(values) == 1 else ""
