"""Layers on the bench: a span in the real engine, and how long its steps take."""

import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.compute.backend import Backend
from molink.peer.device.threads import use_fastest
from molink.peer.profiling.profile import (
    FLOOR_MS,
    PIECE_TOKENS,
    WARMING,
    SliceLatency,
    at_most_the_next,
    plausible_slices,
    separated,
    still_warming,
)
from molink.routing.cost.cost import PROFILED_CONTEXT_TOKENS
from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec, Span

BATCH_SIZES = (1, 2, 4, 8, 16, 17, 32, 64)
"""Where compiled layers take 16 rows together, the seventeenth costs as much as all of these: between 16 and 32 a line
would promise guesses that pay."""
FIRST_SIZES = (1, 8, 64)
"""Measured before the others, and also through one layer alone."""
MOST_LAYERS = 32
SEVERAL_BYTES = 512 << 20
"""Several layers are so many as take no more than this, at most MOST_LAYERS; two if two take more. They are more
than caches hold, as a span's are: a layer that is still there from the step before would seem twice as fast."""
WARM_STEPS = 6
"""Most steps at a batch size before it is measured; they count against no budget, but see WARM_BUDGET_S."""
WARM_BUDGET_S = 30.0
"""After so long in steps that are not measured, nothing further is warmed up."""
PREFILL_TOKENS = (16, 32, 64, 128, 256, 512)
LONGER_PREFILL_TOKENS = (1024, 2048)
"""Measured on GPUs, whose steps may be longer where that pays (`scheduling/step_limit.py`)."""
STEPS = 20
"""Most steps measured at one batch size."""
SIZE_BUDGET_S = 0.1
"""A batch size is measured for about this long, and at least MIN_STEPS steps."""
MIN_STEPS = 3
TOTAL_BUDGET_S = 1.0
"""No larger batch size is begun after this long: the machine is slow, and would not serve such batches."""
PREFILL_STEPS = 3
"""At each number of tokens; the first warms up, and the fastest of the others counts."""
PREFILL_BUDGET_S = 0.5
"""No number of tokens is begun that would probably take longer: what follows is extrapolated."""
CONTEXTS_TOKENS = (1024, 512, 256)
"""Of these, the longest context that CONTEXT_BUDGET_S allows to fill is compared with PROFILED_CONTEXT_TOKENS."""
CONTEXT_BUDGET_S = 1.0
CONTEXT_ROWS = 64
"""Tokens of a prompt that are timed with and without a context before them."""
PIECE_STEPS = 3
"""At each number of tokens, of which the fastest counts."""
PIECE_BUDGET_S = 0.5
"""No number of tokens is begun after this long, with or without a context."""


@contextmanager
def on_bench(
    backend: Backend, spec: ModelSpec, device: str, span: Span, deadline_s: float, held: Span | None = None
) -> "Iterator[LayerBench]":
    """The span on the device; its memory is free again afterwards. After `deadline_s` (`time.perf_counter`) as little
    is measured as can be. `held` are several layers with that one in their middle: steps through all are measured too,
    and neither finds in the processor's caches what the other has left there."""
    bench = LayerBench(backend, spec, device, span, deadline_s, held or span)
    try:
        yield bench
    finally:
        bench.release()


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """How long the sequences of a bench are, and how many steps there is room for."""

    context: int
    """Tokens of a sequence before its first step."""
    capacity: int
    warm_steps: int
    """Most steps at a batch size before it is measured."""
    steps: int
    """Most steps measured at one batch size."""

    @classmethod
    def of(cls, spec: ModelSpec) -> "BenchPlan":
        context = min(PROFILED_CONTEXT_TOKENS, max(1, spec.context_length // 2))
        series = len(BATCH_SIZES) + 3
        capacity = min(spec.context_length, context + series * (STEPS + WARM_STEPS))
        share = max(1, (capacity - context) // series)
        warm_steps = min(WARM_STEPS, share // 2)
        return cls(context, capacity, warm_steps, min(STEPS, share - warm_steps))


class LayerBench:
    """One loaded span, and sequences that step through it."""

    def __init__(
        self, backend: Backend, spec: ModelSpec, device: str, span: Span, deadline_s: float, held: Span
    ) -> None:
        started_s = time.perf_counter()
        self.deadline_s = deadline_s
        """Put off by what warming up takes."""
        self.steady = True
        """Whether all that was measured had warmed up before."""
        self._warming_s = 0.0
        self._spec = spec
        self._device = device
        self.span = span
        self._held = held
        self._engine = backend.engine
        backend.load(self._held, lambda _done, _total: None)()
        self._plan = BenchPlan.of(spec)
        self._caches: dict[Span, list[SequenceCache]] = {
            one: [self._filled(one, computed=True)]  # a first pass, which also reads what was only mapped
            for one in dict.fromkeys((self.span, self._held))
        }
        elapsed_s = max(time.perf_counter() - started_s, 1e-6)
        self.load_bytes_per_s = max(1.0, spec.weight_bytes(self._held) / elapsed_s)
        self.opened_s = elapsed_s * spec.weight_bytes(span) / spec.weight_bytes(self._held)
        """How long it took until the first step of the span was done."""

    def layer_latencies(self) -> tuple[tuple[LayerLatency, ...], float]:
        """By batch size, until the time is up, none above that of a larger batch; and what a step takes beside its
        layers, 0 where there is only one layer. Of the fastest steps: a difference of others is what the machine did
        besides."""
        one: dict[int, float] = {}
        several: dict[int, float] = {}
        spent_s = 0.0
        for size in sorted(BATCH_SIZES, key=lambda size: (size not in FIRST_SIZES, size)):
            if several and (self._late or spent_s > TOTAL_BUDGET_S):
                break
            spans = [self._held]
            if size in FIRST_SIZES and self._held != self.span and not self._late:
                spans.append(self.span)
            series = self._series(size, spans, want_logits=False)
            spent_s += sum(map(sum, series)) / 1000
            several[size] = max(FLOOR_MS, min(series[0]))
            if len(series) > 1:
                one[size] = min(series[1])
        layer_ms, step_ms = separated(one, several, len(self._held))
        measured = [LayerLatency(size, layer_ms[size]) for size in sorted(layer_ms)]
        return at_most_the_next(measured), step_ms

    def use_fastest_threads(self, counts: Sequence[int]) -> int:
        """For one row, as a decode step has, or else for part of a prompt."""
        return use_fastest(counts, lambda: self._prefill_ms(1), lambda: self._prefill_ms(self._plan.context))

    def prefill_latencies(self) -> tuple[PrefillLatency, ...]:
        """By tokens, as far as context and budget go; none above that of more tokens."""
        measured: list[LayerLatency] = []
        started_s, next_s = time.perf_counter(), 0.0
        longer = self._device.startswith("cuda") and not any(self._spec.kv_windows)
        for tokens in PREFILL_TOKENS + LONGER_PREFILL_TOKENS * longer:
            spent_s = time.perf_counter() - started_s
            if self._late or tokens > self._spec.context_length or spent_s + next_s > PREFILL_BUDGET_S:
                break
            try:
                layer_ms = min([self._prefill_ms(tokens) for _ in range(PREFILL_STEPS)][1:])
            except torch.OutOfMemoryError:
                if tokens not in LONGER_PREFILL_TOKENS:
                    raise
                break  # steps need not be so long
            measured.append(LayerLatency(tokens, max(FLOOR_MS, layer_ms)))
            next_s = PREFILL_STEPS * 2 * layer_ms / 1000
        return tuple(PrefillLatency(one.batch_size, one.layer_ms) for one in at_most_the_next(measured))

    def context_costs_ms(self) -> tuple[float, float]:
        """What 1000 tokens of context add to a decode step, and to one token of a prompt; 0 where it takes too long to
        find out, or where it is lost in what steps differ by."""
        context = self._long_context(CONTEXT_ROWS + STEPS + 1)
        if context is None:
            return 0.0, 0.0
        cache = self._filled_to(context, CONTEXT_ROWS + STEPS + 1)
        decode_ms = min(self._timed_ms(cache, 1) for _ in range(STEPS))
        short_ms = min(self.step_times_ms(want_logits=False))
        prefill_ms = self._timed_ms(cache, CONTEXT_ROWS)
        alone_ms = min(self._prefill_ms(CONTEXT_ROWS) for _ in range(PREFILL_STEPS))
        return (
            max(0.0, decode_ms - short_ms) * 1000 / (context - PROFILED_CONTEXT_TOKENS),
            max(0.0, prefill_ms - alone_ms) * 1000 / (CONTEXT_ROWS * context),
        )

    def slice_latencies(self) -> tuple[SliceLatency, ...]:
        """By tokens, as far as context and budget go; none where the engine computes no steps in pieces, or where the
        context's part would take too long to find out. What is not measured is found from other times (`slices_of`)."""
        engine = self._engine
        context = self._long_context(PIECE_TOKENS[0])
        if not isinstance(engine, Engine) or context is None:
            return ()
        measured: list[SliceLatency] = []
        most = min(PIECE_TOKENS[-1], self._spec.context_length - context)
        alone, behind = engine.new_cache(self.span, most), self._filled_to(context, most)
        deadline_s = time.perf_counter() + 2 * PIECE_BUDGET_S
        for tokens in PIECE_TOKENS:
            if self._late or tokens > most or time.perf_counter() > deadline_s:
                break
            alone_ms, behind_ms = (
                min(self._slice_ms(engine, cache, tokens) for _ in range(PIECE_STEPS))
                for cache in (alone, behind)
            )
            context_ms = max(0.0, behind_ms - alone_ms) * 1000 / context
            measured.append(SliceLatency(tokens, max(FLOOR_MS, alone_ms), context_ms))
        return plausible_slices(measured)

    def step_times_ms(self, *, want_logits: bool) -> list[float]:
        """The times of some decode steps of one sequence, at least MIN_STEPS if the context has room."""
        return self._series(1, [self.span], want_logits=want_logits)[0]

    def _series(self, batch_size: int, spans: Sequence[Span], *, want_logits: bool) -> list[list[float]]:
        """The same through each of the spans, in turns, so that a busy moment meets all of them."""
        for span in spans:
            caches = self._caches[span]
            while len(caches) < batch_size:
                caches.append(self._filled(span, computed=False))
            self._warm_up(span, batch_size, want_logits)
        series: list[list[float]] = [[] for _ in spans]
        while len(series[0]) < self._plan.steps:
            for times_ms, span in zip(series, spans, strict=True):
                times_ms.append(self._step_ms(span, batch_size, want_logits))
            enough = sum(map(sum, series)) > SIZE_BUDGET_S * 1000 * len(spans)
            if self._late or (len(series[0]) >= MIN_STEPS and enough):
                break
        self.steady &= not any(map(still_warming, series))
        return series

    def _warm_up(self, span: Span, batch_size: int, want_logits: bool) -> None:
        """Steps until one takes about as long as the one before: kernels are compiled, recordings made, weights read.
        Counts against no budget."""
        previous_ms, started_s = math.inf, time.perf_counter()
        for _ in range(self._plan.warm_steps):
            if self._late or self._warming_s + time.perf_counter() - started_s > WARM_BUDGET_S:
                break
            taken_ms = self._step_ms(span, batch_size, want_logits)
            if previous_ms <= WARMING * taken_ms:
                break
            previous_ms = taken_ms
        taken_s = time.perf_counter() - started_s
        self._warming_s += taken_s
        self.deadline_s += taken_s

    def _step_ms(self, span: Span, batch_size: int, want_logits: bool) -> float:
        caches = self._caches[span][:batch_size]
        started_s = time.perf_counter()
        self._step(span, caches, 1, want_logits)
        return (time.perf_counter() - started_s) * 1000

    def release(self) -> None:
        """Gives the memory back; nothing can be measured afterwards."""
        self._caches.clear()
        self._engine.detach(self._held)
        del self._engine
        gc.collect()
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _slice_ms(self, engine: Engine, cache: SequenceCache, tokens: int) -> float:
        """The time of a piece; the cache is afterwards as it was."""
        before = cache.length
        rows, hidden = self._rows([cache], tokens, want_logits=False)
        step = engine.begin_partial(self.span, rows[0], hidden)
        started_s = time.perf_counter()
        engine.advance_slice(engine.gather_slice([step], [tokens]), 1)
        synchronize(self._device)
        taken_ms = (time.perf_counter() - started_s) * 1000
        cache.truncate(before)
        return taken_ms

    def _long_context(self, room: int) -> int | None:
        """The longest of CONTEXTS_TOKENS that there is time to fill, and that leaves room for so many tokens."""
        if self._late or self._spec.context_length <= 2 * CONTEXT_ROWS:
            return None
        row_ms = self._prefill_ms(CONTEXT_ROWS) / CONTEXT_ROWS
        fits = (
            one
            for one in CONTEXTS_TOKENS
            if one + room <= self._spec.context_length and one * row_ms <= CONTEXT_BUDGET_S * 1000
        )
        return next(fits, None)

    def _filled_to(self, context: int, room: int) -> SequenceCache:
        """A sequence of so many tokens, and memory for more."""
        cache = self._engine.new_cache(self.span, context + room)
        for _ in range(0, context, CONTEXT_ROWS):
            self._step(self.span, [cache], CONTEXT_ROWS, want_logits=False)
        return cache

    @property
    def _late(self) -> bool:
        return time.perf_counter() > self.deadline_s

    def _prefill_ms(self, tokens: int) -> float:
        return self._timed_ms(self._engine.new_cache(self.span, tokens), tokens)

    def _timed_ms(self, cache: SequenceCache, tokens: int) -> float:
        started_s = time.perf_counter()
        self._step(self.span, [cache], tokens, want_logits=False)
        return (time.perf_counter() - started_s) * 1000

    def _filled(self, span: Span, *, computed: bool) -> SequenceCache:
        """A sequence of PROFILED_CONTEXT_TOKENS. Unless they are to be `computed`, it holds whatever its memory held:
        how long that takes to read does not depend on it."""
        cache = self._engine.new_cache(span, self._plan.capacity)
        states = not isinstance(self._engine, Engine) or any(layout.states for layout in cache.layouts)
        if not (computed or states):
            cache.require(self._plan.context)
            cache.advance(self._plan.context)
        else:
            self._step(span, [cache], self._plan.context, want_logits=False)
        return cache

    def _step(self, span: Span, caches: Sequence[SequenceCache], count: int, want_logits: bool) -> None:
        rows, hidden = self._rows(caches, count, want_logits=want_logits)
        self._engine.step(span, rows, hidden)
        synchronize(self._device)

    def _rows(
        self, caches: Sequence[SequenceCache], count: int, *, want_logits: bool
    ) -> tuple[list[Rows], torch.Tensor | None]:
        """What a step of `count` tokens of each takes."""
        starts = self.span.start == 0
        tokens = tuple(position % self._spec.vocabulary_size for position in range(count)) if starts else None
        hidden = None
        if not starts:
            dtype = getattr(torch, self._spec.dtype)
            shape = len(caches) * count, self._spec.hidden_size
            hidden = torch.ones(shape, dtype=dtype, device=self._device)
        return [Rows(cache, count, tokens, int(want_logits)) for cache in caches], hidden


def synchronize(device: str) -> None:
    """Waits until the device has done all that it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device == "mps":
        torch.mps.synchronize()
