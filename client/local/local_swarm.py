"""A swarm of real peer processes on this machine: for the demonstration, benchmarks and tests."""

import asyncio
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock, Timeout

from molink.client.errors import SwarmUnavailable
from molink.client.text.early_text import OWN_GROUP
from molink.commands import ENDS_WITH_STDIN

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 40.0
FOLDER_PREFIX = "molink-swarm-"
_INVITATION = re.compile(r"--initial-peers (/\S+)")


@dataclass(frozen=True, slots=True, eq=False)
class LocalPeer:
    """One peer process that has said `ready`."""

    name: str
    process: asyncio.subprocess.Process
    address: str
    """Its multiaddress."""
    state_dir: Path
    log: Path
    """What it wrote to stderr."""
    lines: tuple[str, ...]
    """What it printed until it was ready."""

    @property
    def peer_id(self) -> str:
        return self.address.rsplit("/", 1)[1]

    @property
    def alive(self) -> bool:
        return self.process.returncode is None


class LocalSwarm:
    """Starts peers and ends them; they end with this process, however that ends. Everything lives in one temporary
    folder, removed at the end, or by the next one if this process is killed."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is added to this process's own. Peers compute with one thread each unless it says otherwise:
        several on one machine would get into each other's way."""
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self._folder = Path()
        self._stack = ExitStack()
        self._peers: list[LocalPeer] = []
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        self._folder = self._stack.enter_context(temporary_folder(FOLDER_PREFIX))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await asyncio.gather(*(_stop(process) for process in self._processes))
        finally:
            self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """Of its peers, for whatever other program is to see the same."""
        return dict(self._environment)

    @property
    def folder(self) -> Path:
        """For whatever else should go when the swarm goes."""
        return self._folder

    @property
    def peers(self) -> tuple[LocalPeer, ...]:
        """The peers that were started and have not been stopped through this object."""
        return tuple(self._peers)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses of the living peers."""
        return tuple(peer.address for peer in self._peers if peer.alive)

    async def join(self, name: str, *options: str, initial_peers: Sequence[str] | None = None) -> LocalPeer:
        """Starts `molink-peer join OPTIONS` and waits until it is ready.

        It joins `initial_peers`, by default the peers that are there; without any, it founds the swarm.

        Raises:
            SwarmUnavailable: it ended or said nothing within READY_TIMEOUT_S; the text holds its last words.
        """
        known = self.addresses if initial_peers is None else tuple(initial_peers)
        where = ("--initial-peers", *known) if known else ("--new-swarm",)
        state_dir = self._folder / name
        log = self._folder / f"{name}.log"
        process = await self.launch(
            ("join", "--name", name, "--state-dir", str(state_dir), "--priority", "normal", *where, *options),
            log,
        )
        self._processes.append(process)
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                lines = await _until_ready(process)
        except TimeoutError:
            lines = ()
        if not lines or lines[-1] != "ready":
            raise SwarmUnavailable(f"peer {name} did not get ready: {_last_words(log)}")
        address = next(
            found.group(1) for line in lines if (found := _INVITATION.search(line)) and "Invite" in line
        )
        peer = LocalPeer(name, process, address, state_dir, log, lines)
        self._peers.append(peer)
        return peer

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        """`molink-peer ARGUMENTS`, with a pipe as its stdout and its stderr at the end of `log`."""
        with log.open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "molink.peer", *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                env=self._environment | {ENDS_WITH_STDIN: "1"}, creationflags=OWN_GROUP,
            )  # fmt: skip

    async def stop(self, peer: LocalPeer) -> int:
        """Has the peer drain and leave; returns its exit status."""
        await _stop(peer.process)
        self._peers.remove(peer)
        return peer.process.returncode or 0

    async def kill(self, peer: LocalPeer) -> None:
        """Ends the peer as a power cut would."""
        peer.process.kill()
        await peer.process.wait()
        self._peers.remove(peer)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """A temporary folder, removed at the end. A lock beside it says that its process lives: whoever makes the next one
    removes those of this user whose processes were killed."""
    root = Path(tempfile.gettempdir())
    for abandoned in root.glob(f"{prefix}*.lock"):
        _remove_abandoned(abandoned)
    descriptor, name = tempfile.mkstemp(".lock", prefix, root)
    os.close(descriptor)
    lock, folder = Path(name), Path(name).with_suffix("")
    with FileLock(lock):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    lock.unlink(missing_ok=True)


def _remove_abandoned(lock: Path) -> None:
    """Removes the lock and its folder, unless it is held. What another user has put there is left alone."""
    with suppress(OSError, Timeout):
        found = lock.lstat()
        if not stat.S_ISREG(found.st_mode) or (sys.platform != "win32" and found.st_uid != os.getuid()):
            return
        with FileLock(lock, timeout=0):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
        lock.unlink(missing_ok=True)


async def _until_ready(process: asyncio.subprocess.Process) -> tuple[str, ...]:
    lines: list[str] = []
    if process.stdout is None:
        return ()
    while line := (await process.stdout.readline()).decode(errors="replace").rstrip():
        lines.append(line)
        if line == "ready":
            break
    return tuple(lines)


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Asks the process to leave; ends it if it does not."""
    if process.returncode is not None:
        return
    if sys.platform == "win32":
        process.send_signal(signal.CTRL_BREAK_EVENT)
    else:
        process.send_signal(signal.SIGINT)
    drain = asyncio.create_task(_drain(process))
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    finally:
        await drain


async def _drain(process: asyncio.subprocess.Process) -> None:
    """Reads what the process still prints, so that it cannot block on a full pipe."""
    if process.stdout is not None:
        await process.stdout.read()


def _last_words(log: Path) -> str:
    words = log.read_text(errors="replace").strip().splitlines()
    return words[-1] if words else "it printed nothing"
