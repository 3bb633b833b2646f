"""What a user has written down about swarms: the configuration file and the environment. Loads no libp2p.

The file is `config.toml` in the user's configuration folder, or what `MOLINK_CONFIG` names. Its keys are the
long options of `molink-peer join` with underscores. Peers, clients and gateways read the same file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal

from platformdirs import user_config_dir
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from molink.dht.identity.addresses import PeerAddress

EXAMPLE_ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_PROXY = re.compile(r"http://(?:[^\s/@]+@)?(?:\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]]+):(?P<port>[0-9]{1,5})/?")
_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/\s]+)/tcp/(?P<port>[0-9]{1,5})"
    r"/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{40,64})"
)


class SettingsError(ValueError):
    """What the user asked for cannot be done; the message is one sentence for them."""


def _split(value: object) -> object:
    return tuple(split_addresses(value)) if isinstance(value, str) else value


Port = Annotated[int, Field(ge=0, le=65535)]


class Configuration(BaseModel):
    """Settings as one source (file, environment or command line) gives them. None: not given there."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    initial_peers: Annotated[tuple[str, ...], BeforeValidator(_split)] | None = None
    new_swarm: bool | None = None
    swarm_key: Path | None = None
    memory: str | int | None = None
    device: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    quantization: Literal["none", "int8", "nf4"] | None = None
    exact: Literal["on", "off"] | None = None
    listen: str | None = None
    announce: str | None = None
    port: Port | None = None
    grpc_port: Port | None = None
    name: Annotated[str, Field(min_length=1, max_length=64)] | None = None
    layers: str | None = None
    partner: str | None = None
    state_dir: Path | None = None
    relay: Literal["auto", "on", "off"] | None = None
    relay_port: Port | None = None
    offer_relay: str | int | float | None = None
    activation_codec: Literal["none", "auto", "float16", "bfloat16", "int8"] | None = None
    micro_batches: str | int | None = None
    http_proxy: str | None = None
    transmission_policy: str | None = None
    metrics_port: Port | None = None
    store_dir: Path | None = None
    store_size: str | int | None = None
    swap_space: str | int | None = None
    pause_when_busy: Literal["auto", "on", "off"] | None = None
    quiet_hours: Annotated[tuple[str, ...], BeforeValidator(_split)] | None = None
    on_battery: Literal["pause", "serve"] | None = None
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    priority: Literal["normal", "low"] | None = None
    wait: Annotated[float, Field(ge=0, le=604_800)] | None = None
    model_name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s\x00-\x1f]+$")] | None = (
        None
    )


def configuration_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where the configuration file is, whether it exists or not."""
    named = (os.environ if environment is None else environment).get("MOLINK_CONFIG")
    return (
        Path(named).expanduser()
        if named
        else Path(user_config_dir("molink", appauthor=False)) / "config.toml"
    )


def read_configuration(environment: Mapping[str, str] | None = None) -> Configuration:
    """The configuration file; an empty configuration if there is none.

    Raises:
        SettingsError: it cannot be read, is not TOML, has an unknown key or a value of the wrong kind, or
            `MOLINK_CONFIG` names a file that does not exist.
    """
    environment = os.environ if environment is None else environment
    path = configuration_path(environment)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if environment.get("MOLINK_CONFIG"):
            raise SettingsError(
                f"MOLINK_CONFIG names {path}, which does not exist: create it, or unset the variable"
            ) from None
        return Configuration()
    except OSError as error:
        raise SettingsError(
            f"the configuration file {path} cannot be read: {error.strerror or error}; check its permissions"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the configuration file {path} is not valid TOML: {error}") from error
    return check_configuration(content, f"the configuration file {path}")


def environment_configuration(environment: Mapping[str, str] | None = None) -> Configuration:
    """What the environment gives: MOLINK_MEMORY and so on. The swarm's initial peers are looked at apart.

    Raises:
        SettingsError: a variable has a value of the wrong kind.
    """
    environment = os.environ if environment is None else environment
    content = {
        name: environment[variable]
        for name in Configuration.model_fields
        if name != "initial_peers" and environment.get(variable := f"MOLINK_{name.upper()}")
    }
    return check_configuration(content, "the environment's MOLINK_ variables")


def check_configuration(content: Mapping[str, object], source: str) -> Configuration:
    """The settings that `source` gives, their keys and kinds checked.

    Raises:
        SettingsError: names the source and each key that is wrong, and why.
    """
    try:
        return Configuration.model_validate(content)
    except ValidationError as error:
        problems = dict.fromkeys(
            _problem(tuple(found["loc"]), found["type"], found["msg"]) for found in error.errors()
        )
        raise SettingsError(f"{source}: {'; '.join(problems)}") from error


def _problem(location: tuple[int | str, ...], kind: str, message: str) -> str:
    key = str(location[0]) if location else "?"
    if kind != "extra_forbidden":
        return f"`{key}`: {message[:1].lower()}{message[1:]}"
    close = difflib.get_close_matches(key, Configuration.model_fields, n=1)
    hint = (
        f"did you mean `{close[0]}`?" if close else f"known keys are {', '.join(Configuration.model_fields)}"
    )
    return f"`{key}` is not a known key ({hint})"


def split_addresses(text: str) -> tuple[str, ...]:
    """Multiaddresses out of a text that separates them by commas or white space."""
    return tuple(re.split(r"[,\s]+", text.strip(", \t\r\n"))) if text.strip(", \t\r\n") else ()


def check_address(address: str) -> str:
    """The same multiaddress, if it has the form of one that leads to a peer.

    Raises:
        SettingsError: it has not.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= 65535 or not _host_fits(found["kind"], found["host"]):
        raise SettingsError(
            f"{address!r} is not a peer's multiaddress: copy the one that its `Invite others:` line shows, "
            f"such as {EXAMPLE_ADDRESS}"
        )
    try:
        PeerAddress.parse(address)
    except ValueError as error:
        raise SettingsError(
            f"{address!r} is mistyped: {error}; copy the address that the peer's `Invite others:` line shows"
        ) from error
    return address


def _host_fits(kind: str, host: str) -> bool:
    if kind.startswith("dns"):
        return True
    try:
        return ip_address(host).version == int(kind[-1])
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    """Whether a checked multiaddress leads to this very machine only."""
    _, kind, host, *_ = address.split("/")
    return host == "localhost" if kind.startswith("dns") else ip_address(host).is_loopback


def environment_initial_peers(environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """What `MOLINK_INITIAL_PEERS` names; empty if it is not set."""
    return split_addresses(
        (os.environ if environment is None else environment).get("MOLINK_INITIAL_PEERS", "")
    )


def configured_initial_peers(explicit: Sequence[str] | None) -> tuple[str, ...]:
    """Whom to ask for the swarm: those given, else `MOLINK_INITIAL_PEERS`, else the configuration file's.

    Empty if nothing is configured. No addresses given are the same as None.

    Raises:
        SettingsError: one of them is no peer's multiaddress, or the file cannot be used.
    """
    given = tuple(part for text in explicit or () for part in split_addresses(text))
    peers = given or environment_initial_peers() or read_configuration().initial_peers or ()
    return tuple(dict.fromkeys(check_address(address) for address in peers))


def configured_http_proxy(
    explicit: str | None = None,
    environment: Mapping[str, str] | None = None,
    file: Configuration | None = None,
) -> str | None:
    """The HTTP proxy that links are dialled through: that given, else `MOLINK_HTTP_PROXY`, else the configuration
    file's; None: none, links are dialled directly.

    Raises:
        SettingsError: it has not the form of a proxy's URL, or the file cannot be used.
    """
    environment = os.environ if environment is None else environment
    given = explicit or environment.get("MOLINK_HTTP_PROXY")
    url = given or (file if file is not None else read_configuration(environment)).http_proxy
    if not url:
        return None
    found = _PROXY.fullmatch(url)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise SettingsError(
            f"{url!r} is not the URL of an HTTP proxy: give one such as http://127.0.0.1:3128, with its port"
        )
    return url
