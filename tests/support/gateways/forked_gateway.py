"""Gateways that are forked from a process which has loaded their modules already, as peers are in `forked_peers`.

Loading them takes a processor ten times as long as what most gateways of the tests do afterwards.
"""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from support.swarms.forked_peers import fork_peer, run_peer

import molink.client.gateway
from molink.client.local.local_gateway import LocalGateway

PRELOADED = (
    "httpx",
    "molink.client.circuit.reserving",
    "molink.client.gateway.cli",
    "molink.client.gateway.nodes.node_routes",
    "molink.client.gateway.server",
)

PROGRAM = Path(molink.client.gateway.__file__).with_name("__main__.py")


class ForkedLocalGateway(LocalGateway):
    """A gateway that is forked as peers are, where processes can be: tests that start none as a user does have this."""

    async def launch(self, arguments: Sequence[str], log: Path) -> asyncio.subprocess.Process:
        if sys.platform != "linux":
            return await super().launch(arguments, log)
        return await fork_peer(arguments, dict(os.environ), log, PROGRAM)  # type: ignore[return-value]


class ForkedGateway:
    """What tests use of a `subprocess.Popen` with pipes, of a program that was forked: Linux only."""

    def __init__(self, program: Path, arguments: Sequence[str], log: Path) -> None:
        """Like `python PROGRAM ARGUMENTS`; `log`: where what it says to stderr is kept, for this one alone."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        said, saying = context.Pipe(duplex=False)
        self._log = log
        self._status: int | None = None
        self._process = context.Process(
            target=run_peer, args=(arguments, dict(os.environ), log, saying, program), daemon=True
        )
        with said, saying:
            self._process.start()
            self.stdout: TextIO = os.fdopen(os.dup(said.fileno()), encoding="utf-8")

    @property
    def returncode(self) -> int | None:
        if self._status is None:
            self._status = self._process.exitcode
        return self._status

    def send_signal(self, number: int) -> None:
        if self.returncode is None and self._process.pid is not None:
            with suppress(ProcessLookupError):  # the server that forked it has waited for it already
                os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self.returncode is None:
            self._process.kill()

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it says until it ends, which it has to in time."""
        self._process.join(timeout)
        assert self.returncode is not None, "it does not end"
        return self.stdout.read(), self._log.read_text(encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.returncode is None:
            self.kill()
            self._process.join()
        assert self.returncode is not None
        self._process.close()
        self.stdout.close()
