"""Processes of an emulation as its driver sees them: told their configuration, they answer lines with lines, and end
with their stdin."""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any, Self

from molink.dht.records.announcement import verify_facts
from molink.dht.records.records import PeerState, PeerView
from molink.shards.spec import Span
from molink.simnet.emulate.processes.lines import LinesConfiguration, LinesCounters
from molink.simnet.emulate.processes.peer import PeerConfiguration, PeerCounters, PeerReport

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 15.0
_PROXY_EXCEPTIONS = ("no_proxy", "no_grpc_proxy")
"""Variables that would have a peer go past its own line on this machine."""


class EmulationError(Exception):
    """The emulation cannot go on; the message is one sentence."""


class ChildProcess:
    """`python -m molink.simnet.emulate.processes KIND CONFIGURATION` between `__aenter__` and `__aexit__`.

    All that is said is JSON, one line each. It says one thing when it is ready, and then one for each thing that it is
    asked.
    """

    def __init__(self, kind: str, configuration: Mapping[str, object], name: str) -> None:
        self.name = name
        self.first_words: dict[str, Any] = {}
        """What it said when it was ready."""
        self._kind = kind
        self._configuration = configuration
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None

    async def __aenter__(self) -> Self:
        """Starts it, and waits until it is ready.

        Raises:
            EmulationError: it ended or said nothing in time; the text holds its last words.
        """
        environment = {
            key: value for key, value in os.environ.items() if key.lower() not in _PROXY_EXCEPTIONS
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "molink.simnet.emulate.processes",
                self._kind,
                json.dumps(self._configuration),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
            self.first_words = await self._answer(READY_TIMEOUT_S)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    async def ask(self, question: object) -> dict[str, Any]:
        """Its answer. One question at a time.

        Raises:
            EmulationError: it has ended, or does not answer.
        """
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
        return await self._answer(ANSWER_TIMEOUT_S)

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        line = b""
        if self._process is not None and self._process.stdout is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    line = await self._process.stdout.readline()
            except TimeoutError:
                line = b""
        if not line:
            raise EmulationError(f"{self.name} does not answer: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _end(self) -> None:
        """It leaves when its stdin ends; it is killed if it does not."""
        process, self._process = self._process, None
        try:
            if process is None:
                return
            if process.stdin is not None:
                process.stdin.close()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await process.communicate()
            except TimeoutError:
                process.kill()
                await process.wait()
        finally:
            if self._log is not None:
                self._log.close()

    def _last_words(self) -> str:
        if self._log is None:
            return "it was not started"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        return words[-1] if words else "it printed nothing"


__all__ = ["LinesConfiguration", "LinesCounters", "LinesProcess"]


class LinesProcess:
    """One uplink for each home, between `__aenter__` and `__aexit__`."""

    def __init__(self, configuration: LinesConfiguration) -> None:
        self._child = ChildProcess("lines", asdict(configuration), "the lines' process")

    async def __aenter__(self) -> Self:
        """Starts it; raises EmulationError if it does not get ready."""
        await self._child.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.__aexit__(kind, error, trace)

    @property
    def proxies(self) -> tuple[str, ...]:
        """For each home the URL of the HTTP proxy through which it reaches the others."""
        return tuple(self._child.first_words["proxies"])

    async def settle(self, addresses: Sequence[Sequence[str]]) -> None:
        """Says which addresses (host:port) are at which home."""
        await self._child.ask({"addresses": [list(home) for home in addresses]})

    async def counters(self) -> LinesCounters:
        """What has passed so far; raises EmulationError if it has ended, or does not answer."""
        answer = await self._child.ask("counters")
        return LinesCounters(answer["at_s"], answer["cpu_s"], tuple(answer["busy_s"]))


class PeerProcess:
    """One peer between `__aenter__` and `__aexit__`."""

    def __init__(self, configuration: PeerConfiguration) -> None:
        self._span = Span(configuration.start, configuration.stop)
        self._child = ChildProcess("peer", asdict(configuration), f"peer {configuration.name}")

    async def __aenter__(self) -> Self:
        """Starts it, and waits until it is ready; raises EmulationError if it does not get so far."""
        await self._child.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.__aexit__(kind, error, trace)

    @property
    def view(self) -> PeerView:
        """The peer as a client of its swarm would know it: its own signed facts, all of its layers held."""
        report = self._report
        record = bytes.fromhex(report.facts)
        facts = verify_facts(record)
        state = PeerState(
            peer_id=facts.peer_id,
            sequence=1,
            ttl_s=facts.ttl_s,
            facts_sequence=facts.sequence,
            spans=(self._span,),
            free_weight_bytes=0,
            free_kv_bytes=report.free_kv_bytes,
            sessions=0,
            queued=0,
        )
        return PeerView(facts, state, age_s=0.0, facts_record=record)

    @property
    def most_sessions(self) -> int:
        return self._report.most_sessions

    async def counters(self) -> PeerCounters:
        """What it has used so far; raises EmulationError if it has ended, or does not answer."""
        return PeerCounters(**await self._child.ask("counters"))

    @property
    def _report(self) -> PeerReport:
        return PeerReport(**self._child.first_words)
