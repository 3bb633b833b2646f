"""A long prompt beside sessions that decode, at the engine and with the peer's own choice of pieces."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bench.tables import Table

from molink.peer.compute.backend import MeasuredModel
from molink.peer.profiling.profile import StepWork
from molink.peer.profiling.profiler import measure
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.prefill_slices import RemainingPrefill, SliceSizer
from molink.routing.cost.prefill_chunks import most_chunk_tokens
from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.partial_step import SliceBatch
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import MAX_STEP_TOKENS, Span

PROMPT_TOKENS = 8000
CHUNK_TOKENS = most_chunk_tokens([MAX_STEP_TOKENS])
CONTEXT_TOKENS = 32, 96
"""Of the sessions that decode: from, to."""
IDLE_STEPS = 25
"""Between two chunks."""
BUSY_S = 0.4
"""No measurement is begun after so long without a rest: the kernel stops a process of real-time priority for 50 ms of
each second in which it does not rest for as long."""
REST_S = 0.07
"""Threads of OpenMP look for work for some 9 ms of it. One decode step, not counted, comes behind."""
LATENCY_BAR = 2.0
"""99th percentile of the time between tokens beside the prompt, over that with nothing beside."""
PREFILL_BAR = 0.6
"""Speed of the prompt beside decode, over its speed alone."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """Milliseconds; chunks of the prompt take turns in all three ways."""

    idle_ms: list[float] = field(default_factory=list)
    """Of decode steps alone."""
    beside_ms: list[float] = field(default_factory=list)
    """From a decode step to the next, with a piece of the prompt in between."""
    alone_ms: list[float] = field(default_factory=list)
    """Of chunks alone."""
    piece_ms: list[float] = field(default_factory=list)

    @property
    def prefill_share(self) -> float:
        """How fast the prompt is beside decode, over its speed alone."""
        return sum(self.alone_ms) / sum(self.beside_ms)


def timed_ms(action: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    action()
    return (time.perf_counter() - began_s) * 1000


class Mixing:
    """Sessions that decode, and one prompt twice."""

    def __init__(self, engine: Engine, span: Span, sessions: int, step_times: StepTimes) -> None:
        self._engine = engine
        self._span = span
        self._step_times = step_times
        self._sizes = SliceSizer(step_times)
        first, last = CONTEXT_TOKENS
        self._rested_s = 0.0
        self._decoding = [engine.new_cache(span, last + 1) for _ in range(sessions)]
        for cache in self._decoding:
            engine.step(span, [self._rows(cache, first)], None)

    def run(self) -> Mixed:
        """The whole prompt, chunk by chunk."""
        mixed = Mixed()
        alone, beside = (self._engine.new_cache(self._span, PROMPT_TOKENS) for _ in range(2))
        for _ in range(2 * IDLE_STEPS):
            self._decode(beside=False)  # warms up, and corrects what was measured at start-up
        for first in range(0, PROMPT_TOKENS, CHUNK_TOKENS):
            tokens = min(CHUNK_TOKENS, PROMPT_TOKENS - first)
            mixed.idle_ms.extend(self._decode(beside=False) for _ in range(IDLE_STEPS))
            self._rest()
            rows = self._rows(alone, tokens)
            mixed.alone_ms.append(timed_ms(lambda rows=rows: self._engine.step(self._span, [rows], None)))
            self._rest()
            for decode_ms, piece_ms in self._in_pieces(beside, tokens):
                mixed.beside_ms.append(decode_ms + piece_ms)
                mixed.piece_ms.append(piece_ms)
        return mixed

    def _in_pieces(self, cache: SequenceCache, tokens: int) -> Iterator[tuple[float, float]]:
        """A decode step and a piece in turns, until the chunk is through."""
        step = self._engine.begin_partial(self._span, self._rows(cache, tokens), None)
        piece: SliceBatch | None = None
        while step.left_tokens:
            decode_ms = self._decode(beside=True)
            began_s = time.perf_counter()
            left = (RemainingPrefill(step.left_tokens, cache.length),)
            layers = len(self._span) if piece is None else self._span.stop - piece.layer
            under_way = () if piece is None else piece.tokens
            size = self._sizes.next_slice(layers, left, len(self._decoding), under_way)
            piece = piece or self._engine.gather_slice([step], size.tokens)
            self._engine.advance_slice(piece, size.layers)
            piece = piece if piece.layer < self._span.stop else None
            piece_ms = (time.perf_counter() - began_s) * 1000
            self._sizes.record_slice(size, left, piece_ms)
            yield decode_ms, piece_ms

    def _decode(self, *, beside: bool) -> float:
        """Milliseconds of one step of all sessions that decode."""
        if time.perf_counter() - self._rested_s > BUSY_S:
            self._rest()
        work, taken_ms = self._stepped()
        self._sizes.record_decode(work, taken_ms, beside=beside)
        if not beside:
            self._step_times.observe(work, taken_ms)
        return taken_ms

    def _rest(self) -> None:
        time.sleep(REST_S)
        self._rested_s = time.perf_counter()
        self._stepped()

    def _stepped(self) -> tuple[StepWork, float]:
        """A decode step, and its milliseconds."""
        if self._decoding[0].length >= CONTEXT_TOKENS[1]:
            for cache in self._decoding:
                cache.truncate(CONTEXT_TOKENS[0])
        contexts = tuple(cache.length for cache in self._decoding)
        rows = [self._rows(cache, 1) for cache in self._decoding]
        taken_ms = timed_ms(lambda: self._engine.step(self._span, rows, None).argmax(-1).tolist())
        return StepWork(len(self._span), starts=True, ends=True, decode_contexts=contexts), taken_ms

    def _rows(self, cache: SequenceCache, tokens: int) -> Rows:
        ids = tuple(7 * at * at % 1024 for at in range(cache.length, cache.length + tokens))
        return Rows(cache, tokens, ids, logit_rows=1)


def report_mixing(engine: Engine, folder: Path, span: Span, table: Table) -> None:
    """With one session that decodes and with eight; the bars are for one."""
    profile = measure(MeasuredModel(folder, engine.spec, "cpu"))
    for sessions in (1, 8):
        mixed = Mixing(engine, span, sessions, StepTimes(profile)).run()
        shown = [np.percentile(times, (50, 99)) for times in (mixed.idle_ms, mixed.beside_ms)]
        for name, (median_ms, high_ms) in zip(("alone", "beside a prompt"), shown, strict=True):
            text = f"{median_ms:.1f} ms, p99 {high_ms:.1f} ms"
            table.note(f"{sessions} decoding, {name}", text, median_ms=median_ms, p99_ms=high_ms)
        medians, highs = (float(shown[1][at] / shown[0][at]) for at in (0, 1))
        prefill_s = sum(mixed.alone_ms) / 1000, sum(mixed.beside_ms) / 1000
        text = f"{prefill_s[0]:.2f} s alone, {prefill_s[1]:.2f} s beside {sessions} decoding"
        table.note(f"{PROMPT_TOKENS} tokens of prompt", text, alone_s=prefill_s[0], beside_s=prefill_s[1])
        if sessions == 1:
            table.note("median beside over alone", f"{medians:.2f} times", figure=medians)
            table.judge("p99 beside over alone", highs, "times", LATENCY_BAR)
            table.judge("prompt beside over alone", mixed.prefill_share, "times", PREFILL_BAR, least=True)
        else:
            table.note("median, p99 beside over alone", f"{medians:.2f}, {highs:.2f} times", figure=highs)
            table.note(
                "prompt beside over alone", f"{mixed.prefill_share:.2f} times", figure=mixed.prefill_share
            )
