"""`molink-peer`: the commands of a volunteer. Torch and libp2p are loaded only where they are needed."""

import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from molink import commands
from molink.commands import (
    EXIT_FAILURE,
    EXIT_USAGE,
    CommandFailed,
    example,
    loading_modules,
    option,
    run_app,
    tell,
    with_all_options,
    with_logging,
)
from molink.logs import log_as_json
from molink.peer.commands.access_command import add_access
from molink.progress import Progress
from molink.signals import run_loop

if TYPE_CHECKING:
    from molink.peer.daemon.settings import JoinSettings
    from molink.peer.deaths import FaultLog, PastDeaths
    from molink.peer.state_dir import StateDir

CALL_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 120.0
DEFAULT_MODEL = "molink/tiny-shakespeare"
EXAMPLE_PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."

app = typer.Typer(
    name="molink-peer",
    help="Serve a few layers of a language model to a swarm.",
    epilog=example("molink-peer join --new-swarm"),
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback()
def _common(_version: commands.Version = False) -> None:
    """Serve a few layers of a language model to a swarm."""


@app.command(epilog=example(f"molink-peer join --initial-peers {EXAMPLE_PEER} --memory 10GB"))
@with_logging
@with_all_options
def join(given: Mapping[str, object]) -> None:
    """Join a swarm and serve.

    Serves until Ctrl-C, which drains and leaves; a second one leaves at once. Where to join: --initial-peers,
    else MOLINK_INITIAL_PEERS, else the configuration file; a new one is founded if none of them names one.
    """
    _serve(given)


@app.command(epilog=example("molink-peer profile --model molink/tiny-shakespeare --json"))
@with_logging
def profile(
    model: Annotated[str, typer.Option(metavar="ID_OR_PATH", help="Model to measure with.")] = DEFAULT_MODEL,
    device: Annotated[str, option("device")] = "auto",
    dtype: Annotated[str, option("dtype")] = "auto",
    threads: Annotated[int | None, option("threads")] = None,
    state_dir: commands.StateFolder = None,
    as_json: commands.Json = False,
) -> None:
    """Measure this machine.

    Memory, time per layer by batch size, disk and network, with the weights of a model.
    """
    from molink.configuration import COMMAND_LINE, check_given

    check_given({"dtype": dtype, "threads": threads}, COMMAND_LINE)
    from molink.peer.commands.overview import print_machine
    from molink.peer.commands.surveys import measure_machine

    with Progress() as progress:
        progress.begin(f"Measuring with {model}")
        machine = measure_machine(
            model,
            device or "auto",
            dtype or "auto",
            threads,
            _folder(state_dir),
            progress.report,
            tell,
        )
    if as_json:
        _print_json(machine)
    else:
        print_machine(machine)


@app.command(epilog=example(f"molink-peer status --initial-peers {EXAMPLE_PEER} --json"))
@with_logging
def status(
    initial_peers: commands.InitialPeers = None,
    swarm_key: commands.KeyFile = None,
    state_dir: commands.StateFolder = None,
    as_json: commands.Json = False,
) -> None:
    """Show the swarm.

    What the peer that runs here knows; where --initial-peers names others, or none runs here and the environment or
    the configuration file names them, their swarm as it is seen from outside.
    """
    from molink.configuration import configured_initial_peers
    from molink.peer.commands.overview import print_local, print_swarm

    addresses = configured_initial_peers(initial_peers)
    folder = _folder(state_dir)
    print_it: Callable[[Mapping[str, object]], None]
    if not initial_peers and (not addresses or state_dir is not None or _is_running(folder)):
        content, print_it = _call("status", folder), print_local
    else:
        from molink.peer.commands.surveys import view_swarm

        key = swarm_key or _configured_path("swarm_key")
        content, print_it = run_loop(view_swarm(addresses, key)), print_swarm
        if not initial_peers and not as_json:
            print(f"No peer runs here with {folder}. Seen from outside, by the configured {addresses[0]}:")
    if as_json:
        _print_json(content)
    else:
        print_it(content)


@app.command(epilog=example(f"molink-peer doctor --initial-peers {EXAMPLE_PEER}"))
@with_logging
def doctor(
    initial_peers: commands.InitialPeers = None,
    swarm_key: commands.KeyFile = None,
    grpc_port: Annotated[int | None, option("grpc_port")] = None,
    relay_port: Annotated[int | None, option("relay_port")] = None,
    state_dir: commands.StateFolder = None,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Print what runs here instead, for a report: no names, addresses or keys."
        ),
    ] = False,
    as_json: commands.Json = False,
) -> None:
    """Find out what would keep this machine from serving.

    How others see and reach it, which relays there are and how far away, a trial of each way to others, clock, disk,
    device and versions; each finding with what to do about it. Before joining, or beside the peer that runs here.
    Exit status 1 if something has to be mended.
    """
    if report:
        from molink.peer.commands.report import print_report, report_of

        content = report_of(_folder(state_dir))
        if as_json:
            _print_json(content)
        else:
            print_report(content)
        return
    given = {
        "initial_peers": initial_peers,
        "swarm_key": swarm_key,
        "grpc_port": grpc_port,
        "relay_port": relay_port,
        "state_dir": state_dir,
    }
    findings = _examine({name: value for name, value in given.items() if value is not None})
    if as_json:
        _print_json(findings)
    else:
        from molink.peer.commands.doctor import print_findings

        print_findings(findings)
    if not findings["healthy"]:
        raise typer.Exit(EXIT_FAILURE)


@app.command(epilog=example("molink-peer leave --state-dir ~/second-peer"))
@with_logging
def leave(
    state_dir: commands.StateFolder = None,
    now: Annotated[
        bool, typer.Option("--now", help="Leave at once: sessions that run are cut off, and go on elsewhere.")
    ] = False,
) -> None:
    """Stop the peer of this machine.

    It drains first, unless told --now: sessions that run end as they should. Returns when the peer has gone.
    """
    from molink.peer.state_dir import wait_until_free

    folder = _folder(state_dir)
    _call("leave-now" if now else "leave", folder)
    if not wait_until_free(folder, LEAVE_TIMEOUT_S):
        raise CommandFailed(
            f"the peer was told to leave, but still runs after {LEAVE_TIMEOUT_S:g} s: it may be finishing "
            "long sessions; wait, or try `molink-peer leave --now`"
        )
    print("The peer has left")


@app.command("swarm-key", epilog=example("molink-peer swarm-key friends.key"))
@with_logging
def swarm_key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to make.")] = Path("swarm.key"),
) -> None:
    """Make the key of a private swarm.

    Peers and clients that have the file form a private swarm, and refuse all others.
    """
    from molink.dht.identity.swarm_key import SwarmKey

    folder = file.absolute().parent
    if not folder.is_dir():
        raise CommandFailed(
            f"{file} cannot be written: there is no folder {folder}; make it, or choose another"
        )
    try:
        SwarmKey.write_new(file)
    except OSError as error:
        if file.exists():
            raise CommandFailed(
                f"{file} exists already and was left as it is: choose another name, or delete it first"
            ) from None
        raise CommandFailed(
            f"{file} cannot be written ({error.strerror or error}): choose a folder that you may write to"
        ) from error
    print(f"Made {file.absolute()}: give each member of the swarm a copy, over a channel that you trust")


@app.command(
    epilog=example("molink-peer service > ~/.config/systemd/user/molink-peer.service  # docs/OPERATIONS.md")
)
def service(
    system: Annotated[
        str | None,
        typer.Option(
            metavar="linux|darwin|windows", help="System that is to start the peer: this one, unless told."
        ),
    ] = None,
) -> None:
    """Print what has this system start a peer with its user.

    A unit of systemd, a property list of launchd, or a task of Windows. What the peer serves and takes stands in the
    configuration file.
    """
    from molink.configuration import configuration_path
    from molink.peer.commands.service import SYSTEMS, service_file

    system = system or platform.system().lower()
    if system not in SYSTEMS:
        raise CommandFailed(f"--system must be one of {', '.join(SYSTEMS)}, got {system!r}", EXIT_USAGE)
    print(service_file(system, (sys.executable, "-m", "molink.peer", "join")), end="")
    tell(f"It starts `molink-peer join`, with the settings of {configuration_path()}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-peer`."""
    sys.exit(run_app(app, "molink-peer", sys.argv[1:] if arguments is None else arguments))


def _serve(given: Mapping[str, object]) -> None:
    """What `join` does once its arguments are known; the cheap checks come before torch is imported."""
    with loading_modules():
        from molink.peer.daemon.local_swarms import ask_where_to_join, names_no_swarm
        from molink.peer.daemon.settings import load_settings
        from molink.peer.deaths import FaultLog, find_deaths
        from molink.peer.device.device import keep_gpu_memory_whole, lower_priority
        from molink.peer.device.machine import raise_descriptor_limit
        from molink.peer.state_dir import StateDir, StateDirInUse
        from molink.shards.checkpoint import catalog

    settings = load_settings(given)
    if settings.options.log_format == "json":
        log_as_json()
    if names_no_swarm(settings):
        settings = load_settings({**given, **ask_where_to_join(settings)})
    if settings.options.model is not None:
        try:
            catalog.check_identifier(settings.options.model)
        except catalog.CheckpointNotFound as error:
            raise CommandFailed(str(error)) from error
    raise_descriptor_limit()
    keep_gpu_memory_whole(platform.system(), os.environ)
    if settings.options.priority == "low":
        lower_priority()  # now, before there are threads that would keep the priority that they began with
    try:
        with StateDir(settings.state_dir) as state, ExitStack() as stack:
            past = find_deaths(state.path)
            faults = FaultLog(state.path)
            try:
                stack.enter_context(faults)
            except OSError as error:
                tell(
                    f"{faults.path} cannot be written ({error.strerror or error}): a crash would leave no trace"
                )
            _run_peer(settings, state, past, faults)
    except StateDirInUse as error:
        raise CommandFailed(str(error)) from error


def _run_peer(settings: "JoinSettings", state: "StateDir", past: "PastDeaths", faults: "FaultLog") -> None:
    """Says where the peer joins, and runs it until it has left."""
    from molink.shards.loading.early_libraries import begin_loading_torch

    begin_loading_torch()  # priority and environment are as they should be; the next second is imports
    from molink.dht.host.lean_libp2p import load_lean_libp2p
    from molink.peer.daemon.running import NO_VIEW, ProgressLines, run_until_left, say
    from molink.peer.daemon.settings import SettingsError, where_to_join
    from molink.shards.loading.lean_transformers import load_lean_transformers

    progress = ProgressLines(say)
    progress.report("Loading torch, transformers and libp2p")
    for line in past.sentences(state.path):
        say(line)
    say(where_to_join(settings).reason)
    if settings.listen not in ("127.0.0.1", "::1", "localhost"):
        say(f"Listening on {settings.listen}: other machines can reach this peer")
    with loading_modules():
        load_lean_libp2p()
        load_lean_transformers()
        from molink.peer.commands.live_view import terminal_view
        from molink.peer.daemon.bootstrap import PeerError
        from molink.peer.daemon.peer import Peer

    peer = Peer(settings, state, progress.report, past=past, faults=faults)
    private = settings.options.swarm_key is not None
    try:
        view = terminal_view() if sys.stdout.isatty() else NO_VIEW
        run_loop(run_until_left(peer, state.path, progress, private=private, view=view))
    except PeerError as error:
        wrong_settings = isinstance(error.__cause__, SettingsError)
        raise CommandFailed(str(error), EXIT_USAGE if wrong_settings else EXIT_FAILURE) from error


def _examine(given: Mapping[str, object]) -> dict[str, object]:
    """What `doctor` finds with these settings, the environment's and the configuration file's."""
    with loading_modules():
        from molink.dht.errors import PortInUse
        from molink.dht.host.lean_libp2p import load_lean_libp2p
        from molink.dht.identity.key_file import KeyFileError
        from molink.peer.commands.doctor import examine
        from molink.peer.daemon.control import ControlError, NoPeerRunning, call_peer
        from molink.peer.daemon.settings import load_settings

        load_lean_libp2p()
    settings = load_settings(given)
    try:
        here = run_loop(call_peer(settings.state_dir, "status", CALL_TIMEOUT_S))
    except NoPeerRunning:
        here = {}
    except ControlError as error:
        raise CommandFailed(str(error)) from error
    try:
        return run_loop(examine(settings, str(here.get("peer_id", ""))))
    except (PortInUse, KeyFileError) as error:
        raise CommandFailed(str(error)) from error


def _folder(state_dir: Path | None) -> Path:
    """The state directory: that given, else the environment's, the configuration file's, or the default."""
    from molink.peer.daemon.settings import default_state_dir

    return (state_dir or _configured_path("state_dir") or default_state_dir()).expanduser().absolute()


def _configured_path(name: str) -> Path | None:
    """What the environment gives for an option, else the configuration file."""
    from molink.configuration import configured

    path: Path | None = configured(name)
    return path


def _is_running(folder: Path) -> bool:
    """Whether a peer of that state directory answers."""
    from molink.peer.daemon.control import ControlError, NoPeerRunning, call_peer

    try:
        run_loop(call_peer(folder, "status", CALL_TIMEOUT_S))
    except ControlError as error:
        return not isinstance(error, NoPeerRunning)
    return True


def _call(command: str, folder: Path) -> dict[str, object]:
    from molink.peer.daemon.control import ControlError, call_peer

    try:
        return run_loop(call_peer(folder, command, CALL_TIMEOUT_S))
    except ControlError as error:
        raise CommandFailed(str(error)) from error


def _print_json(content: dict[str, object]) -> None:
    print(json.dumps(content, indent=2))


add_access(app, _serve, _folder)
