"""Runs cases in processes of their own, each within its time: those that measure nothing side by side, and then the
others one after the other. Standard library only."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpu.gpu_cases import Case

_LAST_LINES = 12
_ENDING_S = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case."""

    name: str
    verdict: str
    """`holds`, `MISSED`, `FAILED`, `TIMED OUT` or `not run`."""
    took_s: float
    reason: str = ""
    """Why, where it does not hold."""
    rows: tuple[Mapping[str, Any], ...] = ()
    peak_bytes: int = 0
    """Of the device's memory, of the process that took most."""
    last_words: str = ""
    """The end of what its processes wrote, where it does not hold."""

    @property
    def held(self) -> bool:
        return self.verdict == "holds"

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where cases run."""

    device: str
    cores: int
    environment: Mapping[str, str]
    folder: Path
    """For logs and results."""
    deadline_s: float
    """`time.monotonic()` after which no case begins, and none goes on."""


@dataclass(slots=True)
class Part:
    case: Case
    index: int
    count: int
    told: Mapping[str, Any] = field(default_factory=dict)
    timed_out: bool = False
    returncode: int | None = None
    began_s: float = 0.0
    ended_s: float = 0.0
    log: str = ""


async def run_cases(
    machine: Machine,
    cases: Sequence[Case],
    parts_of: Callable[[Case], int],
    report: Callable[[Result], None],
) -> list[Result]:
    """All of them; each is reported when it has ended. In the order of `cases`."""
    places = asyncio.Semaphore(max(1, machine.cores - 1))
    results: dict[str, Result] = {}

    async def run(case: Case) -> None:
        results[case.name] = await _run(machine, case, parts_of(case), places)
        report(results[case.name])

    async with asyncio.TaskGroup() as together:
        for case in cases:
            if not case.alone:
                together.create_task(run(case))
    for case in cases:
        if case.alone:
            await run(case)
    return [results[case.name] for case in cases]


async def _run(machine: Machine, case: Case, count: int, places: asyncio.Semaphore) -> Result:
    parts = [Part(case, index, count) for index in range(count)]
    if time.monotonic() >= machine.deadline_s:
        return Result(
            case.name, "not run", 0.0, "the time of the whole suite was over; run it alone with --only"
        )
    async with asyncio.TaskGroup() as group:
        for part in parts:
            group.create_task(_run_part(machine, part, places))
    return judged(case, parts, max(part.ended_s for part in parts) - min(part.began_s for part in parts))


async def _run_part(machine: Machine, part: Part, places: asyncio.Semaphore) -> None:
    out = machine.folder / f"{part.case.name}-{part.index}.json"
    log = out.with_suffix(".log")
    async with places:
        part.began_s = time.monotonic()
        budget_s = min(part.case.budget_s, machine.deadline_s - time.monotonic())
        arguments = (
            sys.executable, "-m", "gpu.gpu_child", part.case.name, "--device", machine.device,
            "--budget-s", str(budget_s), "--part", str(part.index), "--parts", str(part.count), "--out", str(out),
        )  # fmt: skip
        with log.open("wb") as written:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdout=written,
                stderr=written,
                stdin=asyncio.subprocess.DEVNULL,
                env=dict(machine.environment),
                start_new_session=os.name == "posix",
            )
        try:
            async with asyncio.timeout(max(1.0, budget_s)):
                part.returncode = await process.wait()
        except TimeoutError:
            part.timed_out = True
        finally:
            await _end(process)
            part.ended_s = time.monotonic()
    part.log = log.read_text(encoding="utf-8", errors="replace")
    if out.exists():
        part.told = json.loads(out.read_text(encoding="utf-8"))


async def _end(process: asyncio.subprocess.Process) -> None:
    """The process and, where the system has such groups, those that it started."""
    with suppress(ProcessLookupError, PermissionError):
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        elif process.returncode is None:
            process.kill()
    with suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), _ENDING_S)


def judged(case: Case, parts: Sequence[Part], took_s: float) -> Result:
    """One verdict on all parts: the worst."""
    rows = tuple(row for part in parts for row in part.told.get("rows", ()))
    words = "\n".join("\n".join(part.log.strip().splitlines()[-_LAST_LINES:]) for part in parts if part.log)
    peak_bytes = max((int(part.told.get("peak_bytes", 0)) for part in parts), default=0)

    def result(verdict: str, reason: str = "") -> Result:
        return Result(
            case.name, verdict, took_s, reason, rows, peak_bytes, "" if verdict == "holds" else words
        )

    for part in parts:
        if part.timed_out:
            return result("TIMED OUT", f"it was ended after {took_s:.0f} s")
        if not part.told:
            return result("FAILED", f"its process ended with status {part.returncode} and said nothing")
        if "error" in part.told:
            return result("FAILED", str(part.told["error"]))
    reasons = [str(part.told["not_run"]) for part in parts if "not_run" in part.told]
    if reasons:
        return result("not run", reasons[0])
    missed = [str(row["name"]) for row in rows if row.get("held") is False]
    if missed:
        return result("MISSED", "; ".join(missed))
    return result("holds") if rows else result("FAILED", "it looked at nothing")
