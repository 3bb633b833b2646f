"""Fatal signals that ended a peer's last starts: written by faulthandler, read by the next start.

A signal that native code causes ends the process without a word. Faulthandler writes the stacks of all threads into a
file of the state directory before that. Whoever kills a process leaves nothing there, so that only deaths of the
peer's own doing count.
"""

import faulthandler
import json
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self

from molink.peer.state_dir import read_json, remember_json
from molink.processor import processor_flags

SOON_S: Final = 600.0
"""Two deaths within this time have the next start do without the native ways that it used; one now and then has not."""
_KEPT: Final = 8
_READ_BYTES: Final = 2**20
_FAULTS: Final = "faults.log"
_LAST: Final = "last-fault.log"
_DEATHS: Final = "deaths.json"
_LIBRARIES: Final = ("molink", "torch", "numpy", "bitsandbytes")
_SIGNALS: Final = {
    "Segmentation fault": "SIGSEGV",
    "Illegal instruction": "SIGILL",
    "Floating": "SIGFPE",
    "Bus error": "SIGBUS",
    "Aborted": "SIGABRT",
    "access violation": "SIGSEGV",
    "stack overflow": "SIGSEGV",
    "code 0xc000001d": "SIGILL",
    "int divide by zero": "SIGFPE",
    "float divide by zero": "SIGFPE",
}
"""How faulthandler begins to tell of a signal; the last five on Windows, where it also tells of what others handle."""
_FATAL: Final = re.compile(rb"^(?:Fatal Python error|Windows fatal exception): (.*)$", re.MULTILINE)
_FRAME: Final = re.compile(
    rb"^(?:Current thread .*\(most recent call first\):|Stack .*:)\s+File \"(.*)\", line (\d+)", re.MULTILINE
)
_WAYS: Final = re.compile(rb"^ways (\[.*\])\r?$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one start."""

    at_s: float
    """By this machine's clock."""
    signal: str
    """As POSIX calls it, also on Windows."""
    place: str
    """The module and line of Python that the dying thread was in; empty if that is not known."""
    ways: tuple[str, ...]
    """Native ways that this start used."""
    software: str
    """Versions and processor, as `software_here` says them."""

    def __str__(self) -> str:
        when = datetime.fromtimestamp(self.at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"{self.signal} at {when}" + (f" in {self.place}" if self.place else "")


@dataclass(frozen=True, slots=True)
class PastDeaths:
    """Knowledge of a start about those before it."""

    deaths: tuple[Death, ...] = ()
    """The newest last."""
    last_start_died: bool = False
    left_out: frozenset[str] = frozenset()
    """Native ways that this start does without."""

    def sentences(self, folder: Path) -> list[str]:
        """Returns the lines that the owner reads at the start."""
        said = []
        if self.last_start_died:
            said.append(f"The last start was ended by {self.deaths[-1]}: {folder / _LAST} has the stacks")
        if self.left_out:
            said.append(
                f"Two starts died so within {SOON_S / 60:g} minutes: this one does without the native ways "
                f"{', '.join(sorted(self.left_out))}, which they used; delete {folder / _DEATHS} to have them again"
            )
        return said


NO_DEATHS: Final = PastDeaths()


class FaultLog:
    """Has faulthandler write into a file of `folder` while the context is open, which is for the process's life.

    Raises OSError on entering if the file cannot be written.
    """

    def __init__(self, folder: Path, process: str = "") -> None:
        """`process`: the name of one that is not the peer's main one."""
        self.path = folder / (f"faults-{process}.log" if process else _FAULTS)
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | getattr(os, "O_BINARY", 0)
        self._file = os.fdopen(os.open(self.path, flags, 0o600), "wb", buffering=0)
        faulthandler.enable(self._file, all_threads=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.disable()
        if self._file is not None:
            self._file.truncate(0)
            self._file.close()
            self._file = None

    def use(self, ways: Iterable[str]) -> None:
        """Notes all native ways that are in use from now on, in place of those before. A full disk stops nothing."""
        if self._file is not None:
            with suppress(OSError):
                self._file.write(f"ways {json.dumps(sorted(ways))}\n".encode())


def find_deaths(folder: Path) -> PastDeaths:
    """Reads what the last start left behind in the state directory, and remembers it; once in each start, before its
    `FaultLog` is opened."""
    known = _known(folder)
    death = unread_death(folder)
    if death is not None:
        known = (*known, death)[-_KEPT:]
        content: dict[str, object] = {"deaths": [asdict(one) for one in known]}
        remember_json(folder / _DEATHS, content, "the next start does not know of the deaths before")
    for path in sorted(folder.glob("faults*.log"), key=lambda path: path.name == _FAULTS):
        with suppress(OSError):
            if _death_of(path) is None:
                path.unlink()
            else:
                path.replace(folder / _LAST)
    return PastDeaths(known, death is not None, ways_to_leave_out(known, software_here()))


def past_deaths(folder: Path) -> tuple[Death, ...]:
    """The deaths that are known in this state directory, the newest last. Changes nothing: a peer may run there."""
    unread = unread_death(folder)
    return _known(folder) if unread is None else (*_known(folder), unread)


def unread_death(folder: Path) -> Death | None:
    """The death of the last start, of which the next one has not read yet."""
    found = [death for path in folder.glob("faults*.log") if (death := _death_of(path))]
    if not found:
        return None
    newest = max(found, key=lambda death: death.at_s)
    return replace(newest, ways=tuple(sorted({way for death in found for way in death.ways})))


def ways_to_leave_out(deaths: Sequence[Death], software: str) -> frozenset[str]:
    """The native ways that were in use in two deaths in a row, SOON_S or less apart, with the software of now."""
    left_out: set[str] = set()
    for one, other in pairwise(death for death in deaths if death.software == software):
        if abs(other.at_s - one.at_s) <= SOON_S:
            left_out.update(one.ways, other.ways)
    return frozenset(left_out)


def software_here() -> str:
    """Versions of the libraries that compute, and what the processor can do: with others, ways are tried again."""
    versions = [f"{library} {found}" for library in _LIBRARIES if (found := _version(library)) is not None]
    return ", ".join([*versions, *sorted(processor_flags() or ())])


def death_in(text: bytes, at_s: float, software: str) -> Death | None:
    """The death that a fault file tells of; None: the process that wrote it did not die of a fatal signal."""
    told = [found for found in _FATAL.finditer(text) if _signal(found[1]) is not None]
    if not told:
        return None
    noted = [json.loads(found[1]) for found in _WAYS.finditer(text)]
    ways = set(map(str, noted[-1] if noted else ()))
    frame = _FRAME.search(text, told[-1].start())
    place = "" if frame is None else f"{_short(frame[1].decode(errors='replace'))} line {int(frame[2])}"
    return Death(at_s, _signal(told[-1][1]) or "", place, tuple(sorted(ways)), software)


def _signal(words: bytes) -> str | None:
    said = words.decode(errors="replace")
    return next((signal for begin, signal in _SIGNALS.items() if said.startswith(begin)), None)


def _short(path: str) -> str:
    """A module's path from its package on: what is before may be somebody's name."""
    parts = re.split(r"[\\/]", path)
    for root, own in (("site-packages", 1), ("dist-packages", 1), ("molink", 0)):
        if root in parts:
            return "/".join(parts[parts.index(root) + own :])
    return parts[-1]


def _death_of(path: Path) -> Death | None:
    try:
        with path.open("rb") as file:
            text = file.read(_READ_BYTES)
        return death_in(text, path.stat().st_mtime, software_here())
    except (OSError, ValueError):
        return None


def _known(folder: Path) -> tuple[Death, ...]:
    said = read_json(folder / _DEATHS).get("deaths")
    found = (_read(one) for one in (said if isinstance(said, list) else ()))
    return tuple(death for death in found if death is not None)[-_KEPT:]


def _read(said: Any) -> Death | None:  # noqa: ANN401 - out of a file
    try:
        ways = tuple(map(str, said["ways"]))
        return Death(
            float(said["at_s"]), str(said["signal"]), str(said["place"]), ways, str(said["software"])
        )
    except (KeyError, TypeError, ValueError):
        return None


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
