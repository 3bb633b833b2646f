"""GET /metrics for Prometheus, on this machine only."""

import asyncio
import logging
from email.parser import BytesHeaderParser
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from molink.dht.errors import PortInUse
from molink.peer.daemon.local_listener import HOST, LocalListener

PATH = "/metrics"
REQUEST_BYTES = 16 * 1024
_END = b"\r\n\r\n"
_log = logging.getLogger(__name__)


class MetricsServer:
    """Serves a registry over HTTP between `__aenter__` and `__aexit__`."""

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        self._registry = registry
        self._listener = LocalListener(_head, self._answer, REQUEST_BYTES, port)

    @property
    def port(self) -> int:
        return self._listener.port

    async def __aenter__(self) -> Self:
        """Raises PortInUse."""
        try:
            await self._listener.__aenter__()
        except OSError as error:
            raise PortInUse(
                f"metrics cannot be served on {HOST}:{self.port}: the port is in use. Choose another with "
                "--metrics-port."
            ) from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._listener.__aexit__(kind, error, trace)

    def _answer(self, head: bytes) -> bytes:
        request, _, headers = head.partition(b"\r\n")
        method, _, rest = request.decode("latin-1").partition(" ")
        if rest.partition(" ")[0].partition("?")[0] not in (PATH, "/"):
            return _response(
                "404 Not Found", "text/plain; charset=utf-8", f"metrics are at {PATH}\n".encode()
            )
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain; charset=utf-8", b"only GET is known\n")
        encode, content_type = choose_encoder(BytesHeaderParser().parsebytes(headers).get("Accept", ""))
        try:
            body = encode(self._registry)
        except Exception:  # noqa: BLE001 - request boundary: a failing metric must not end the server
            _log.exception("the metrics could not be told")
            return _response(
                "500 Internal Server Error", "text/plain; charset=utf-8", b"see the peer's log\n"
            )
        response = _response("200 OK", content_type, body)
        return response if method == "GET" else response[: len(response) - len(body)]


async def _head(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(_END)


def _response(status: str, content_type: str, body: bytes) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
