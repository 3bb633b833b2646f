"""Peers that are forked from a process which has loaded their modules already.

Loading them takes a processor several times as long as what most peers of the tests do afterwards. A forked peer is a
process like any other in all that follows: it has a memory and sockets of its own, is signalled, frozen and killed.
Only tests where the start of the program matters, or all of its environment, start it as its users do.
"""

import asyncio
import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

from support.peer_findings import remember, remind

from molink.client.local.local_swarm import LocalPeer, LocalSwarm

if TYPE_CHECKING:
    from support.swarms.live_swarms import Ended

TESTS = Path(__file__).parents[2]
PRELOADED = ("support.swarms.loaded_peer",)


class ForkedProcess:
    """What a swarm uses of an `asyncio.subprocess.Process`, of one that was forked."""

    def __init__(self, process: ForkServerProcess, stdout: asyncio.StreamReader) -> None:
        loop = asyncio.get_running_loop()
        self._process = process
        self._ended: asyncio.Future[None] = loop.create_future()
        self.stdout = stdout
        self.returncode: int | None = None
        loop.add_reader(process.sentinel, self._end)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.returncode = self._process.exitcode
        self._ended.set_result(None)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    async def wait(self) -> int | None:
        await asyncio.shield(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None and self.pid is not None:
            with suppress(ProcessLookupError):  # the server that forked it has waited for it already
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkedSwarm(LocalSwarm):
    """A swarm whose peers are forked, where processes can be, and find out nothing that a peer of this kind has found
    out before: each begins with what a later start on this machine would remember."""

    async def join(self, name: str, *options: str, initial_peers: Sequence[str] | None = None) -> LocalPeer:
        remind(self.folder / name)
        peer = await super().join(name, *options, initial_peers=initial_peers)
        remember(peer.state_dir)
        return peer

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        if sys.platform != "linux":
            return await super().launch(arguments, log)
        return await fork_peer(arguments, self.environment, log)  # type: ignore[return-value]


def forking_context(preloaded: Sequence[str]) -> multiprocessing.context.ForkServerContext:
    """Where processes are forked from one that has loaded these modules: of each test process the first that asks says
    which. The server looks for them where Python does, whatever this process has added to its path."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    with patch.dict(os.environ, {"PYTHONPATH": path}):
        forkserver.ensure_running()
    return context


async def fork_peer(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, program: Path | None = None
) -> ForkedProcess:
    """Like `molink-peer ARGUMENTS`, or `python PROGRAM ARGUMENTS`."""
    context = forking_context(PRELOADED)
    said, saying = context.Pipe(duplex=False)
    process = context.Process(
        target=run_peer, args=(arguments, environment, log, saying, program), daemon=True
    )
    with said, saying:
        process.start()
        pipe = os.fdopen(os.dup(said.fileno()), "rb", buffering=0)
    stdout = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), pipe)
    return ForkedProcess(process, stdout)


async def run_forked(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> "Ended":
    """Runs what is like `molink-peer ARGUMENTS` to its end; as `run_program` otherwise. `log` is a new file's path."""
    # Forked processes import this module and never come here: they are spared all that compares with transformers.
    from support.swarms.live_swarms import PROGRAM_TIMEOUT_S, Ended, run_program

    if sys.platform != "linux":
        return await run_program("molink.peer", *arguments, environment=environment)
    process = await fork_peer(arguments, {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}, log)
    try:
        async with asyncio.timeout(PROGRAM_TIMEOUT_S):
            out = await process.stdout.read()
            status = await process.wait()
    finally:
        process.kill()
    said = await asyncio.to_thread(log.read_text, "utf-8")
    return Ended(status or 0, out.decode(), said)


async def start_program(program: Path, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
    """`python PROGRAM ARGUMENTS`, its stdout a pipe, its stderr at the end of `log`; forked where it can be."""
    if sys.platform == "linux":
        return await fork_peer(arguments, dict(os.environ), log, program)  # type: ignore[return-value]
    with log.open("ab") as errors:
        return await asyncio.create_subprocess_exec(
            sys.executable, str(program), *arguments, stdout=asyncio.subprocess.PIPE, stderr=errors
        )


def run_peer(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    saying: Connection,
    program: Path | None,
) -> None:
    """What the forked process does."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # what the variables say counts now
    if "huggingface_hub.constants" in sys.modules:
        importlib.reload(sys.modules["huggingface_hub.constants"])
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as in a terminal, even where tests are to outlive theirs
    with saying, log.open("ab") as errors:
        os.dup2(saying.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", encoding="utf-8"), os.fdopen(2, "w", 1, encoding="utf-8")
    if program is None:
        from molink.peer.commands import cli

        cli.main(arguments)
    else:
        sys.argv = [str(program), *arguments]
        runpy.run_path(str(program), run_name="__main__")
