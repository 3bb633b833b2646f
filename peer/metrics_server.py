"""GET /metrics for Prometheus, on this machine only."""

import asyncio
from collections.abc import Iterable
from types import TracebackType
from typing import Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from molink.peer.link.acceptor import PortInUse

HOST = "127.0.0.1"
ANSWER_TIMEOUT_S = 5.0


class MetricsServer:
    """Serves a registry over HTTP between `__aenter__` and `__aexit__`.

    Requests come on threads of prometheus_client's own; what they ask for is looked up on the event loop, whose the
    links are.
    """

    def __init__(self, registry: CollectorRegistry, port: int) -> None:
        self.port = port
        self._registry = registry
        self._server: WSGIServer | None = None

    async def __aenter__(self) -> Self:
        """Raises PortInUse."""
        on_loop = _OnLoop(self._registry, asyncio.get_running_loop())
        try:
            self._server, _ = start_http_server(self.port, HOST, on_loop)
        except OSError as error:
            raise PortInUse(
                f"metrics cannot be served on {HOST}:{self.port}: the port is in use. Choose another with "
                "--metrics-port."
            ) from error
        self.port = self._server.server_port
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()


class _OnLoop(CollectorRegistry):
    """A registry whose metrics are collected on an event loop, asked from any other thread."""

    def __init__(self, registry: Collector, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._inner = registry
        self._loop = loop

    def collect(self) -> Iterable[Metric]:
        """Raises TimeoutError if the loop is busy for too long."""
        return asyncio.run_coroutine_threadsafe(self._collect(), self._loop).result(ANSWER_TIMEOUT_S)

    async def _collect(self) -> list[Metric]:
        return list(self._inner.collect())
