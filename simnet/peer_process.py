"""An emulated peer as its driver sees it: a process that is started, asked for counters, and ended."""

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType
from typing import IO, Any, Self

from molink.dht.announcement import open_facts
from molink.dht.records import PeerState, PeerView
from molink.shards.spec import Span
from molink.simnet.emulated_peer import PeerConfiguration, PeerCounters, PeerReport

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 15.0
_PROXY_EXCEPTIONS = ("no_proxy", "no_grpc_proxy")
"""Variables that would have a peer go past its own line on this machine."""


class EmulationError(Exception):
    """The emulation cannot go on; the message is one sentence."""


class PeerProcess:
    """One peer between `__aenter__` and `__aexit__`."""

    def __init__(self, configuration: PeerConfiguration) -> None:
        self.configuration = configuration
        self._process: asyncio.subprocess.Process | None = None
        self._log: IO[bytes] | None = None
        self._report: PeerReport | None = None

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
                "molink.simnet.emulated_peer",
                json.dumps(asdict(self.configuration)),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=self._log,
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
            self._report = PeerReport(**await self._answer(READY_TIMEOUT_S))
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end()

    @property
    def view(self) -> PeerView:
        """The peer as a client of its swarm would know it: its own signed facts, all of its layers held."""
        report = self._known()
        record = bytes.fromhex(report.facts)
        facts = open_facts(record)
        state = PeerState(
            peer_id=facts.peer_id,
            sequence=1,
            ttl_s=facts.ttl_s,
            facts_sequence=facts.sequence,
            spans=(Span(self.configuration.start, self.configuration.stop),),
            free_weight_bytes=0,
            free_kv_bytes=report.free_kv_bytes,
            sessions=0,
            queued=0,
        )
        return PeerView(facts, state, age_s=0.0, facts_record=record)

    @property
    def most_sessions(self) -> int:
        return self._known().most_sessions

    async def counters(self) -> PeerCounters:
        """What it has used so far.

        Raises:
            EmulationError: it has ended, or does not answer.
        """
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.write(b"\n")
        return PeerCounters(**await self._answer(ANSWER_TIMEOUT_S))

    def _known(self) -> PeerReport:
        if self._report is None:
            raise EmulationError(f"peer {self.configuration.name} is not running")
        return self._report

    async def _answer(self, timeout_s: float) -> dict[str, Any]:
        process = self._process
        line = b""
        if process is not None and process.stdout is not None:
            try:
                async with asyncio.timeout(timeout_s):
                    line = await process.stdout.readline()
            except TimeoutError:
                line = b""
        if not line:
            raise EmulationError(f"peer {self.configuration.name} does not answer: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def _end(self) -> None:
        """It leaves when its stdin ends; it is killed if it does not."""
        process, self._process = self._process, None
        try:
            if process is None or process.stdin is None:
                return
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
