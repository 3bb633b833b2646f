"""The gateway's server: it listens, keeps order among its connections, and stops within the time that it promises."""

import asyncio
import errno
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, cast

import typer
import uvicorn

from molink.client.gateway.accounts.gatekeeper import Gatekeeper
from molink.client.gateway.apis.kept_responses import KeptResponses
from molink.client.gateway.app import add_kept_responses, add_origins, add_traces, create_app
from molink.client.gateway.connections import (
    IDLE_S,
    LOOKS_EVERY_S,
    MOST_CONNECTIONS,
    UNREAD_YIELDS_S,
    Connections,
    GatewayConnection,
)
from molink.client.gateway.generating import Gateway
from molink.client.gateway.models.served_models import ServedModels
from molink.client.gateway.models.swarm_protocol import ServingSwarm
from molink.client.gateway.nodes.node_admin import NodeAdmin
from molink.client.gateway.nodes.node_routes import add_nodes
from molink.client.gateway.services.service_admin import OpenServices
from molink.client.gateway.services.service_routes import add_services
from molink.tracing import open_traces

STOP_TIMEOUT_S: Final = 10.0
"""Answers that are under way when the gateway is stopped may go on for so long."""
LAST_WORDS_S: Final = 0.5
"""Then they have so long to say that they were ended."""
ENDS_AFTER_S: Final = 5.0
"""After all answers have ended, the process has this time to leave the swarm; then it ends all the same."""
BACKLOG: Final = 64
"""Connections that are taken in at one go: as many descriptors are left free of the limit."""
WANTED_DESCRIPTORS: Final = 4096
OTHER_DESCRIPTORS: Final = 64
"""What links, the control plane and text work take."""


class Server(uvicorn.Server):
    """Server that says when it listens, and ends on a signal: first nothing more begins, then nothing more goes on."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway, connections: Connections) -> None:
        super().__init__(config)
        self._gateway = gateway
        self._connections = connections
        self._at_once = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            typer.echo(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        if counter % round(10 * LOOKS_EVERY_S) == 0:
            self._connections.look(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._gateway.stop()
        ending = asyncio.create_task(self._end_answers(), name="end what runs")
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()
            await asyncio.gather(ending, return_exceptions=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and self._loop is not None:
            self._loop.call_soon_threadsafe(self._at_once.set)
        super().handle_exit(signal.SIGTERM, frame)  # which never skips what answers have still to say
        del sig

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As the base class, but SIGHUP counts too, and none is raised again afterwards: stopping is no failure."""
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _end_answers(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._at_once.wait()
        self._gateway.end()
        await asyncio.sleep(LAST_WORDS_S)
        self._connections.abort_all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How a gateway serves: what its operator decided."""

    max_requests: int
    """Generations at once."""
    waiting_s: float
    """Longest wait of a request for its turn."""
    hosts: tuple[str, ...] = ()
    """Names that a request's Host header may have, beside localhost and addresses."""
    origins: tuple[str, ...] = ()
    """Of web pages that browsers let use it (CORS)."""
    invites: tuple[str, ...] = ()
    """Addresses of peers that the page shows to everybody who may join."""
    keep_responses_hours: float | None = None
    """For so long what `/v1/responses` answers is kept; None: not at all."""
    all_models: bool = False
    """Whether the swarm's other models may be asked for too."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of models."""
    otlp_endpoint: str | None = None
    """Of the collector that traces are sent to; None: nothing is traced."""


async def serve_app(
    swarm: ServingSwarm,
    listener: socket.socket,
    gatekeeper: Gatekeeper,
    serving: Serving,
    services: OpenServices | None = None,
    nodes: NodeAdmin | None = None,
    kept: KeptResponses | None = None,
) -> None:
    """Serves the swarm on the socket until a signal comes. Without `kept` no response is kept."""
    connections = Connections(most_connections(_raised_descriptors()))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(functools.partial(_on_loop_error, connections))
    served = ServedModels(
        swarm,
        others=serving.all_models,
        aliases=serving.aliases,
        services=None if services is None else services.keeper,
    )
    traced = open_traces(serving.otlp_endpoint, "molink-gateway", {})
    async with traced as traces, served as models:
        app = create_app(
            models,
            max_requests=serving.max_requests,
            waiting_s=serving.waiting_s,
            allowed_hosts=serving.hosts,
            gatekeeper=gatekeeper,
            make_room=lambda: connections.end_unread(loop.time(), UNREAD_YIELDS_S),
            invites=serving.invites,
        )
        add_traces(app, traces)
        if services is not None:
            add_services(app, services.admin, models, gatekeeper)
        if nodes is not None:
            add_nodes(app, nodes)
        if kept is not None:
            add_kept_responses(app, kept)
        add_origins(app, serving.origins)
        server = Server(server_config(app, connections), app.state.gateway, connections)
        await server.serve(sockets=[listener])
    _end_process_within(ENDS_AFTER_S)


def server_config(app: Any, connections: Connections) -> uvicorn.Config:  # noqa: ANN401 - any ASGI application
    """Configures uvicorn: HTTP/1.1 over connections that are kept in order, and nothing else."""
    protocol = functools.partial(GatewayConnection, connections=connections)
    return uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        lifespan="off",
        log_level="critical",  # failures of requests are told by the application, bad clients by the connections
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=round(IDLE_S),
        timeout_graceful_shutdown=round(STOP_TIMEOUT_S + 2 * ENDS_AFTER_S),
    )


def most_connections(descriptors: int | None) -> int:
    """Returns how many connections a process may hold that may have so many descriptors (None: any number)."""
    if descriptors is None:
        return MOST_CONNECTIONS
    return max(16, min(MOST_CONNECTIONS, descriptors - BACKLOG - OTHER_DESCRIPTORS))


def _raised_descriptors() -> int | None:
    """The most descriptors that this process may have, after asking for as many as it wants."""
    if sys.platform == "win32":
        return None
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= WANTED_DESCRIPTORS:
        return None
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _on_loop_error(
    connections: Connections, loop: asyncio.AbstractEventLoop, context: dict[str, Any]
) -> None:
    """Out of descriptors, the loop takes no connection in for a second, and goes on."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        connections.out_of_descriptors()
    else:
        loop.default_exception_handler(context)


def _end_process_within(seconds: float) -> None:
    """Whatever thread still runs then: who stopped this process waits for it."""
    end = threading.Timer(seconds, os._exit, (0,))
    end.daemon = True
    end.start()
