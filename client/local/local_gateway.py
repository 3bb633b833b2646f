"""A gateway in a process of its own on this machine: for the demonstration, benchmarks and tests."""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from molink.client.errors import SwarmUnavailable
from molink.client.text.early_text import OWN_GROUP
from molink.commands import ENDS_WITH_STDIN

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_LISTENS = "Listening on "


class LocalGateway:
    """`molink-gateway` on a free port of this machine, between `__aenter__` and `__aexit__`."""

    def __init__(self, initial_peers: Sequence[str], log: Path, *options: str) -> None:
        """`log` is the file that takes what it writes to stderr; its state directory lies beside it. `options` are
        added to its command line, and come last."""
        self._initial_peers = tuple(initial_peers)
        self._log = log
        self._options = ("--state-dir", str(log.with_name(f"{log.name}.state")), *options)
        self._process: asyncio.subprocess.Process | None = None
        self.url = ""
        """Where it listens, such as http://127.0.0.1:41234."""

    async def __aenter__(self) -> Self:
        """Raises:
        SwarmUnavailable: it ended, or did not listen within START_TIMEOUT_S.
        """
        arguments = ("--port", "0", "--initial-peers", *self._initial_peers, *self._options)
        process = self._process = await self.launch(arguments, self._log)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                line = await process.stdout.readline() if process.stdout is not None else b""
        except TimeoutError:
            line = b""
        except BaseException:
            await self._stop()
            raise
        text = line.decode(errors="replace").strip()
        if not text.startswith(_LISTENS):
            await self._stop()
            raise SwarmUnavailable(f"the gateway did not start: {self.last_words()}")
        self.url = text.removeprefix(_LISTENS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        """`molink-gateway ARGUMENTS`, with a pipe as its stdout and its stderr at the end of `log`."""
        with log.open("ab") as errors:
            return await asyncio.create_subprocess_exec(
                sys.executable, "-m", "molink.client.gateway", *arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                env=os.environ | {ENDS_WITH_STDIN: "1"}, creationflags=OWN_GROUP,
            )  # fmt: skip

    @property
    def process_id(self) -> int | None:
        """None before it was started."""
        return None if self._process is None else self._process.pid

    async def wait(self) -> int:
        """Waits until it has ended by itself; returns its exit status."""
        if self._process is None:
            raise RuntimeError("the gateway was not started")
        return await _end_of(self._process)

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"

    async def _stop(self) -> None:
        """Asks the process to end; ends it if it does not."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if sys.platform == "win32":
            process.send_signal(signal.CTRL_BREAK_EVENT)
        else:
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await _end_of(process)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _end_of(process: asyncio.subprocess.Process) -> int:
    """Its exit status once it has ended. Reads on, so that it cannot block on a full pipe; its stdin stays open."""
    if process.stdout is not None:
        await process.stdout.read()
    return await process.wait()
