"""The folder in which a peer keeps what must outlive it: identity, ports, sequence numbers, whom it knew, caches. One
process holds it."""

import json
import logging
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from molink.configuration import SettingsError, check_address
from molink.dht.records.bounds import MAX_SEQUENCE

CONTROL_FILE = "control.json"
_log = logging.getLogger(__name__)


class StateDirInUse(Exception):
    """Another process holds the folder."""


class StateDir:
    """A peer's folder, locked while the context is open.

    Raises on entering:
        StateDirInUse: another peer runs with this folder.
        SettingsError: the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity_key = path / "identity.key"
        self.digests = path / "digests"
        """A folder: digests of models' tensors, so that weights are hashed once."""
        self.profiles = path / "profiles.json"
        self.control = path / CONTROL_FILE
        self._ports = path / "ports.json"
        self._sequence = path / "sequence.json"
        self._swarm = path / "swarm.json"
        self._lock = FileLock(path / "lock", blocking=False)

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock.acquire()
        except Timeout:
            raise StateDirInUse(
                f"a peer is already running with the state directory {self.path}: "
                "stop it with `molink-peer leave`, or give this one another folder with --state-dir"
            ) from None
        except OSError as error:
            raise SettingsError(
                f"the state directory {self.path} cannot be used ({error.strerror or error}): "
                "choose another one with --state-dir"
            ) from error
        self.control.unlink(missing_ok=True)  # left by a peer that was killed
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.control.unlink(missing_ok=True)
        self._lock.release()

    def ports(self) -> tuple[int | None, int | None]:
        """The libp2p and gRPC ports of the last run; None where there is none."""
        content = read_json(self._ports)
        libp2p, grpc = content.get("libp2p"), content.get("grpc")
        return _port(libp2p), _port(grpc)

    def remember_ports(self, libp2p: int, grpc: int) -> None:
        """If that cannot be written, the next start takes others."""
        remember_json(self._ports, {"libp2p": libp2p, "grpc": grpc}, "the next start takes other ports")

    def set_aside(self) -> int:
        """Up to where sequence numbers of announcements may have been used; -1: none."""
        number = read_json(self._sequence).get("set_aside")
        return number if isinstance(number, int) and 0 <= number <= MAX_SEQUENCE else -1

    def remember_set_aside(self, sequence: int) -> None:
        """Raises OSError if that cannot be written."""
        write_json(self._sequence, {"set_aside": sequence})

    def remember_swarm(self, entrances: tuple[str, ...], addresses: tuple[str, ...]) -> None:
        """Multiaddresses of members of the swarm that is entered by the `entrances`.

        Raises OSError if that cannot be written.
        """
        write_json(self._swarm, {"entrances": list(entrances), "addresses": list(addresses)})

    def remembered(self, initial_peers: Sequence[str]) -> tuple[str, ...]:
        """Multiaddresses of members of the same swarm, other than `initial_peers`: none if those who were asked or met
        there before are other peers than these."""
        content = read_json(self._swarm)
        entrances, addresses = _addresses(content.get("entrances")), _addresses(content.get("addresses"))
        known = {address.rsplit("/", 1)[1] for address in (*entrances, *addresses)}
        if known.isdisjoint(address.rsplit("/", 1)[1] for address in initial_peers):
            return ()
        return tuple(address for address in addresses if address not in initial_peers)


def wait_until_free(path: Path, timeout_s: float) -> bool:
    """Whether the peer that holds the folder has let go of it within `timeout_s`."""
    try:
        with FileLock(path / "lock", timeout=timeout_s):
            return True
    except Timeout:
        return False


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in the file; empty if there is none or it is damaged: what it held is made again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: dict[str, object]) -> None:
    """Replaces the file, readable by this user only, at once: a reader sees the old content or the new."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(name).unlink()
        raise


def remember_json(path: Path, content: dict[str, object], otherwise: str) -> None:
    """As `write_json`, of what a peer can do without: if it cannot be written, a warning says what `otherwise` is."""
    try:
        write_json(path, content)
    except OSError as error:
        _log.warning(
            "%s cannot be written (%s): %s. Make room in the state directory",
            path,
            error.strerror or error,
            otherwise,
        )


def _addresses(value: object) -> tuple[str, ...]:
    """Those in a list that a file held."""
    found: list[str] = []
    for text in value if isinstance(value, list) else ():
        with suppress(ValueError):
            found.append(check_address(str(text)))
    return tuple(found)


def _port(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 65536 else None
