"""How a peer is to join: command line, environment and configuration file made one checked value."""

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from platformdirs import user_state_dir

from molink.configuration import (
    COMMAND_LINE,
    SettingsError,
    check_address,
    check_given,
    check_http_proxy,
    checked_otlp_endpoint,
    configuration_path,
    environment_initial_peers,
    is_loopback,
    read_environment,
    read_file,
    split_addresses,
)
from molink.dht.identity.addresses import require_host, require_listen_host
from molink.dht.identity.identity import public_key_of
from molink.options import Configuration
from molink.peer.host_policy.rules import HostPolicy, parse_quiet_hours
from molink.peer.scheduling.in_flight_rules import Rule, rule_named
from molink.peer.wire.transmission.policies import POLICIES
from molink.shards.errors import QuantizationUnavailable
from molink.shards.spec import Span
from molink.shards.store.blobs import default_store_folder
from molink.sizes import parse_bytes

__all__ = [
    "JoinSettings",
    "SettingsError",
    "WhereToJoin",
    "default_state_dir",
    "load_settings",
    "where_to_join",
]

_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]+(,[0-9]+)*)?")
_MAPPED = re.compile(r"(\[[^\]]*\]|[^:\[\]]*):([0-9]{1,5}):([0-9]{1,5})")
_LAYERS = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")


@dataclass(frozen=True, slots=True)
class AnnouncedPorts:
    """Ports as others dial them, which something maps to those of this machine."""

    control: int
    data: int
    relay: int | None = None
    """Of the peer's own relay; None: as it is on this machine, if its owner names one."""


@dataclass(frozen=True, slots=True)
class JoinSettings:
    """What `molink-peer join` was asked, checked as far as it can be without a look at devices or models."""

    options: Configuration
    """What holds as it was given. What is made of an option is a field here, and what is read; no other option is."""
    initial_peers: tuple[str, ...]
    memory_bytes: int | None
    """Cap on weights, KV cache and work space together; None: what the device can spare."""
    swap_bytes: int | None
    """Memory of the host for the KV cache of sessions that wait, beside that of a GPU; None: none."""
    store_bytes: int | None
    """How much weights from a hub may take in `store_dir`; None: half of what the disk has free."""
    listen: str
    announced_ports: AnnouncedPorts | None
    """None: as they are on this machine."""
    layers: Span | None
    """Exactly this span from the start; None: what the swarm needs."""
    state_dir: Path
    store_dir: Path
    """Where weights are kept that come from a hub."""
    rule: Rule
    """How many micro-batches circulate, where this peer is the head."""
    host_policy: HostPolicy
    """When the peer steps aside for its owner."""


@dataclass(frozen=True, slots=True)
class WhereToJoin:
    """The swarm that a peer goes to."""

    initial_peers: tuple[str, ...]
    """Whom to ask first; empty: a new swarm is founded."""
    reason: str
    """For people: what happens, and who decided it."""


def default_state_dir() -> Path:
    """Where a peer of this user keeps its identity unless told otherwise."""
    return Path(user_state_dir("molink", appauthor=False)) / "peer"


def load_settings(given: Mapping[str, object], environment: Mapping[str, str] | None = None) -> JoinSettings:
    """The settings of one peer: what the command line has `given` before environment before configuration file
    before defaults.

    Where to join is one decision: the first of the three that says anything about it (initial peers or a new
    swarm) decides it alone.

    Raises:
        SettingsError: one sentence about the first thing that is wrong.
    """
    environment = os.environ if environment is None else environment
    command_line = check_given(given, COMMAND_LINE)
    file, named = read_file(environment), read_environment(environment)
    merged = Configuration(**(file | named | command_line))
    initial_peers, new_swarm = _decide_swarm(
        command_line, environment, file, founds=named.get("new_swarm", False)
    )
    listen = _check_listen(_bare(merged.listen)) or _default_listen(initial_peers)
    _refuse_what_is_missing(merged, listen)
    if merged.port and merged.port == merged.grpc_port:
        raise SettingsError(f"--port and --grpc-port are both {merged.port}: each needs a port of its own")
    announced_host, announced_ports = _split_announce(merged.announce)
    return JoinSettings(
        options=replace(
            merged,
            new_swarm=new_swarm,
            swarm_key=_check_key_file(merged.swarm_key),
            device=_check_device(merged.device),
            announce=_check_announce(_bare(announced_host)),
            http_proxy=check_http_proxy(merged.http_proxy),
            otlp_endpoint=checked_otlp_endpoint(merged.otlp_endpoint),
            transmission_policy=_check_policy(merged.transmission_policy),
            offer_relay=_check_offer(merged.offer_relay),
            partner=_check_partner(merged.partner),
            operator=tuple(map(_check_operator, merged.operator or ())),
        ),
        initial_peers=initial_peers,
        memory_bytes=_parse_size(merged.memory, "--memory", "serve with"),
        swap_bytes=_parse_size(merged.swap_space, "--swap-space", "swap into"),
        store_bytes=_parse_size(merged.store_size, "--store-size", "keep weights in"),
        listen=listen,
        announced_ports=announced_ports,
        layers=None if merged.layers is None else parse_layers(merged.layers),
        state_dir=(merged.state_dir or default_state_dir()).expanduser().absolute(),
        store_dir=(merged.store_dir or default_store_folder()).expanduser().absolute(),
        rule=_rule(merged.micro_batches),
        host_policy=_host_policy(merged),
    )


def where_to_join(settings: JoinSettings) -> WhereToJoin:
    """The swarm to go to, and a sentence about it."""
    if settings.initial_peers:
        count = len(settings.initial_peers)
        known = (
            settings.initial_peers[0] if count == 1 else f"{settings.initial_peers[0]} and {count - 1} more"
        )
        return WhereToJoin(settings.initial_peers, f"Joining the swarm of {known}")
    if settings.options.new_swarm:
        return WhereToJoin((), "Founding a new swarm")
    return WhereToJoin(
        (),
        "Founding a new swarm, because no initial peers are configured (--initial-peers, "
        f"MOLINK_INITIAL_PEERS or {configuration_path()})",
    )


def parse_layers(text: str) -> Span:
    """The span that "A:B" means.

    Raises:
        SettingsError: it means none.
    """
    found = _LAYERS.fullmatch(text.strip())
    if found is None or int(found[1]) >= int(found[2]):
        raise SettingsError(
            f"--layers {text!r} is not a span: give the first layer and the one after the last, such as 0:12"
        )
    return Span(int(found[1]), int(found[2]))


def _decide_swarm(
    command_line: Mapping[str, Any], environment: Mapping[str, str], file: Mapping[str, Any], *, founds: bool
) -> tuple[tuple[str, ...], bool]:
    sources = (
        (COMMAND_LINE, command_line.get("initial_peers", ()), command_line.get("new_swarm", False)),
        ("the environment", environment_initial_peers(environment), founds),
        (
            f"the configuration file {configuration_path(environment)}",
            file.get("initial_peers", ()),
            file.get("new_swarm", False),
        ),
    )
    for source, texts, new_swarm in sources:
        if texts and new_swarm:
            raise SettingsError(f"{source} asks for initial peers and for a new swarm: give one of the two")
        if texts or new_swarm:
            addresses = (check_address(part) for text in texts for part in split_addresses(text))
            return tuple(dict.fromkeys(addresses)), new_swarm
    return (), False


def _refuse_what_is_missing(merged: Configuration, listen: str) -> None:
    """What this version or this machine cannot do is refused rather than ignored."""
    if merged.relay == "on" and (merged.http_proxy or listen in ("127.0.0.1", "::1")):
        where = (
            "links go through --http-proxy" if merged.http_proxy else f"this peer listens on {listen} only"
        )
        raise SettingsError(
            f"--relay on cannot work, for {where}: leave --relay out, or --listen on an address of the network"
        )
    _check_port_mapping(merged, listen)
    if merged.quantization in ("int8", "nf4") and find_spec("bitsandbytes") is None:
        raise SettingsError(f"--quantization: {QuantizationUnavailable(merged.quantization)}")


def _check_port_mapping(merged: Configuration, listen: str) -> None:
    """Ports are mapped where that could have others dial this peer, and its owner has not said where they do."""
    if merged.port_mapping == "off":
        return
    if merged.announce is not None or merged.relay == "on":
        other = "--announce" if merged.announce is not None else "--relay on"
        raise SettingsError(f"--port-mapping on and {other} contradict each other: give one of the two")
    if merged.http_proxy:
        where = "links go through --http-proxy"
    elif listen != "::" and (":" in listen or ip_address(listen).is_loopback):
        where = f"this peer listens on {listen} only"
    else:
        return
    raise SettingsError(
        f"--port-mapping on cannot work, for {where}: leave it out, or --listen on an IPv4 address of the network"
    )


def _check_key_file(path: Path | None) -> Path | None:
    if path is None:
        return None
    path = path.expanduser().absolute()
    if not path.is_file():
        raise SettingsError(
            f"--swarm-key {path} is not a file: copy the swarm's key file to this machine, "
            "or make one with `molink-peer swarm-key`"
        )
    return path


def _parse_size(size: str | int | None, option: str, purpose: str) -> int | None:
    if size is None:
        return None
    try:
        amount = size if isinstance(size, int) else parse_bytes(size)
    except ValueError as error:
        raise SettingsError(f"{option}: {error}") from error
    if amount <= 0:
        raise SettingsError(f"{option} {size} leaves nothing to {purpose}: give an amount such as 10GB")
    return amount


def _host_policy(merged: Configuration) -> HostPolicy:
    try:
        quiet_hours = tuple(map(parse_quiet_hours, merged.quiet_hours or ()))
    except ValueError as error:
        raise SettingsError(f"--quiet-hours: {error}") from error
    return HostPolicy(merged.pause_when_busy, quiet_hours, merged.on_battery)


def _check_offer(offered: str | float) -> str:
    """`auto`, `off`, or megabits per second."""
    text = str(offered)
    if text in ("auto", "off"):
        return text
    try:
        mbps = float(text)
    except ValueError:
        mbps = 0.0
    if not 0.1 <= mbps <= 100_000:
        raise SettingsError(f"--offer-relay {text}: use auto, off, or megabits per second such as 20")
    return f"{mbps:g}"


def _check_partner(partner: str) -> str:
    """`auto`, `off`, or a peer id."""
    if partner not in ("auto", "off"):
        try:
            public_key_of(partner)
        except ValueError as error:
            raise SettingsError(
                f"--partner {partner}: use auto, off, or a peer id such as `molink-peer status` shows"
            ) from error
    return partner


def _check_operator(operator: str) -> str:
    try:
        public_key_of(operator)
    except ValueError as error:
        raise SettingsError(
            f"--operator {operator}: use the identity that its gateway shows, such as 12D3KooW..."
        ) from error
    return operator


def _rule(micro_batches: str | int) -> Rule:
    try:
        return rule_named(str(micro_batches))
    except ValueError as error:
        raise SettingsError(f"--micro-batches: {error}") from error


def _check_device(device: str) -> str:
    if _DEVICE.fullmatch(device) is None:
        raise SettingsError(f"--device {device!r} is not known: use auto, cpu, cuda:0 or mps")
    return device


def _check_policy(name: str) -> str:
    if name not in POLICIES:
        raise SettingsError(f"--transmission-policy {name!r} is not known: use one of {', '.join(POLICIES)}")
    return name


def _bare(host: str | None) -> str | None:
    """An IPv6 address as sockets take it, without the brackets that it has beside a port."""
    return host[1:-1] if host is not None and host.startswith("[") and host.endswith("]") else host


def _check_listen(host: str | None) -> str | None:
    """`host`, if a socket can listen there; None stays None."""
    if host is None:
        return None
    host = "127.0.0.1" if host == "localhost" else host
    try:
        require_listen_host(host)
    except ValueError as error:
        raise SettingsError(f"--listen: {error}") from error
    try:
        if not ip_address(host).is_loopback:
            with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
                probe.bind((host, 0))
    except OSError as error:
        raise SettingsError(
            f"--listen {host} is not an address of this machine: use one that is, or 0.0.0.0 for all of them"
        ) from error
    return host


def _split_announce(given: str | None) -> tuple[str | None, AnnouncedPorts | None]:
    """The host that others dial, and where something maps this machine's ports, control's and data's as they do."""
    found = None if given is None else _MAPPED.fullmatch(given)
    if found is None:
        return given, None
    control, data = int(found[2]), int(found[3])
    if not (0 < control <= 65535 and 0 < data <= 65535) or control == data:
        raise SettingsError(
            f"--announce {given}: CONTROL and DATA are two ports from 1 to 65535, such as peer.example.org:34001:34002"
        )
    return found[1], AnnouncedPorts(control, data)


def _check_announce(host: str | None) -> str | None:
    try:
        return None if host is None else require_host(host)
    except ValueError as error:
        raise SettingsError(f"--announce: {error}, with mapped ports HOST:CONTROL:DATA") from error


def _default_listen(initial_peers: tuple[str, ...]) -> str:
    """This machine only, unless the swarm is reachable from elsewhere."""
    reachable = any(not is_loopback(address) for address in initial_peers)
    return "0.0.0.0" if reachable else "127.0.0.1"  # noqa: S104 - a swarm on other machines has to reach this one
