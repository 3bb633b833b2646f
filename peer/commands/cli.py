"""`molink-peer`: the commands of a volunteer. Torch and libp2p are loaded only where they are needed."""

import asyncio
import json
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from molink import commands
from molink.commands import CommandFailed, example, loading_modules, run_app, start_logging, tell
from molink.peer.commands import options
from molink.progress import Progress

if TYPE_CHECKING:
    from molink.peer.daemon.settings import JoinSettings
    from molink.peer.state_dir import StateDir

CALL_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 120.0
DEFAULT_MODEL = "molink/tiny-shakespeare"
EXAMPLE_PEER = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_OF_LOGGING = frozenset({"verbose", "debug"})

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
def join(
    model: options.Model = None,
    model_name: options.ModelName = None,
    initial_peers: commands.InitialPeers = None,
    new_swarm: options.NewSwarm = False,
    swarm_key: commands.KeyFile = None,
    memory: options.Memory = None,
    device: options.DeviceName = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    exact: options.Exact = None,
    listen: options.Listen = None,
    announce: options.Announce = None,
    port: options.Port = None,
    grpc_port: options.GrpcPort = None,
    name: options.Name = None,
    layers: options.Layers = None,
    partner: options.Partner = None,
    state_dir: options.StateFolder = None,
    relay: options.Relay = None,
    relay_port: options.RelayPort = None,
    offer_relay: options.OfferRelay = None,
    activation_codec: options.ActivationCodec = None,
    micro_batches: options.MicroBatches = None,
    http_proxy: options.HttpProxy = None,
    metrics_port: options.MetricsPort = None,
    transmission_policy: options.TransmissionPolicy = None,
    store_dir: options.StoreFolder = None,
    store_size: options.StoreSize = None,
    swap_space: options.SwapSpace = None,
    pause_when_busy: options.PauseWhenBusy = None,
    quiet_hours: options.QuietHours = None,
    on_battery: options.OnBattery = None,
    threads: options.Threads = None,
    priority: options.Priority = None,
    wait: options.Wait = None,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Join a swarm and serve.

    Serves until Ctrl-C, which drains and leaves; a second one leaves at once. Where to join: --initial-peers,
    else MOLINK_INITIAL_PEERS, else the configuration file; a new one is founded if none of them names one.
    """
    options_here = dict(locals())  # before anything else has a name here; they are called as settings are
    start_logging(verbose=verbose, debug=debug)
    _serve(_given(options_here))


@app.command(epilog=example("molink-peer profile --model molink/tiny-shakespeare --json"))
def profile(
    model: options.MeasuredModel = DEFAULT_MODEL,
    device: options.DeviceName = "auto",
    dtype: options.Dtype = "auto",
    threads: options.Threads = None,
    state_dir: options.StateFolder = None,
    as_json: commands.Json = False,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Measure this machine.

    Memory, time per layer by batch size, disk and network, with the weights of a model.
    """
    start_logging(verbose=verbose, debug=debug)
    from molink.configuration import check_configuration

    settings = check_configuration({"dtype": dtype, "threads": threads}, "the command line")
    from molink.peer.commands.overview import print_machine
    from molink.peer.commands.surveys import measure_machine

    with Progress() as progress:
        progress.begin(f"Measuring with {model}")
        machine = measure_machine(
            model,
            device or "auto",
            settings.dtype or "auto",
            settings.threads,
            _folder(state_dir),
            progress.report,
            tell,
        )
    if as_json:
        _print_json(machine)
    else:
        print_machine(machine)


@app.command(epilog=example(f"molink-peer status --initial-peers {EXAMPLE_PEER} --json"))
def status(
    initial_peers: commands.InitialPeers = None,
    swarm_key: commands.KeyFile = None,
    state_dir: options.StateFolder = None,
    as_json: commands.Json = False,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Show the swarm.

    What the peer that runs here knows; where --initial-peers names others, or none runs here and the environment or
    the configuration file names them, their swarm as it is seen from outside.
    """
    start_logging(verbose=verbose, debug=debug)
    from molink.configuration import configured_initial_peers, environment_configuration, read_configuration
    from molink.peer.commands.overview import print_local, print_swarm

    addresses = configured_initial_peers(initial_peers)
    folder = _folder(state_dir)
    print_it: Callable[[Mapping[str, object]], None]
    if not initial_peers and (not addresses or state_dir is not None or _is_running(folder)):
        content, print_it = _call("status", folder), print_local
    else:
        from molink.peer.commands.surveys import view_swarm

        key = swarm_key or environment_configuration().swarm_key or read_configuration().swarm_key
        content, print_it = asyncio.run(view_swarm(addresses, key)), print_swarm
        if not initial_peers and not as_json:
            print(f"No peer runs here with {folder}. Seen from outside, by the configured {addresses[0]}:")
    if as_json:
        _print_json(content)
    else:
        print_it(content)


@app.command(epilog=example("molink-peer leave --state-dir ~/second-peer"))
def leave(
    state_dir: options.StateFolder = None,
    now: options.LeaveNow = False,
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Stop the peer of this machine.

    It drains first, unless told --now: sessions that run end as they should. Returns when the peer has gone.
    """
    start_logging(verbose=verbose, debug=debug)
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
def swarm_key(
    file: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to make.")] = Path("swarm.key"),
    verbose: commands.Verbose = False,
    debug: commands.Debug = False,
) -> None:
    """Make the key of a private swarm.

    Peers and clients that have the file form a private swarm, and refuse all others.
    """
    start_logging(verbose=verbose, debug=debug)
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `molink-peer`."""
    sys.exit(run_app(app, "molink-peer", sys.argv[1:] if arguments is None else arguments))


def _given(options_here: Mapping[str, object]) -> dict[str, object]:
    """Those options that were given, as settings are: no flag that was left out, and lists as tuples."""
    given: dict[str, object] = {}
    for name, value in options_here.items():
        if name in _OF_LOGGING or value is None or value is False or value == []:
            continue
        given[name] = tuple(value) if isinstance(value, list) else value
    return given


def _serve(given: Mapping[str, object]) -> None:
    """What `join` does once its arguments are known; the cheap checks come before torch is imported."""
    with loading_modules():
        from molink.configuration import check_configuration
        from molink.peer.daemon.settings import load_settings
        from molink.peer.device.device import keep_gpu_memory_whole, lower_priority
        from molink.peer.device.machine import raise_descriptor_limit
        from molink.peer.state_dir import StateDir, StateDirInUse
        from molink.shards.checkpoint import catalog

    settings = load_settings(check_configuration(given, "the command line"))
    if settings.model is not None:
        try:
            catalog.check_identifier(settings.model)
        except catalog.ModelNotFound as error:
            raise CommandFailed(str(error)) from error
    raise_descriptor_limit()
    keep_gpu_memory_whole(platform.system(), os.environ)
    if settings.priority == "low":
        lower_priority()  # now, before there are threads that would keep the priority that they began with
    try:
        with StateDir(settings.state_dir) as state:
            _run_peer(settings, state)
    except StateDirInUse as error:
        raise CommandFailed(str(error)) from error


def _run_peer(settings: "JoinSettings", state: "StateDir") -> None:
    """Says where the peer joins, and runs it until it has left."""
    from molink.shards.loading.early_libraries import begin_loading_torch

    begin_loading_torch()  # priority and environment are as they should be; the next second is imports
    from molink.dht.host.lean_libp2p import load_lean_libp2p
    from molink.peer.daemon.running import ProgressLines, run_until_left, say
    from molink.peer.daemon.settings import where_to_join
    from molink.shards.loading.lean_transformers import load_lean_transformers

    say(where_to_join(settings).reason)
    if settings.listen not in ("127.0.0.1", "::1", "localhost"):
        say(f"Listening on {settings.listen}: other machines can reach this peer")
    with loading_modules():
        load_lean_libp2p()
        load_lean_transformers()
        from molink.peer.daemon.bootstrap import PeerError
        from molink.peer.daemon.peer import Peer

    progress = ProgressLines(say)
    peer = Peer(settings, state, progress.report)
    private = settings.swarm_key is not None
    try:
        asyncio.run(run_until_left(peer, state.path, progress, private=private))
    except PeerError as error:
        raise CommandFailed(str(error)) from error


def _folder(state_dir: Path | None) -> Path:
    """The state directory: that given, else the environment's, the configuration file's, or the default."""
    from molink.configuration import environment_configuration, read_configuration
    from molink.peer.daemon.settings import default_state_dir

    named = state_dir or environment_configuration().state_dir or read_configuration().state_dir
    return (named or default_state_dir()).expanduser().absolute()


def _is_running(folder: Path) -> bool:
    """Whether a peer of that state directory answers."""
    from molink.peer.daemon.control import ControlError, NoPeerRunning, call_peer

    try:
        asyncio.run(call_peer(folder, "status", CALL_TIMEOUT_S))
    except ControlError as error:
        return not isinstance(error, NoPeerRunning)
    return True


def _call(command: str, folder: Path) -> dict[str, object]:
    from molink.peer.daemon.control import ControlError, call_peer

    try:
        return asyncio.run(call_peer(folder, command, CALL_TIMEOUT_S))
    except ControlError as error:
        raise CommandFailed(str(error)) from error


def _print_json(content: dict[str, object]) -> None:
    print(json.dumps(content, indent=2))
