"""Runs of one way of sending over one emulated line, for `link`: the processes, and what their answers say."""

import asyncio
import json
import math
import statistics
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.link.link_rivals import DECODE, HOST, PREFILL

ENDS = Path(__file__).resolve().parent / "link_ends.py"
MESSAGE_LIMIT_BYTES = 16 * 1024 * 1024
ANSWER_TIMEOUT_S = 90.0
WINDOW = 5
"""Of the running median."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the emulated line, each direction."""

    rate_mbps: float = 100.0
    delay_ms: float = 15.0
    jitter_ms: float = 0.0
    queue_ms: float = 100.0

    def __str__(self) -> str:
        jitter = f" and jitter of {self.jitter_ms:g} ms" if self.jitter_ms else ""
        return (
            f"{self.rate_mbps:g} Mbps, {self.delay_ms:g} ms{jitter} each way, queue of {self.queue_ms:g} ms"
        )


@dataclass(frozen=True, slots=True)
class Work:
    """What the sender does. The first `skip_prefills` do not count."""

    decode_bytes: int = 32 * 1024
    interval_s: float = 0.040
    prefill_bytes: int = 16 * 1024 * 1024
    prefills: int = 3
    prefill_for_s: float = 0.0
    lead_s: float = 0.4
    tail_s: float = 0.2
    drain_s: float = 0.3
    limit_s: float = 15.0
    skip_prefills: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """What one or more runs of a way gave."""

    decode_ms: list[float] = field(default_factory=list)
    """One way, of those scheduled while a counted prefill was on its way. Never arrived: infinite."""
    idle_ms: list[float] = field(default_factory=list)
    """Of those scheduled before the first prefill; without any prefill, of all."""
    prefill_s: list[float] = field(default_factory=list)
    unfinished: int = 0
    prefill_bytes: int = 0
    prefilling_s: float = 0.0
    sender_cores: float = math.nan
    receiver_cores: float = math.nan
    changed_s: float = math.nan
    decodes: list[tuple[float, float]] = field(default_factory=list)
    """Every decode message: when it was scheduled, and its milliseconds."""
    trouble: str = ""

    def joined(self, other: "Run") -> "Run":
        """This and another round."""
        return replace(
            self,
            decode_ms=self.decode_ms + other.decode_ms,
            idle_ms=self.idle_ms + other.idle_ms,
            prefill_s=self.prefill_s + other.prefill_s,
            unfinished=self.unfinished + other.unfinished,
            trouble=self.trouble or other.trouble,
        )

    def recovered_s(self, limit_ms: float) -> float:
        """From the change of the line until the median of WINDOW decodes in a row is under the limit for good: when the
        last message of the first such window arrived. Infinite if the last window is still above."""
        after = [(at_s, ms) for at_s, ms in self.decodes if at_s >= self.changed_s]
        recovered_s = math.inf
        for end in range(len(after), WINDOW - 1, -1):
            window = after[end - WINDOW : end]
            if statistics.median(ms for _, ms in window) > limit_ms:
                break
            recovered_s = window[-1][0] + window[-1][1] / 1000 - self.changed_s
        return recovered_s


def median(values: list[float]) -> float:
    return statistics.median(values) if values else math.nan


def p99(values: list[float]) -> float:
    """The nearest rank."""
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else math.nan


Answer = dict[str, Any]


class Worker:
    """A process that takes lines and answers with lines."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._process: Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *self._command, stdin=PIPE, stdout=PIPE, limit=MESSAGE_LIMIT_BYTES
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(5):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def line(self) -> str:
        """The next line that it says."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            text = await self._process.stdout.readline()
        if not text:
            raise RuntimeError(f"{' '.join(self._command)} has ended")
        return text.decode()

    async def ask(self, text: str) -> Answer:
        """Its answer to a line, which is JSON."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode() + b"\n")
        answer: Answer = json.loads(await self.line())
        return answer

    async def order(self, **order: object) -> Answer:
        return await self.ask(json.dumps(order))


class Bench:
    """The two ends' processes, between `__aenter__` and `__aexit__`."""

    def __init__(self, rounds: int, *, verbose: bool) -> None:
        self.rounds = rounds
        self._verbose = verbose
        self._stack = AsyncExitStack()
        self._sender = Worker(str(ENDS), "sender")
        self._receiver = Worker(str(ENDS), "receiver")
        self._tell = 0

    async def __aenter__(self) -> Self:
        for worker in (self._sender, self._receiver):
            await self._stack.enter_async_context(worker)
        self._tell = (await self._sender.order(do="hello"))["tell"]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(
        self,
        way: str,
        shape: Shape,
        work: Work,
        *,
        ends: int = 1,
        window_bytes: int = 0,
        change: tuple[float, str] | None = None,
    ) -> Run:
        """One run over a new line. `change`: after so many seconds, a command to the line."""
        opened = (await self._receiver.order(do="open", way=way, ends=ends, tell=self._tell))["ends"]
        command = ["-m", "molink.simnet.lines.shaping"]
        for end in opened:
            command += ["--target", f"{HOST}:{end['port']}"]
        for name, value in (("rate-mbps", shape.rate_mbps), ("delay-ms", shape.delay_ms),
                            ("jitter-ms", shape.jitter_ms), ("queue-ms", shape.queue_ms)):  # fmt: skip
            command += [f"--{name}", str(value)]
        changed_s = math.nan
        async with Worker(*command) as line:
            for end in opened:
                end["address"] = f"{HOST}:{int(await line.line())}"
            order = {name: getattr(work, name) for name in Work.__slots__ if name != "skip_prefills"}
            running = asyncio.create_task(
                self._sender.order(do="run", way=way, ends=opened, window_bytes=window_bytes, **order)
            )
            if change is not None:
                await asyncio.sleep(change[0])
                changed_s = asyncio.get_running_loop().time()
                await line.ask(change[1])
            sent = await running
        received = await self._receiver.order(do="close")
        run = evaluated(sent, received, work, changed_s)
        if self._verbose:
            ms = run.decode_ms or run.idle_ms
            seconds = " ".join(f"{one:.2f}" for one in run.prefill_s[:6])
            print(f"    {way}: decode {median(ms):.1f} / {p99(ms):.1f} ms of {len(ms)}; prefill {seconds} s "
                  f"{run.trouble}", file=sys.stderr, flush=True)  # fmt: skip
        return run

    async def echo(self, size_bytes: int, count: int) -> Answer:
        """Round trips on loopback, no line between."""
        ends = (await self._receiver.order(do="echo"))["ends"]
        answer = await self._sender.order(do="echo", ends=ends, bytes=size_bytes, count=count)
        await self._receiver.order(do="close")
        return answer


def evaluated(sent: dict[str, Any], received: dict[str, Any], work: Work, changed_s: float) -> Run:
    """What both ends saw, put together."""
    arrived_s = {number: at_s for kind, number, at_s in received["arrivals"] if kind == DECODE}
    ended_s = [at_s for kind, _, at_s in received["arrivals"] if kind == PREFILL]
    decodes = [
        (at_s, (arrived_s[number] - at_s) * 1000 if number in arrived_s else math.inf)
        for number, at_s in enumerate(sent["scheduled"])
    ]
    begun_s = [begin_s for begin_s, _ in sent["prefills"]]
    spans = list(zip(begun_s, ended_s, strict=False))[work.skip_prefills :]
    first_s = min(begun_s, default=math.inf)
    counted_s = begun_s[work.skip_prefills] if len(begun_s) > work.skip_prefills else math.inf
    last_s = math.inf if len(ended_s) < len(begun_s) else max(ended_s, default=math.inf)
    over_s = min(last_s, max((at_s for at_s, _ in decodes), default=0.0) + 1e-9)
    return Run(
        decode_ms=[ms for at_s, ms in decodes if counted_s <= at_s < over_s],
        idle_ms=[ms for at_s, ms in decodes[5:] if at_s < first_s - work.interval_s],
        prefill_s=[end_s - begin_s for begin_s, end_s in spans],
        unfinished=len(begun_s) - len(ended_s),
        prefill_bytes=work.prefill_bytes * len(spans),
        prefilling_s=over_s - counted_s if spans else math.nan,
        sender_cores=sent["cpu_s"] / sent["took_s"],
        receiver_cores=received["cpu_s"] / sent["took_s"],
        changed_s=changed_s,
        decodes=decodes,
        trouble=sent["trouble"],
    )
