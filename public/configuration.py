"""What a user has written down about swarms: the configuration file and the environment. Loads no libp2p.

The file is `config.toml` in the user's configuration folder, or what `MOLINK_CONFIG` names. Its keys are the
long options of `molink-peer join` with underscores (`options.py`). Peers, clients and gateways read the same file.
"""

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from platformdirs import user_config_dir

from molink.dht.identity.addresses import PeerAddress
from molink.options import Configuration, Declared, declared_options
from molink.tracing import check_endpoint

if TYPE_CHECKING:
    from pydantic import BaseModel

COMMAND_LINE = "the command line"
"""As a source of options; they are named there as they are typed."""
EXAMPLE_ADDRESS = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
_PROXY = re.compile(r"http://(?:[^\s/@]+@)?(?:\[[0-9A-Fa-f:.]+\]|[^\s/:@\[\]]+):(?P<port>[0-9]{1,5})/?")
_ADDRESS = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/\s]+)/tcp/(?P<port>[0-9]{1,5})"
    r"/p2p/(?P<peer>[1-9A-HJ-NP-Za-km-z]{40,64})"
)


class SettingsError(ValueError):
    """What the user asked for cannot be done; the message is one sentence for them."""


def configuration_path(environment: Mapping[str, str] | None = None) -> Path:
    """Where the configuration file is, whether it exists or not."""
    named = (os.environ if environment is None else environment).get("MOLINK_CONFIG")
    return (
        Path(named).expanduser()
        if named
        else Path(user_config_dir("molink", appauthor=False)) / "config.toml"
    )


def read_configuration(environment: Mapping[str, str] | None = None) -> Configuration:
    """The configuration file, and defaults for what is not in it.

    Raises:
        SettingsError: as `read_file` does.
    """
    return Configuration(**read_file(environment))


def read_file(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the configuration file gives; nothing if there is none.

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
        return {}
    except OSError as error:
        raise SettingsError(
            f"the configuration file {path} cannot be read: {error.strerror or error}; check its permissions"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the configuration file {path} is not valid TOML: {error}") from error
    return check_given(content, f"the configuration file {path}")


def read_environment(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What the environment gives: MOLINK_MEMORY and so on. The swarm's initial peers are looked at apart.

    Raises:
        SettingsError: a variable has a value of the wrong kind.
    """
    environment = os.environ if environment is None else environment
    content = {
        name: environment[variable]
        for name in declared_options()
        if name != "initial_peers" and environment.get(variable := f"MOLINK_{name.upper()}")
    }
    return check_given(content, "the environment's MOLINK_ variables")


def check_given(content: Mapping[str, object], source: str) -> dict[str, Any]:
    """What `source` gives, by the names of `Configuration`'s fields, checked and converted as they are annotated.

    Raises:
        SettingsError: names the source and each key that is wrong, and why.
    """
    if not content:
        return {}
    from pydantic import ValidationError

    try:
        checked = _validator().model_validate(content)
    except ValidationError as error:
        problems = dict.fromkeys(
            _problem(tuple(found["loc"]), found["type"], found["msg"], typed=source == COMMAND_LINE)
            for found in error.errors()
        )
        raise SettingsError(f"{source}: {'; '.join(problems)}") from error
    return {name: getattr(checked, name) for name in checked.model_fields_set}


@cache
def _validator() -> "type[BaseModel]":
    """`Configuration` as pydantic checks it: what is left out of a source is nothing that the source gives."""
    from pydantic import BeforeValidator, ConfigDict, Field, create_model

    def checked(declared: Declared) -> object:
        bounds = {name: bound for name, bound in asdict(declared.option.bounds).items() if bound is not None}
        before = [BeforeValidator(_split)] if declared.takes_several else []
        return Annotated[declared.annotation, *before, Field(**bounds)]

    fields: dict[str, Any] = {name: (checked(one), None) for name, one in declared_options().items()}
    return create_model("Configuration", __config__=ConfigDict(extra="forbid", frozen=True), **fields)


def _split(value: object) -> object:
    return split_addresses(value) if isinstance(value, str) else value


def _problem(location: tuple[int | str, ...], kind: str, message: str, *, typed: bool) -> str:
    key = str(location[0]) if location else "?"
    if kind != "extra_forbidden":
        shown = f"--{key.replace('_', '-')}" if typed else f"`{key}`"
        return f"{shown}: {message[:1].lower()}{message[1:]}"
    close = difflib.get_close_matches(key, declared_options(), n=1)
    hint = f"did you mean `{close[0]}`?" if close else f"known keys are {', '.join(declared_options())}"
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

    Empty if nothing is configured. No addresses given are the same as None; one text is one address, or several with
    commas.

    Raises:
        SettingsError: one of them is no peer's multiaddress, or the file cannot be used.
    """
    texts = (explicit,) if isinstance(explicit, str) else explicit or ()
    given = tuple(part for text in texts for part in split_addresses(text))
    peers = given or environment_initial_peers() or read_configuration().initial_peers or ()
    return tuple(dict.fromkeys(check_address(address) for address in peers))


def configured(name: str, given: object = None) -> Any:  # noqa: ANN401 - of the type that the option has
    """The value of an option that other programs than a peer have too: that `given` on the command line, else the
    environment's, the configuration file's, or its default.

    Raises:
        SettingsError: it is none that the option takes, or the file cannot be used.
    """
    if given is not None:
        return check_given({name: given}, COMMAND_LINE)[name]
    found = read_environment().get(name)
    return getattr(read_configuration(), name) if found is None else found


def heeds_local_network() -> bool:
    """Whether swarms may be looked for on the local network: `MOLINK_LOCAL_NETWORK`, else the configuration file's.

    Raises:
        SettingsError: it is neither on nor off, or the file cannot be used.
    """
    return bool(configured("local_network") == "on")


def checked_otlp_endpoint(url: str | None) -> str | None:
    """The same URL, if traces can be sent to it; None if it is empty.

    Raises:
        SettingsError: they cannot.
    """
    if not url:
        return None
    try:
        check_endpoint(url)
    except ValueError as error:
        raise SettingsError(f"--otlp-endpoint: {error}") from error
    return url


def configured_http_proxy() -> str | None:
    """The HTTP proxy that links are dialled through: `MOLINK_HTTP_PROXY`, else the configuration file's; None: none,
    links are dialled directly.

    Raises:
        SettingsError: it has not the form of a proxy's URL, or the file cannot be used.
    """
    return check_http_proxy(os.environ.get("MOLINK_HTTP_PROXY") or read_configuration().http_proxy)


def check_http_proxy(url: str | None) -> str | None:
    """The same URL, if it has the form of a proxy's; None if it is empty.

    Raises:
        SettingsError: it has not.
    """
    if not url:
        return None
    found = _PROXY.fullmatch(url)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise SettingsError(
            f"{url!r} is not the URL of an HTTP proxy: give one such as http://127.0.0.1:3128, with its port"
        )
    return url
