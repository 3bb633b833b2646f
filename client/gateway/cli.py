"""`molink-gateway`: the HTTP gateway as a command."""

import errno
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from molink import commands
from molink.client.commands import options
from molink.client.gateway.key_commands import DatabaseUrl, keys_app, usage
from molink.client.gateway.nodes.node_commands import nodes_app
from molink.client.gateway.services.service_commands import services_app
from molink.client.gateway.shares import LOCAL, user_of
from molink.client.gateway.slots import WAITING_S
from molink.commands import EXIT_USAGE, CommandFailed, example, run_app, start_logging, tell
from molink.configuration import SettingsError, check_address, checked_otlp_endpoint, configured
from molink.logs import log_as_json
from molink.signals import run_loop

if TYPE_CHECKING:
    from molink.client.gateway.accounts.gatekeeper import Gatekeeper

EXAMPLE_PEER: Final = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_app = typer.Typer(
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


_app.add_typer(keys_app)
_app.add_typer(services_app)
_app.add_typer(nodes_app)
_app.command(epilog=example("molink-gateway usage --days 7"))(usage)


@_app.callback(
    invoke_without_command=True, epilog=example(f"molink-gateway --port 8000 --initial-peers {EXAMPLE_PEER}")
)
def serve(
    context: typer.Context,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 for every network.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="Port to listen on; 0 for any free one.")
    ] = 8000,
    initial_peers: commands.InitialPeers = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="ID_OR_PATH",
            help="The one model to serve; without it, each that peers of the swarm serve.",
        ),
    ] = None,
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
    public: Annotated[
        bool,
        typer.Option(
            "--public", help="Serve on another address than this machine's own although there are no keys."
        ),
    ] = False,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web page's origin, such as https://chat.example, that browsers let use this gateway; repeat it for "
            "several. None, unless told.",
        ),
    ] = None,
    invite: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MULTIADDR",
            help="Address of a peer that the page shows to all, in the command that joins. Repeat it for several.",
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL",
            help="Further name under which a model may be asked for, such as gpt-4o=molink/tiny-shakespeare; repeat "
            "it for several.",
        ),
    ] = None,
    queue_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.1, max=300, help="Longest wait of a request for its turn."),
    ] = WAITING_S,
    keep_responses: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            min=0.1,
            max=8760,
            help="Keep what /v1/responses answers for so long, for requests that go on from it; nothing, unless told.",
        ),
    ] = None,
    otlp_endpoint: Annotated[str | None, commands.option("otlp_endpoint")] = None,
    log_format: Annotated[str | None, commands.option("log_format")] = None,
    database: DatabaseUrl = None,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of its database, and of the identity by which peers know it again after a restart: this "
            "user's, unless told.",
        ),
    ] = None,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
    _version: commands.Version = False,
) -> None:
    """Serve a swarm's models over HTTP, to any OpenAI or Anthropic client.

    Without --model, each model that peers of the swarm serve may be asked for; with it, that one.
    Serves until Ctrl-C, which lets running answers go on for up to 10 s; a second one does not. Where the swarm is:
    --initial-peers, else MOLINK_INITIAL_PEERS, else the configuration file. As soon as there is a key, every request
    needs one.
    """
    if context.invoked_subcommand is not None:
        _require_no_options(context)
        return
    start_logging(verbose=verbose, debug=debug)
    if configured("log_format", log_format) == "json":
        log_as_json()
    serving = {
        "max_requests": max_requests,
        "waiting_s": queue_timeout,
        "hosts": (host, *(allow_host or ())),
        "origins": tuple(map(_origin, allow_origin or ())),
        "invites": _checked_invites(invite or ()),
        "all_models": model is None,
        "keep_responses_hours": keep_responses,
        "aliases": _checked_aliases(alias or ()),
        "otlp_endpoint": checked_otlp_endpoint(configured("otlp_endpoint", otlp_endpoint)),
    }
    try:
        listener = _listen(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            advice = "Name an address of this machine with --host, such as 127.0.0.1"
        else:
            advice = "Choose another with --port, or --port 0 for any"
        raise CommandFailed(f"cannot listen on {host}:{port}: {reason}. {advice}.") from error
    with listener:
        from molink.client.errors import InvalidRequest, SwarmError
        from molink.client.gateway.accounts.errors import DatabaseUnusable, InvalidDatabaseUrl
        from molink.client.gateway.kept_identity import IdentityUnusable

        swarm_options = {"initial_peers": initial_peers or None, "swarm_key": swarm_key}
        try:
            run_loop(_serve(listener, serving, model, swarm_options, database, state_dir, public=public))
        except (InvalidRequest, InvalidDatabaseUrl) as error:
            raise CommandFailed(str(error), EXIT_USAGE) from error
        except (IdentityUnusable, DatabaseUnusable) as error:
            raise CommandFailed(str(error)) from error
        except SwarmError as error:
            raise CommandFailed(f"the swarm cannot be joined: {error}") from error


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the swarm is joined, so that a port in use is said at once."""
    [(family, _, _, _, address), *_] = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    return socket.create_server(address[:2], family=family)


def _checked_aliases(given: Sequence[str]) -> dict[str, str]:
    """Models by the further names that they are to have."""
    aliases: dict[str, str] = {}
    for one in given:
        name, separator, model = (part.strip() for part in one.partition("="))
        if not (name and separator and model) or name in aliases:
            raise CommandFailed(f"--alias takes NAME=MODEL, each name once, not {one!r}", EXIT_USAGE)
        aliases[name] = model
    return aliases


def _checked_invites(addresses: Sequence[str]) -> tuple[str, ...]:
    try:
        return tuple(map(check_address, addresses))
    except SettingsError as error:
        raise CommandFailed(f"--invite: {error}", EXIT_USAGE) from error


async def _serve(
    listener: socket.socket,
    serving: Mapping[str, Any],
    model: str | None,
    swarm_options: Mapping[str, Any],
    database: str | None,
    state_dir: Path | None,
    *,
    public: bool,
) -> None:
    from molink.client.gateway.accounts.opening import opened_accounts
    from molink.client.gateway.apis.kept_responses import KeptResponses
    from molink.client.gateway.kept_identity import default_folder, gateway_identity
    from molink.client.gateway.nodes.node_admin import AccessTerms, NodeAdmin
    from molink.client.gateway.nodes.node_store import NodeStore
    from molink.client.gateway.server import Serving, serve_app
    from molink.client.gateway.services.operation_store import OperationStore
    from molink.client.gateway.services.service_admin import opened_services

    async with opened_accounts(database, state_dir or default_folder()) as accounts:
        _say_who_may_use_it(listener, accounts.gatekeeper, public=public)
        from molink.client.api.swarm import AsyncSwarm
        from molink.client.text.text_processes import TextProcesses

        swarm = AsyncSwarm(model, **swarm_options)
        swarm.text_work = TextProcesses
        options = Serving(**serving)
        with gateway_identity(state_dir) as swarm.identity:
            own_id = swarm.identity.peer_id
            terms = AccessTerms(own_id, options.invites, _swarm_key_line(swarm_options["swarm_key"]))
            operations = OperationStore(accounts.database)
            async with (
                swarm,
                opened_services(swarm, accounts.database, own_id, options.waiting_s) as services,
                NodeAdmin(
                    swarm, NodeStore(accounts.database), operations, terms, services.keeper.needed_model
                ) as nodes,
            ):
                hours = options.keep_responses_hours
                kept = None if hours is None else KeptResponses(accounts.database, hours)
                await serve_app(swarm, listener, accounts.gatekeeper, options, services, nodes, kept)


def _swarm_key_line(path: Path | None) -> str | None:
    """What machines that register need of a private swarm's key; None: the swarm is open, or the key is not usable,
    which whoever opens the swarm says."""
    from molink.configuration import read_configuration
    from molink.dht.identity.key_file import KeyFileError
    from molink.dht.identity.swarm_key import SwarmKey

    path = path or read_configuration().swarm_key
    try:
        return None if path is None else SwarmKey.load(Path(path)).line
    except (KeyFileError, OSError):
        return None


def _say_who_may_use_it(listener: socket.socket, gatekeeper: "Gatekeeper", *, public: bool) -> None:
    """Raises `CommandFailed` if that would be everybody and nobody said so."""
    address = listener.getsockname()[0]
    if gatekeeper.asks_for_keys:
        tell(f"Every request needs a key; {gatekeeper.usable_keys} can be used now.")
    elif user_of(address) != LOCAL:
        if not public:
            raise CommandFailed(
                f"there are no keys, and whoever reaches {address} could use this gateway: make one with "
                "`molink-gateway keys create NAME`, or say --public"
            )
        tell(f"There are no keys: whoever reaches {address} may use this gateway.")


def _require_no_options(context: typer.Context) -> None:
    """Options of the server before another command would be lost without a word."""
    given = [
        name
        for name in context.params
        if (source := context.get_parameter_source(name)) is not None and source.name == "COMMANDLINE"
    ]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise CommandFailed(
            f"{option} stands before {context.invoked_subcommand}, where it has no effect: write it after the command",
            EXIT_USAGE,
        )


def _origin(text: str) -> str:
    """The same origin, as browsers write it."""
    if text == "*" or re.fullmatch(r"https?://[^/\s?#@]+", text.lower()):
        return text.lower()
    raise CommandFailed(
        f"--allow-origin takes an origin such as https://chat.example, or *, not {text!r}", EXIT_USAGE
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-gateway`."""
    sys.exit(run_app(_app, "molink-gateway", sys.argv[1:] if arguments is None else arguments, bare=True))
