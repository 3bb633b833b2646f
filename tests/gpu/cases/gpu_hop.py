"""The case `hop`: three hops in this process, the middle one's clock and its event loop watched."""

import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu.cases.big_models import wide_scale, write_random
from gpu.gpu_findings import Context, Findings
from support.swarms.served_circuit import served_circuit

from molink.peer.daemon.peer import SWITCH_INTERVAL_S
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.models.model import LocalModel
from molink.peer.profiling.profile import StepWork
from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint import store
from molink.shards.spec import Span

CLOCK_BAR = 0.10
"""Of the device's time of a step."""
STALL_MS = 2.0
_TICK_S = 0.0005
PROMPT_TOKENS, NEW_TOKENS = 4000, 64
SMALL_PROMPT_TOKENS, SMALL_NEW_TOKENS = 24, 6


@dataclass(slots=True)
class _Watched:
    """Steps of the middle hop."""

    device: str
    told_s: list[float] = field(default_factory=list)
    """By the hop, of its decode steps."""
    events: list[tuple[Any, Any]] = field(default_factory=list)
    """Around them on the device, or the clock's readings on a processor."""

    def times_s(self) -> list[float]:
        """By the device."""
        if self.device == "cpu":
            return [stop - start for start, stop in self.events]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(stop) / 1000 for start, stop in self.events]

    def mark(self) -> Any:  # noqa: ANN401 - an event or a reading
        if self.device == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


@contextmanager
def _watching(device: str, layers: int) -> Iterator[_Watched]:
    watched = _Watched(device)
    step, stepped = Engine.step, PeerMetrics.stepped

    def watched_step(
        self: Engine, span: Span, rows: Sequence[Rows], hidden: torch.Tensor | None
    ) -> torch.Tensor:
        if span.start == 0 or span.stop == layers or any(row.count > 1 for row in rows):
            return step(self, span, rows, hidden)
        before = watched.mark()
        result = step(self, span, rows, hidden)
        watched.events.append((before, watched.mark()))
        return result

    def watched_stepped(
        self: PeerMetrics, compute_s: float, sessions: int, rows: int, work: StepWork | None, *more: object
    ) -> None:
        if work is not None and not work.starts and not work.ends and not work.prefills:
            watched.told_s.append(compute_s)
        stepped(self, compute_s, sessions, rows, work, *more)  # type: ignore[call-arg]

    Engine.step, PeerMetrics.stepped = watched_step, watched_stepped  # type: ignore[method-assign]
    try:
        yield watched
    finally:
        Engine.step, PeerMetrics.stepped = step, stepped  # type: ignore[method-assign]


async def _longest_stall_s(done: asyncio.Event) -> float:
    """By how much the loop was late for a task that sleeps for a tick, at most."""
    longest = 0.0
    while not done.is_set():
        began_s = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        longest = max(longest, time.perf_counter() - began_s - _TICK_S)
    return longest


def middle_hop(context: Context, findings: Findings) -> None:
    """A prompt and its generation, after one that is not counted."""
    scale = wide_scale(context, layers=8)
    folder = write_random(scale, context.folder, context.device)
    manifest = store.read_manifest(folder)
    model = LocalModel(folder, manifest, store.describe(manifest, scale.dtype, "none", name="random/llama"))
    prompt_tokens, new_tokens = (
        (SMALL_PROMPT_TOKENS, SMALL_NEW_TOKENS) if context.small else (PROMPT_TOKENS, NEW_TOKENS)
    )
    asyncio.run(_generate(context, findings, model, prompt_tokens, new_tokens))


async def _generate(
    context: Context, findings: Findings, model: LocalModel, prompt_tokens: int, new_tokens: int
) -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    layers = model.spec.layers
    cuts = (1, layers - 1)
    prompt = [1 + index % 40 for index in range(prompt_tokens)]
    with _watching(context.device, layers) as watched:
        room = 4 * (prompt_tokens + new_tokens + 16)
        async with served_circuit(model, cuts, kv_tokens=room) as circuit:
            await circuit.generate([prompt], new_tokens)
            watched.told_s.clear()
            watched.events.clear()
            done = asyncio.Event()
            stall = asyncio.create_task(_longest_stall_s(done))
            await circuit.generate([prompt], new_tokens)
            done.set()
            stall_s = await stall
    told_s, device_s = statistics.median(watched.told_s), statistics.median(watched.times_s())
    off = abs(told_s - device_s) / device_s
    figures = {"told_ms": 1000 * told_s, "device_ms": 1000 * device_s, "steps": len(watched.told_s)}
    findings.judge("compute_s beside the device's events, off by", off, "", CLOCK_BAR, **figures)
    findings.judge("longest stall of the loop in a prompt", 1000 * stall_s, "ms", STALL_MS)
    findings.hold("decode steps watched", len(watched.events) >= new_tokens - 2, str(len(watched.events)))
