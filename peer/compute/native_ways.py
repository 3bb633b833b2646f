"""The native ways that this machine computes by: tried in a process of its own before they are used, and remembered.

Native code that fails ends its process, or computes something else, and says nothing. So each way is run by
`molink.shards.native.trial` first, which says what it begins and what came of it: what ended that process, had to be
stopped or was wrong is dropped, and another process goes on with the rest.
"""

import hashlib
import json
import logging
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Final

import psutil
import torch
from filelock import FileLock, Timeout

from molink.peer.device.device import processor_name
from molink.processor import processor_flags
from molink.shards.native.compiling import kept_library_name, user_folder
from molink.shards.native.native_way import NativeWay, TrialJob
from molink.shards.native.trial import PREPARED_WITHIN_S, STARVED_S, WITHIN_S, rows_of
from molink.shards.store.store_notes import replace_file

__all__ = ["DroppedWay", "NativeWay", "NativeWays", "TriedWay", "WaysRecord"]

TABLE: Final = "molink.shards.matrices.trial_table"
READY_WITHIN_S: Final = 120.0
"""The process has imported torch by then, on a busy machine too."""
WAITED_S: Final = 60.0
"""For another peer of the same user that tries ways; after that both try."""
REMEMBERED: Final = 1000
"""Tried matrices in a record, the newest."""
_FORMAT: Final = 1
"""Of the record. Whoever changes what is tried counts it up."""
_LIBRARIES: Final = ("torch", "bitsandbytes", "numpy")
_ISA_PREFIXES: Final = ("ATEN_CPU_CAPABILITY", "ONEDNN_", "DNNL_", "MKL_")
_CHECK_S: Final = 0.5
"""How often a product that takes long is looked at."""
_LEAST_SHARE, _BUSY_SHARE = 0.05, 0.5
"""Of a processor: a process that has had less stands still, one that has had more was not kept from computing."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TriedWay:
    """A way that gave the right numbers with one matrix."""

    job: TrialJob
    bytes_per_s: float
    """Weights read by one row, as measured once; 0 where the way takes no such matrix."""


@dataclass(frozen=True, slots=True)
class DroppedWay:
    """A way that is not used."""

    name: str
    reason: str
    """Goes on behind "it"."""
    is_lasting: bool = True
    """False: the next start tries it again."""


@dataclass(frozen=True, slots=True)
class WaysRecord:
    """Knowledge of native ways on one machine, with its software and settings."""

    machine: Mapping[str, Any]
    """All that the record depends on: processor, flags, versions, environment."""
    tried: tuple[TriedWay, ...] = ()
    dropped: tuple[DroppedWay, ...] = ()
    chosen: tuple[str, ...] = ()
    """Ways that were fastest for some of the matrices that were loaded last."""

    def speeds(self) -> dict[str, float]:
        """The most bytes of weights that each chosen way read a second with one row, where that was measured."""
        found: dict[str, float] = {}
        for tried in self.tried:
            if tried.job.way in self.chosen:
                found[tried.job.way] = max(found.get(tried.job.way, 0.0), tried.bytes_per_s)
        return found

    @classmethod
    def read(cls, folder: Path) -> "WaysRecord":
        """Reads the record in `folder` of this machine as it is now; empty where there is none, or it is damaged."""
        machine = machine_facts()
        try:
            content = json.loads(_record_path(folder, machine).read_bytes())
            tried = tuple(
                TriedWay(TrialJob.of(one["job"]), float(one["bytes_per_s"])) for one in content["tried"]
            )
            dropped = tuple(DroppedWay(str(one["name"]), str(one["reason"])) for one in content["dropped"])
            return cls(machine, tried, dropped, tuple(map(str, content["chosen"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return cls(machine)

    def write(self, folder: Path) -> None:
        """Remembers it. On a full disk everything is simply tried again."""
        kept = replace(
            self,
            tried=self.tried[-REMEMBERED:],
            dropped=tuple(one for one in self.dropped if one.is_lasting),
        )
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(_record_path(folder, self.machine), json.dumps(asdict(kept)).encode())


def machine_facts() -> dict[str, Any]:
    """All that decides what native code does here, as JSON values."""
    return {
        "format": _FORMAT,
        "processor": processor_name(),
        "flags": sorted(processor_flags() or ()),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in _LIBRARIES},
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_ISA_PREFIXES)
        },
    }


def _note_nowhere(_: Collection[str]) -> None:
    """Forgets which ways are in use."""


@dataclass(slots=True, eq=False)
class NativeWays:
    """Tries native ways for the stages of a peer (`native_way.WaysTrial`). Threads may share it."""

    folder: Path
    """Where the records of all of a user's peers lie, as a rule `compiling.user_folder()`."""
    say: Callable[[str], None]
    """Is told of each way that is dropped, in a sentence."""
    without: frozenset[str] = frozenset()
    """Ways that are neither tried nor used in this start, whatever is remembered."""
    note: Callable[[Collection[str]], None] = _note_nowhere
    """Is told of the ways that are in use from now on, in case the process dies of one."""
    table: str = TABLE
    """The module whose ways the process tries."""
    _record: WaysRecord | None = None
    _later: list[TrialJob] = field(default_factory=list)
    """Jobs of a compiled library that is not there yet."""
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _used: set[str] = field(default_factory=set)
    _said: set[str] = field(default_factory=set)

    @property
    def record(self) -> WaysRecord:
        """The record, as remembered and found since."""
        with self._lock:
            if self._record is None:
                self._record = WaysRecord.read(self.folder)
            return self._record

    def try_ways(self, jobs: Sequence[TrialJob]) -> frozenset[str]:
        """Answers `WaysTrial.try_ways`."""
        with self._lock:
            library = kept_library_name(user_folder()) if any(map(_is_compiled, jobs)) else ""
            named = [replace(job, library=library) if _is_compiled(job) else job for job in jobs]
            self._later += [job for job in named if _is_compiled(job) and not library]
            asked = [job for job in named if library or not _is_compiled(job)]
            if self._unknown(asked):
                with self._alone():
                    left = self._unknown(asked)
                    while left:
                        left = self._try(left)
            for dropped in self.record.dropped:
                self._say(dropped)
            may_be_used = {job.way for job in jobs} - self._out()
            self._used |= may_be_used & {NativeWay.ATTENTION}  # nobody has to choose it
            self.note(self._used | may_be_used)  # they are timed now
            return frozenset(self._out())

    def try_library(self) -> bool:
        """Answers `WaysTrial.try_library`."""
        with self._lock:
            jobs, self._later = self._later, []
            return NativeWay.COMPILED not in self.try_ways(jobs)

    def chose(self, names: Collection[str]) -> None:
        """Answers `WaysTrial.chose`."""
        with self._lock:
            self._used.update(names)
            self.note(self._used)
            if set(names) != set(self.record.chosen):
                with self._alone():
                    self._keep(replace(self.record, chosen=tuple(sorted(names))))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lets one of a user's peers try at a time; the others wait, and find what it has found."""
        lock = FileLock(self.folder / "ways.lock", timeout=WAITED_S)
        with suppress(OSError, Timeout, NotImplementedError):  # a folder that cannot be written or locked
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock.acquire()
        try:
            passing = tuple(one for one in self.record.dropped if not one.is_lasting)
            found = WaysRecord.read(self.folder)
            self._record = replace(found, dropped=(*found.dropped, *passing))
            yield
        finally:
            lock.release()

    def _unknown(self, jobs: Sequence[TrialJob]) -> list[TrialJob]:
        known, out = {tried.job for tried in self.record.tried}, self._out()
        return [job for job in jobs if job not in known and job.way not in out]

    def _out(self) -> set[str]:
        return {dropped.name for dropped in self.record.dropped} | self.without

    def _try(self, jobs: list[TrialJob]) -> list[TrialJob]:
        """Begins one process and returns the jobs that are still to be tried when it has ended."""
        conversation = _Conversation(self.table, jobs)
        tried, dropped = conversation.run()
        record = self.record
        out = {one.name for one in dropped}
        self._keep(replace(record, tried=(*record.tried, *tried), dropped=(*record.dropped, *dropped)))
        done = {one.job for one in tried}
        return [job for job in jobs if job not in done and job.way not in out]

    def _keep(self, record: WaysRecord) -> None:
        self._record = record
        record.write(self.folder)

    def _say(self, dropped: DroppedWay) -> None:
        if dropped.name in self._said:
            return
        self._said.add(dropped.name)
        sentence = f"{dropped.name} is not used here, because in a trial it {dropped.reason}"
        self.say(f"Note: {sentence}; the next best way is used instead")


class _Conversation:
    """One process that tries jobs, from its start to its end."""

    def __init__(self, table: str, jobs: Sequence[TrialJob]) -> None:
        self._table = table
        self._jobs = jobs
        self._tried: list[TriedWay] = []
        self._dropped: list[DroppedWay] = []
        self._begun: tuple[TrialJob, int] | None = None

    def run(self) -> tuple[list[TriedWay], list[DroppedWay]]:
        """Returns what came of the jobs until the process ended. Either is never empty if there are jobs."""
        try:
            process = subprocess.Popen(  # noqa: S603 - ours
                [sys.executable, "-m", "molink.shards.native.trial", self._table],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            return [], self._drop_all(f"could not be begun ({error.strerror or error})")
        lines: queue.Queue[bytes] = queue.Queue()
        reader = threading.Thread(
            target=_read, args=(process.stdout, lines), name="native trial", daemon=True
        )
        reader.start()
        try:
            self._order(process)
            ended = self._listen(process, lines)
        finally:
            process.kill()
            with suppress(OSError), process:  # closes its pipes and waits for it
                reader.join()
        if not ended:
            self._blame(process.returncode)
        if not self._tried and not self._dropped:
            return [], self._drop_all("could not be begun (the process ended at once)")
        return self._tried, self._dropped

    def _order(self, process: subprocess.Popen[bytes]) -> None:
        said = "".join(json.dumps(asdict(job)) + "\n" for job in self._jobs)
        with suppress(OSError):  # it has died: `_blame` says so
            process.stdin.write(said.encode())  # type: ignore[union-attr] # it is a pipe
            process.stdin.close()  # type: ignore[union-attr] # as above

    def _listen(self, process: subprocess.Popen[bytes], lines: "queue.Queue[bytes]") -> bool:
        """Takes answers until the process has ended, or a product was stopped; True if that is all there is to say."""
        limit = _Limit(process.pid, READY_WITHIN_S)
        left, out = len(self._jobs), set[str]()
        while left:
            try:
                line = lines.get(timeout=_CHECK_S)
            except queue.Empty:
                if limit.is_over():
                    self._stop()
                    return True
                continue
            if not line:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_CHECK_S * 10)
                return False
            answer = json.loads(line)
            if "begins" in answer:
                job = self._jobs[answer["begins"]]
                self._begun = (job, answer["rows"])
                limit = _Limit(process.pid, WITHIN_S if answer["rows"] else PREPARED_WITHIN_S)
            elif "ended" in answer:
                left, self._begun = left - 1, None
                self._note(self._jobs[answer["ended"]], answer)
                if "error" in answer:
                    out.add(self._jobs[answer["ended"]].way)
        return True

    def _note(self, job: TrialJob, answer: Mapping[str, Any]) -> None:
        if "error" not in answer:
            self._tried.append(TriedWay(job, float(answer["bytes_per_s"])))
        elif all(one.name != job.way for one in self._dropped):
            self._dropped.append(DroppedWay(job.way, f"{answer['error']} ({job.subject})"))

    def _stop(self) -> None:
        if self._begun is None:
            self._dropped += self._drop_all("could not be begun in time")
            return
        job, rows = self._begun
        what = f"did not end with {rows_of(rows)}" if rows else "was not ready in time"
        self._dropped.append(DroppedWay(job.way, f"{what} ({job.subject})", is_lasting=False))

    def _blame(self, code: int) -> None:
        """The process has ended by itself in the middle of what it had begun."""
        if self._begun is None:
            return
        job, rows = self._begun
        with_what = f"with {rows_of(rows)}" if rows else "while it was made ready"
        self._dropped.append(
            DroppedWay(job.way, f"ended the process by {_named(code)} {with_what} ({job.subject})")
        )

    def _drop_all(self, reason: str) -> list[DroppedWay]:
        """Drops all ways for this start, since nothing can be tried."""
        names = dict.fromkeys(job.way for job in self._jobs)
        return [DroppedWay(name, reason, is_lasting=False) for name in names]


class _Limit:
    """The time that a process may be silent: seconds, unless others keep it from computing."""

    def __init__(self, pid: int, within_s: float) -> None:
        self._process = pid
        self._within_s = within_s
        self._began_s = time.monotonic()
        self._had_s = _processor_s(pid)

    def is_over(self) -> bool:
        """True if it has stood still or computed for too long."""
        passed_s = time.monotonic() - self._began_s
        if passed_s < self._within_s:
            return False
        had_s = _processor_s(self._process) - self._had_s
        stands_still = had_s < _LEAST_SHARE * passed_s
        return stands_still or had_s >= _BUSY_SHARE * self._within_s or passed_s > STARVED_S + self._within_s


def _processor_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _read(stdout: IO[bytes], lines: "queue.Queue[bytes]") -> None:
    """Hands over what the process says; an empty line is its end."""
    with suppress(OSError, ValueError):
        for line in stdout:
            lines.put(line)
    lines.put(b"")


def _named(code: int) -> str:
    """Names the way in which a process has ended, for people."""
    if code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code:#x}" if code > 255 else f"exit code {code}"


def _is_compiled(job: TrialJob) -> bool:
    return job.way == NativeWay.COMPILED


def _record_path(folder: Path, machine: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()
    return folder / f"ways-{digest[:32]}.json"


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None
