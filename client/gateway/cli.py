"""`molink-gateway`: the HTTP gateway as a command."""

import asyncio
import socket
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from molink import commands
from molink.client.commands import options
from molink.commands import EXIT_USAGE, CommandFailed, example, run_app, start_logging
from molink.configuration import SettingsError, check_address

EXAMPLE_PEER: Final = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


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
        int,
        typer.Option(metavar="N", min=1, help="Generations at once; a peer lends one gateway memory for 32."),
    ] = 32,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name under which users reach it; repeat it for several. Localhost and addresses always work.",
        ),
    ] = None,
    invite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MULTIADDR",
            help="Address of a peer that the page shows to all, in the command that joins. Repeat it for several.",
        ),
    ] = None,
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="Where keys and services are kept: not in this version.")
    ] = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the identity by which peers know it again after a restart: this user's, unless told.",
        ),
    ] = None,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
    _version: commands.Version = False,
) -> None:
    """Serve a swarm's model over HTTP, to any OpenAI client.

    Serves until Ctrl-C, which lets running answers go on for up to 10 s; a second one does not. Where the swarm is:
    --initial-peers, else MOLINK_INITIAL_PEERS, else the configuration file.
    """
    start_logging(verbose=verbose, debug=debug)
    if database is not None:
        raise CommandFailed(
            "--database: the gateway of this version keeps no keys and no services, so it has nothing to store: "
            "leave the option out",
            EXIT_USAGE,
        )
    invites = _checked_invites(invite or ())
    try:
        listener = _listen(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(
            f"cannot listen on {host}:{port}: {reason}. Choose another with --port, or --port 0 for any."
        ) from error
    with listener:
        from molink.client.errors import InvalidRequest, SwarmError
        from molink.client.gateway.kept_identity import IdentityUnusable

        try:
            hosts = (host, *(allow_host or ()))
            asyncio.run(
                _serve(listener, initial_peers, model, swarm_key, max_requests, hosts, state_dir, invites)
            )
        except IdentityUnusable as error:
            raise CommandFailed(str(error)) from error
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


def _checked_invites(addresses: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(map(check_address, addresses))
    except SettingsError as error:
        raise CommandFailed(f"--invite: {error}", EXIT_USAGE) from error


async def _serve(
    listener: socket.socket,
    initial_peers: list[str] | None,
    model: str | None,
    swarm_key: Path | None,
    max_requests: int,
    hosts: Collection[str],
    state_dir: Path | None,
    invites: Sequence[str],
) -> None:
    from molink.client.api.swarm import AsyncSwarm
    from molink.client.gateway.kept_identity import gateway_identity
    from molink.client.gateway.server import serve_app
    from molink.client.text.text_processes import TextProcesses

    peers = initial_peers or None
    swarm = AsyncSwarm(model, initial_peers=peers, swarm_key=swarm_key)
    swarm.text_work = TextProcesses
    with gateway_identity(state_dir) as swarm.identity:
        async with swarm:
            await serve_app(swarm, listener, max_requests=max_requests, hosts=hosts, invites=invites)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-gateway`."""
    sys.exit(run_app(_app, "molink-gateway", sys.argv[1:] if arguments is None else arguments, bare=True))
