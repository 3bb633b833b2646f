"""`molink-gateway`: the HTTP gateway as a command."""

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import typer
import uvicorn

from molink.client import options
from molink.dht import commands
from molink.dht.commands import EXIT_USAGE, CommandFailed, example, run_app, start_logging

STOP_TIMEOUT_S: Final = 10
"""Streams still open when the gateway is stopped may go on for so long."""
EXAMPLE_PEER: Final = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


class _Server(uvicorn.Server):
    """Says when it listens, and ends quietly on the first signal."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            typer.echo(f"Listening on http://{f'[{host}]' if ':' in host else host}:{port}")

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As the base class, but without raising the signal again afterwards: stopping is no failure."""
        numbers = [signal.SIGINT, signal.SIGTERM]
        if hasattr(signal, "SIGBREAK"):
            numbers.append(signal.SIGBREAK)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@_app.command(epilog=example(f"molink-gateway --port 8000 --initial-peers {EXAMPLE_PEER}"))
def serve(
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8000,
    initial_peers: commands.InitialPeers = None,
    model: options.Model = None,
    swarm_key: options.KeyFile = None,
    max_requests: Annotated[
        int, typer.Option(metavar="N", min=1, help="Generations under way at once.")
    ] = 64,
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="Where keys and services are kept: not in this version.")
    ] = None,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Serve a swarm's model over HTTP, to any OpenAI client.

    Serves until Ctrl-C, which lets running streams end. Where the swarm is: --initial-peers, else
    MOLINK_INITIAL_PEERS, else the configuration file.
    """
    start_logging(verbose=verbose, debug=debug)
    if database is not None:
        raise CommandFailed(
            "--database: the gateway of this version keeps no keys and no services, so it has nothing to store: "
            "leave the option out",
            EXIT_USAGE,
        )
    try:
        listener = _listen(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(
            f"cannot listen on {host}:{port}: {reason}. Choose another with --port, or --port 0 for any."
        ) from error
    with listener:
        from molink.client.errors import InvalidRequest, SwarmError

        try:
            asyncio.run(_serve(listener, initial_peers, model, swarm_key, max_requests))
        except InvalidRequest as error:
            raise CommandFailed(str(error), EXIT_USAGE) from error
        except SwarmError as error:
            raise CommandFailed(f"the swarm cannot be joined: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the swarm is joined, so that a port in use is said at once."""
    [(family, _, _, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return socket.create_server(address[:2], family=family)


async def _serve(
    listener: socket.socket,
    initial_peers: list[str] | None,
    model: str | None,
    swarm_key: Path | None,
    max_requests: int,
) -> None:
    from molink.client.gateway.app import create_app
    from molink.client.swarm import AsyncSwarm

    async with AsyncSwarm(model, initial_peers=initial_peers or None, swarm_key=swarm_key) as swarm:
        config = uvicorn.Config(
            create_app(swarm, max_requests=max_requests),
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
        )
        await _Server(config).serve(sockets=[listener])


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-gateway`."""
    sys.exit(run_app(_app, "molink-gateway", sys.argv[1:] if arguments is None else arguments, bare=True))
