"""How fast this machine is: one layer's decode step by batch size and prefill by tokens, what a longer context adds to
each, the model's ends, and loading.

Measured with real weights in the real engine, one layer of the model at a time, so that little memory is
enough for a large model. Remembered, because a volunteer restarts more often than hardware changes.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch

from molink.dht.records import LayerLatency, PrefillLatency
from molink.peer.backend import Backend, MeasuredDevice
from molink.peer.device import describe_device
from molink.peer.profiling.profile import PieceLatency, Profile, at_most_the_next, plausible_pieces
from molink.peer.profiling.profile_json import FLOOR_MS, from_json, to_json
from molink.peer.profiling.thread_choice import share_of_others, stays_the_best
from molink.peer.profiling.threads import processor_times, use_fastest
from molink.peer.state_dir import read_json, write_json
from molink.routing.cost import PROFILED_CONTEXT_TOKENS
from molink.shards.engine import Engine, Rows
from molink.shards.kv_cache import SequenceCache
from molink.shards.spec import ModelSpec, Span
from molink.shards.verification import StoredPart

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
PREFILL_TOKENS = (16, 32, 64, 128, 256, 512)
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
PIECE_TOKENS = (16, 32, 64, 128, 256, 512)
PIECE_STEPS = 3
"""At each number of tokens, of which the fastest counts."""
PIECE_BUDGET_S = 0.5
"""No number of tokens is begun after this long, with or without a context."""
PROFILE_BUDGET_S = 12.0
"""After this long nothing more is begun, and what is missing is extrapolated: slow machines too are ready soon."""
REMEMBERED = 32
"""Profiles kept in the cache, the newest."""

Progress = Callable[[str], None]


def cached_or_measured(
    folder: Path,
    spec: ModelSpec,
    device: str,
    cache: Path,
    progress: Progress | None = None,
    parts: Mapping[str, StoredPart] | None = None,
    ranks: Backend | None = None,
    rank_count: int = 1,
    threads: Sequence[int] = (),
) -> Profile:
    """The profile that the file `cache` remembers for this model, device and software, else a new one.

    With `ranks`, what `rank_count` such devices do that share every layer. Torch computes with the fastest of `threads`
    afterwards; empty: with as many as now. Where there was a choice of them and other programs kept the processors
    busy, nothing is remembered: the next start measures again, and serving corrects all but the choice.
    """
    counts = threads or (torch.get_num_threads(),)
    key = "/".join(
        (
            spec.model_hash,
            describe_device(device).name,
            f"threads {' '.join(map(str, counts))}",
            f"torch {torch.__version__}",
            f"molink {version('molink')}",
            *([f"ranks {rank_count}"] if ranks else []),
        )
    )
    known = read_json(cache)
    profile = from_json(known.pop(key, None))
    if profile is None:
        before = processor_times()
        profile = measure(folder, spec, device, progress, parts, ranks, counts)
        others_share = share_of_others(before, processor_times())
        if len(counts) == 1 or stays_the_best(others_share):
            newest = dict(list(known.items())[-(REMEMBERED - 1) :])
            write_json(cache, {**newest, key: to_json(profile)})
        elif progress is not None:
            progress(
                f"Other programs kept {others_share:.0%} of the processors busy: measured again at the next start"
            )
    torch.set_num_threads(profile.threads)
    return profile


def measure(
    folder: Path,
    spec: ModelSpec,
    device: str,
    progress: Progress | None = None,
    parts: Mapping[str, StoredPart] | None = None,
    ranks: Backend | None = None,
    threads: Sequence[int] = (),
) -> Profile:
    """Loads single layers of the model in `folder` onto `device`, or onto all of `ranks`, and times decode steps.

    `parts` are the tensors if they are not in the folder; what numbers they hold does not matter. `progress` is told,
    in sentences, what is measured. Of `threads` the fastest count is used from then on. Blocks; takes about a second
    for a small model.

    Raises:
        WeightsError: the layers cannot be loaded.
    """
    say = progress or (lambda _: None)
    backend = ranks or MeasuredDevice(folder, spec, device, parts)
    counts = threads or (torch.get_num_threads(),)
    device = "cpu" if ranks else device  # what goes in and comes out of ranks is there
    deadline_s = time.perf_counter() + PROFILE_BUDGET_S
    middle = Span(spec.layers // 2, spec.layers // 2 + 1)
    if spec.layers == 2:
        middle = Span(0, 1)  # neither layer is without an end, and embedding a token costs less than the head
    first, last = Span(0, 1), Span(spec.layers - 1, spec.layers)
    say(f"Measuring layer {middle.start} of {spec.name} on {device}")
    with _loaded(backend, spec, device, middle, deadline_s) as bench:
        count = bench.use_fastest_threads(counts)
        latencies = bench.layer_latencies()
        prefills = bench.prefill_latencies()
        contexts_ms = bench.context_costs_ms()
        pieces = bench.piece_latencies()
        plain_ms = bench.step_times_ms(1, want_logits=False)
        rates = [bench.load_bytes_per_s]
        deadline_s -= bench.opened_s  # the other layers take as long before anything is known of them
    layer_ms = latencies[0].layer_ms
    embed_ms = FLOOR_MS
    if first != middle and time.perf_counter() < deadline_s:
        say(f"Measuring the embedding of {spec.name} on {device}")
        with _loaded(backend, spec, device, first, deadline_s) as bench:
            embedding_ms = added_ms(bench.step_times_ms(1, want_logits=False), plain_ms)
            embed_ms = min(embedding_ms, layer_ms)  # one row of a table is less than a layer
            rates.append(bench.load_bytes_per_s)
    if time.perf_counter() < deadline_s:
        say(f"Measuring the head of {spec.name} on {device}")
        with _loaded(backend, spec, device, last, deadline_s) as bench:
            without_ms = bench.step_times_ms(1, want_logits=False)
            head_ms = added_ms(bench.step_times_ms(1, want_logits=True), without_ms)
            rates.append(bench.load_bytes_per_s)
    else:  # assumed: a decode step reads its weights once, whatever they are
        head_ms = max(FLOOR_MS, layer_ms * spec.head_bytes / spec.layer_bytes[middle.start])
    return Profile(latencies, embed_ms, head_ms, max(rates), prefills, *contexts_ms, pieces, count)


def decode_layer_ms(
    folder: Path, spec: ModelSpec, device: str, parts: Mapping[str, StoredPart] | None = None
) -> float:
    """What a decode step of one sequence takes through one layer, and nothing else; arguments as of `measure`.

    Raises:
        WeightsError: the layer cannot be loaded.
    """
    backend, middle = MeasuredDevice(folder, spec, device, parts), spec.layers // 2
    deadline_s = time.perf_counter() + PROFILE_BUDGET_S
    with _loaded(backend, spec, device, Span(middle, middle + 1), deadline_s) as bench:
        return max(FLOOR_MS, statistics.median(bench.step_times_ms(1, want_logits=False)))


@contextmanager
def _loaded(
    backend: Backend, spec: ModelSpec, device: str, span: Span, deadline_s: float
) -> "Iterator[_Bench]":
    """The span on the device; its memory is free again afterwards."""
    bench = _Bench(backend, spec, device, span, deadline_s)
    try:
        yield bench
    finally:
        bench.release()


class _Bench:
    """One loaded span, and sequences that step through it."""

    def __init__(self, backend: Backend, spec: ModelSpec, device: str, span: Span, deadline_s: float) -> None:
        """After `deadline_s` (`time.perf_counter`) as little is measured as can be."""
        started_s = time.perf_counter()
        self._deadline_s = deadline_s
        self._spec = spec
        self._device = device
        self._span = span
        self._engine = backend.engine
        backend.load(span, lambda _done, _total: None)()
        self._context = min(PROFILED_CONTEXT_TOKENS, max(1, spec.context_length // 2))
        self._capacity = min(spec.context_length, self._context + (len(BATCH_SIZES) + 2) * (STEPS + 1))
        self._steps = min(STEPS, max(1, (self._capacity - self._context) // (len(BATCH_SIZES) + 2) - 1))
        self._caches = [self._filled()]  # a first pass, which also reads what was only mapped
        elapsed_s = max(time.perf_counter() - started_s, 1e-6)
        self.load_bytes_per_s = max(1.0, spec.weight_bytes(span) / elapsed_s)
        self.opened_s = elapsed_s
        """How long it took until the first step was done."""

    def layer_latencies(self) -> tuple[LayerLatency, ...]:
        """Medians by batch size, until the time is up; none above that of a larger batch."""
        started_s = time.perf_counter()
        measured: list[LayerLatency] = []
        for batch_size in BATCH_SIZES:
            if measured and (self._late or time.perf_counter() - started_s > TOTAL_BUDGET_S):
                break
            times_ms = self.step_times_ms(batch_size, want_logits=False)
            measured.append(LayerLatency(batch_size, max(FLOOR_MS, statistics.median(times_ms))))
        return at_most_the_next(measured)

    def use_fastest_threads(self, counts: Sequence[int]) -> int:
        """For one row, as a decode step has, or else for part of a prompt."""
        return use_fastest(counts, lambda: self._prefill_ms(1), lambda: self._prefill_ms(self._context))

    def prefill_latencies(self) -> tuple[PrefillLatency, ...]:
        """By tokens, as far as context and budget go; none above that of more tokens."""
        measured: list[LayerLatency] = []
        started_s, next_s = time.perf_counter(), 0.0
        for tokens in PREFILL_TOKENS:
            spent_s = time.perf_counter() - started_s
            if self._late or tokens > self._spec.context_length or spent_s + next_s > PREFILL_BUDGET_S:
                break
            layer_ms = min([self._prefill_ms(tokens) for _ in range(PREFILL_STEPS)][1:])
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
        short_ms = min(self.step_times_ms(1, want_logits=False))
        prefill_ms = self._timed_ms(cache, CONTEXT_ROWS)
        alone_ms = min(self._prefill_ms(CONTEXT_ROWS) for _ in range(PREFILL_STEPS))
        return (
            max(0.0, decode_ms - short_ms) * 1000 / (context - PROFILED_CONTEXT_TOKENS),
            max(0.0, prefill_ms - alone_ms) * 1000 / (CONTEXT_ROWS * context),
        )

    def piece_latencies(self) -> tuple[PieceLatency, ...]:
        """By tokens, as far as context and budget go; none where the engine computes no steps in pieces, or where the
        context's part would take too long to find out."""
        engine = self._engine
        context = self._long_context(PIECE_TOKENS[0])
        if not isinstance(engine, Engine) or context is None:
            return ()
        measured: list[PieceLatency] = []
        most = min(PIECE_TOKENS[-1], self._spec.context_length - context)
        alone, behind = engine.new_cache(self._span, most), self._filled_to(context, most)
        deadline_s = time.perf_counter() + 2 * PIECE_BUDGET_S
        for tokens in PIECE_TOKENS:
            if self._late or tokens > most or time.perf_counter() > deadline_s:
                break
            alone_ms, behind_ms = (
                min(self._piece_ms(engine, cache, tokens) for _ in range(PIECE_STEPS))
                for cache in (alone, behind)
            )
            context_ms = max(0.0, behind_ms - alone_ms) * 1000 / context
            measured.append(PieceLatency(tokens, max(FLOOR_MS, alone_ms), context_ms))
        return plausible_pieces(measured)

    def _piece_ms(self, engine: Engine, cache: SequenceCache, tokens: int) -> float:
        """The time of a piece; the cache is afterwards as it was."""
        before = cache.length
        rows, hidden = self._rows([cache], tokens, want_logits=False)
        step = engine.begin(self._span, rows[0], hidden)
        started_s = time.perf_counter()
        engine.advance(step, tokens, 1)
        self._synchronize()
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
        cache = self._engine.new_cache(self._span, context + room)
        for _ in range(0, context, CONTEXT_ROWS):
            self._step([cache], CONTEXT_ROWS, want_logits=False)
        return cache

    @property
    def _late(self) -> bool:
        return time.perf_counter() > self._deadline_s

    def _prefill_ms(self, tokens: int) -> float:
        return self._timed_ms(self._engine.new_cache(self._span, tokens), tokens)

    def _timed_ms(self, cache: SequenceCache, tokens: int) -> float:
        started_s = time.perf_counter()
        self._step([cache], tokens, want_logits=False)
        return (time.perf_counter() - started_s) * 1000

    def step_times_ms(self, batch_size: int, *, want_logits: bool) -> list[float]:
        """The times of some decode steps of `batch_size` sequences, at least MIN_STEPS if the context has room."""
        while len(self._caches) < batch_size:
            self._caches.append(self._filled())
        caches = self._caches[:batch_size]
        if not self._late:
            self._step(caches, 1, want_logits)  # warms up what this batch size needs
        times_ms: list[float] = []
        while len(times_ms) < self._steps:
            started_s = time.perf_counter()
            self._step(caches, 1, want_logits)
            times_ms.append((time.perf_counter() - started_s) * 1000)
            if self._late or (len(times_ms) >= MIN_STEPS and sum(times_ms) > SIZE_BUDGET_S * 1000):
                break
        return times_ms

    def release(self) -> None:
        """Gives the memory back; nothing can be measured afterwards."""
        self._caches.clear()
        self._engine.detach(self._span)
        del self._engine
        gc.collect()
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()

    def _filled(self) -> SequenceCache:
        cache = self._engine.new_cache(self._span, self._capacity)
        self._step([cache], self._context, want_logits=False)
        return cache

    def _step(self, caches: Sequence[SequenceCache], count: int, want_logits: bool) -> None:
        rows, hidden = self._rows(caches, count, want_logits=want_logits)
        self._engine.step(self._span, rows, hidden)
        self._synchronize()

    def _rows(
        self, caches: Sequence[SequenceCache], count: int, *, want_logits: bool
    ) -> tuple[list[Rows], torch.Tensor | None]:
        """What a step of `count` tokens of each takes."""
        starts = self._span.start == 0
        tokens = tuple(position % self._spec.vocabulary_size for position in range(count)) if starts else None
        hidden = None
        if not starts:
            dtype = getattr(torch, self._spec.dtype)
            shape = len(caches) * count, self._spec.hidden_size
            hidden = torch.ones(shape, dtype=dtype, device=self._device)
        return [Rows(cache, count, tokens, want_logits) for cache in caches], hidden

    def _synchronize(self) -> None:
        if self._device.startswith("cuda"):
            torch.cuda.synchronize(self._device)
        elif self._device == "mps":
            torch.mps.synchronize()


def added_ms(with_ms: Sequence[float], without_ms: Sequence[float]) -> float:
    """What an end of the model adds to a step, from the times of steps with it and without it.

    The fastest of each are compared: an end takes microseconds, and of two medians taken one after the other
    the difference would be what the machine did besides. At least FLOOR_MS.
    """
    return max(FLOOR_MS, min(with_ms) - min(without_ms))
