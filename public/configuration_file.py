"""The configuration file as `molink config` changes it: one option at a time, and nothing else that stands in it."""

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from molink.configuration import (
    SettingsError,
    check_address,
    check_given,
    checked_otlp_endpoint,
    configuration_path,
    read_environment,
    read_file,
)
from molink.options import Configuration, Declared, declared_options
from molink.sizes import parse_bytes

_OFF = frozenset({"off", "no", "false", "0"})
_ON = frozenset({"on", "yes", "true", "1"})


def named_option(name: str) -> str:
    """The option's name as the file has it, of that or of `--its-name`.

    Raises:
        SettingsError: there is no such option.
    """
    known = name.removeprefix("--").replace("-", "_")
    if known not in declared_options():
        check_given({known: ""}, "the configuration file")
    return known


def write_option(name: str, words: Sequence[str]) -> object:
    """Writes the option's value, said in `words`, into the file, which is made if there is none; returns it.

    Raises:
        SettingsError: it is none that the option takes, or the file cannot be used.
    """
    declared = declared_options()[name]
    value = check_given({name: _said(declared, words)}, "the value given")[name]
    _check_further(name, value)
    document = _document()
    document[name] = _toml(value)
    _write(document)
    return value


def remove_option(name: str) -> bool:
    """Takes the option out of the file; returns whether it was there.

    Raises:
        SettingsError: the file cannot be used.
    """
    document = _document()
    if name not in document:
        return False
    del document[name]
    _write(document)
    return True


def settings_in_force() -> dict[str, tuple[Any, str]]:
    """What holds on this machine unless a command line says otherwise, by option: its value, and who says so:
    `environment`, `file`, or `default`.

    Raises:
        SettingsError: the environment or the file cannot be used.
    """
    file = read_file() if configuration_path().exists() else {}
    named, default = read_environment(), Configuration()
    initial_peers = os.environ.get("MOLINK_INITIAL_PEERS", "")
    if initial_peers:
        named = named | check_given({"initial_peers": initial_peers}, "MOLINK_INITIAL_PEERS")
    found = {}
    for name in declared_options():
        for source, content in (("environment", named), ("file", file)):
            if name in content:
                found[name] = (content[name], source)
                break
        else:
            found[name] = (getattr(default, name), "default")
    return found


def _said(declared: Declared, words: Sequence[str]) -> object:
    """Words of a command line as the kind of value that the option has."""
    if declared.takes_several:
        return tuple(words)
    if len(words) != 1:
        raise SettingsError(f"the option takes one value, and {len(words)} were given")
    if bool in declared.kinds and words[0].lower() in _ON | _OFF:
        return words[0].lower() in _ON
    return words[0]


def _check_further(name: str, value: object) -> None:
    """What else can be said of a value before anything is done with it."""
    if name == "initial_peers" and isinstance(value, tuple):
        for address in value:
            check_address(address)
    elif name == "otlp_endpoint":
        checked_otlp_endpoint(str(value))
    elif name in ("memory", "store_size", "swap_space") and isinstance(value, str):
        try:
            parse_bytes(value)
        except ValueError as error:
            raise SettingsError(f"{name}: {error}") from error


def _toml(value: object) -> object:
    if isinstance(value, tuple):
        return [_toml(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def _document() -> tomlkit.TOMLDocument:
    path = configuration_path()
    if not path.exists():
        return tomlkit.document()
    read_file()  # what is wrong with the file is said in a sentence of its own
    try:
        return tomlkit.parse(path.read_text(encoding="utf-8"))
    except (OSError, TOMLKitError) as error:
        raise SettingsError(f"the configuration file {path} cannot be read: {error}") from error


def _write(document: tomlkit.TOMLDocument) -> None:
    """The whole file at once: who reads it meanwhile finds the old one."""
    path = configuration_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as new:
            new.write(tomlkit.dumps(document))
        Path(new.name).replace(path)
    except OSError as error:
        raise SettingsError(
            f"the configuration file {path} cannot be written: {error.strerror or error}; check its folder"
        ) from error
