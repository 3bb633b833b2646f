"""Steps of ragged batches over whatever layers are held. Owns the device, and is used from one thread."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from weakref import WeakSet

import torch
from torch import Tensor

from molink.shards.batching.accepted_rows import AcceptedRows
from molink.shards.batching.decode import Decoding, PagedSpan
from molink.shards.batching.growing_caches import GrowingCaches
from molink.shards.batching.held_stages import HeldStages, LateLibrary
from molink.shards.batching.mixed import MixedBatch
from molink.shards.batching.packed import PackedBatch
from molink.shards.batching.paged_spans import PagedSpans
from molink.shards.batching.partial_step import (
    PartialStep,
    Rows,
    SliceBatch,
    check_blocks,
    check_inputs,
    check_rows,
    next_rows,
    next_slice_batch,
)
from molink.shards.batching.step_tensors import StepTensors
from molink.shards.device.device import Device
from molink.shards.device.garbage import collect_garbage
from molink.shards.device.transfers import Staging
from molink.shards.kernels.drawing_kernels import drawing_kernels_on
from molink.shards.kv.cache_opening import open_cache
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_pool import KvPool
from molink.shards.model.stage import Stage, View
from molink.shards.paged_attention.paged_rows import PagedRows
from molink.shards.sampling.recorded_drawing import RecordedDrawing
from molink.shards.spec import ModelSpec, Span

__all__ = ["Engine", "Rows"]


class Engine:
    """Holds stages of one model on one device and steps sessions through spans of them."""

    def __init__(
        self,
        spec: ModelSpec,
        device: str,
        kv_limit_bytes: int | None = None,
        *,
        decoding: Decoding | None = None,
    ) -> None:
        """The KV cache takes at most `kv_limit_bytes`, or what it needs where that is None. Without `decoding` the
        sessions of a step attend one after the other."""
        self.spec = spec
        self._device = Device(device)
        self._decoding = decoding
        self.pool = KvPool(self._device.place, kv_limit_bytes)
        self._tensors = StepTensors(self._device, spec.vocabulary_size)
        self._stages = HeldStages(spec)
        self.late_library: LateLibrary = self._stages
        """The compiled library (decision 0028), where it comes when steps are made without it already."""
        self._unfinished: WeakSet[PartialStep] = WeakSet()
        self._growing = GrowingCaches(self.pool, kv_limit_bytes, self._unfinished)
        self._accepted = AcceptedRows()
        self.recorded_drawing = _recorded_drawing(spec, self._device, decoding)
        """How tokens are drawn behind the last layer in one launch; None: operation by operation."""
        self.paged = PagedSpans(self._open_paged, spec.layers, self.recorded_drawing)
        """Which way decode steps go on each span."""

    @property
    def held(self) -> tuple[Span, ...]:
        """The layers that can run now, in as few spans as possible."""
        return self._stages.spans

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights held, what stages share counted once."""
        return self._stages.weight_bytes

    def attach(self, stage: Stage) -> None:
        """Adds a loaded stage to what is held. Raises ValueError where it is of another model or overlaps.

        Decode steps through it are recorded by `record_next`, or when the first session opens.
        """
        self._device.enter()
        self._stages.add(stage)
        self.paged.added(stage.span)

    def detach(self, span: Span) -> None:
        """Frees the layers of `span`; parts of stages outside it stay. Raises NotHeld where some are not held."""
        self._stages.require(span)
        self._device.enter()
        self.paged.changed(self._stages.drop(span), self.held)
        self.pool.forget(span)
        collect_garbage()

    def record_next(self) -> bool:
        """Records decode steps of one more size on layers that were attached since, and drawings behind the last layer;
        whether there was one to record. Sessions may step in between, unrecorded where they would be of that size."""
        self._device.enter()
        return self.paged.record_next(self.held)

    def to_record(self, span: Span | None = None) -> PagedSpan | None:
        """Of what steps are to be recorded next: of `span`, or of layers that were attached since. None: of nothing."""
        self._device.enter()
        return self.paged.to_record(self.held, span)

    def pack_next(self) -> bool:
        """Packs one more matrix of the stages that are held, where that was left for later; whether there was one.
        Sessions may step in between."""
        return self._stages.pack_next()

    def new_cache(
        self, span: Span, capacity_tokens: int, prefix: Sequence[bytes] = (), *, reserve: bool = True
    ) -> SequenceCache:
        """Memory for one session of at most `capacity_tokens` tokens on `span`, reserved now.

        `prefix` are hashes of the session's tokens up to the end of each full block (see `prefix.py`). What the pool
        has of them is in the cache already: its `length` says how many tokens, always fewer than the capacity; the
        others are shared when they are full. Without `reserve` the cache takes blocks as it grows, and a step may
        move those of sessions that it does not step to the host's memory.

        Raises NotHeld, PoolFull, and ValueError where the model cannot have so long a sequence.
        """
        self._stages.route(span)
        limit = self._stages.context_length
        if capacity_tokens > limit:
            raise ValueError(f"a sequence of this model has at most {limit} tokens, not {capacity_tokens}")
        self._device.enter()
        self.paged.record(span)
        cache = open_cache(
            self.pool, span, self._stages.layouts(span), capacity_tokens, prefix, reserve=reserve
        )
        if not reserve:
            self._growing.add(cache)
        return cache

    def limit_kv(self, limit_bytes: int) -> bool:
        """The KV cache may take so much from now on; whether what sessions have reserved fits. Prefixes that no
        session uses go first, and then what may be moved to the host's memory. Where what is between layers does not
        fit, the limit is kept as soon as that is through."""
        self._device.enter()
        return self._growing.limit(limit_bytes)

    def let_finish_slices(self, finish: Callable[[], bool]) -> None:
        """`finish` takes the tokens that are between layers through all of them, and says whether there were some. It
        is called, on this thread, where nobody else can make room."""
        self._growing.finish_slices = finish

    def begin_behind(self, cache: SequenceCache, tokens: int) -> None:
        """What the cache holds beyond so many tokens will be computed again. Where layers keep states, which do not go
        back, what was accepted of the latest step is computed again now. Raises as `SequenceCache.truncate` and
        `step`."""
        self._device.enter()
        again = self._accepted.until(cache, tokens)
        self._growing.truncate(cache, tokens if again is None else cache.began)
        if again is not None:
            row, hidden = again
            self.step(cache.span, (row,), hidden)

    @torch.inference_mode()
    def step(self, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> Tensor:
        """Runs the new tokens of all `rows` through `span` in one pass.

        `hidden` is [sum of counts, hidden_size] in the order of rows where the span starts after layer 0,
        else None. Returns [sum of counts, hidden_size], or, where the span ends the model, float32 logits
        [sum of logit_rows, vocabulary]. Caches grow only when the whole step has succeeded. Raises
        NotHeld, CacheFull, PoolFull, and ValueError where rows and hidden do not fit each other, all before anything
        is computed.
        """
        route, tensors = self._stages.route(span), self._tensors
        check_rows(span, rows)
        ids = check_inputs(self.spec, span, rows, hidden)
        self._device.enter()
        guessed = False
        for row in rows:
            row.cache.begin_step(guesses := row.guesses)
            guessed = guessed or guesses > 0
        self._growing.make_room(rows)
        replayed = self._replay(span, rows, ids, hidden)
        if replayed is not None:
            for row in rows:
                row.cache.advance(row.count)
            return replayed
        tokens = tensors.inputs(ids, hidden, self._stages.facts.dtype), tensors.positions(rows)
        bitwise = not self._unfinished and route[0].exact
        given = hidden
        hidden, batch = self._attended(span, span, tokens, rows, bitwise=bitwise)
        if span.stop == self.spec.layers:
            _score(route[-1], rows, hidden)
        result = tensors.logits(route[-1], rows, hidden) if span.stop == self.spec.layers else hidden[0]
        batch.commit()
        if guessed:
            self._accepted.keep(rows, given)
        return result

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What steps gave, on the host and complete: the one wait of a step. Without tensors the wait alone, after
        which the time that the step took is over."""
        self._device.enter()
        return self._tensors.transfers.to_host(tensors)

    def _attended(
        self, span: Span, part: Span, tokens: tuple[Tensor, Tensor], rows: Sequence[Rows], *, bitwise: bool
    ) -> tuple[Tensor, PackedBatch | MixedBatch]:
        """What comes of `tokens`, which are inputs and positions, behind a part of the rows' span, and the batch that
        is still to be committed. Rows attend together where kernels for that are at hand, and do not fail."""
        route, paged, failure = self._stages.route(part), self.paged.get(span), None
        if paged is not None:
            try:
                together = paged.batch(rows, self._tensors.transfers.numbers)
                return _through(route, tokens, together), together
            except Exception as error:  # noqa: BLE001 - compilers of kernels raise what they like: the next way needs none
                failure = error
        batch = PackedBatch([row.cache for row in rows], [row.count for row in rows], bitwise=bitwise)
        hidden = _through(route, tokens, batch)
        if failure is not None:
            self.paged.attend_apart(span, failure)
        return hidden, batch

    def _replay(
        self, span: Span, rows: Sequence[Rows], ids: Sequence[int], hidden: Tensor | None
    ) -> Tensor | None:
        """The result of a step of sessions that all decode, as it has been recorded, if it can be."""
        paged = self.paged.get(span)
        if paged is None or not all(row.decodes for row in rows):
            return None
        result = paged.replay([row.cache for row in rows], [row.count for row in rows], ids, hidden)
        if result is None or span.stop < self.spec.layers:
            return result
        return self._tensors.wanted(result, rows)

    def _open_paged(self, span: Span) -> PagedSpan | None:
        """Where the sessions of a step on the span can attend together, what does so."""
        stages, decoding = self._stages, self._decoding
        route, layouts = stages.route(span), stages.layouts(span)
        if decoding is None or not decoding.pages(layouts) or not all(view.packs for view in route):
            return None
        most, facts = decoding.sizes[-1], stages.facts
        rows = PagedRows(self.pool, span, layouts, most, self.spec.context_length, self._device)
        hidden = Staging((most, facts.hidden_size), facts.dtype, self._device) if span.start else None
        return PagedSpan(route, rows, decoding, hidden, ends=span.stop == self.spec.layers)

    @torch.inference_mode()
    def begin_partial(self, span: Span, row: Rows, hidden: Tensor | None) -> PartialStep:
        """A step of one session that is computed in pieces, between other sessions' steps. As `step`.

        Until it is done, or nothing refers to it any more, the session must not be in another step.
        """
        self._stages.route(span)
        check_rows(span, (row,))
        ids = check_inputs(self.spec, span, (row,), hidden)
        self._device.enter()
        row.cache.begin_step()
        unfinished = PartialStep(span, row, self._tensors.inputs(ids, hidden, self._stages.facts.dtype))
        self._unfinished.add(unfinished)
        return unfinished

    @torch.inference_mode()
    def gather_slice(self, steps: Sequence[PartialStep], tokens: Sequence[int]) -> SliceBatch:
        """The next so many tokens of each of the steps, of one span, for `advance_slice` to compute together. None of
        them is in another slice. Raises as `step`, and ValueError where a step has not so many left."""
        rows = next_rows(steps, tokens)
        self._device.enter()
        self._growing.make_room(rows)
        return next_slice_batch(steps, tokens, self._tensors.positions(rows))

    @torch.inference_mode()
    def advance_slice(self, slice_: SliceBatch, layers: int) -> tuple[tuple[PartialStep, ...], Tensor | None]:
        """Takes the piece through its next `layers` layers, as far as there are so many. Returns the steps of which
        all tokens are through now, and what `step` would have returned for these.

        Where layers keep states, tokens go through all layers at once. Caches grow by tokens that are through all.
        Raises as `step`, and ValueError for a piece that is through, or of which a session is without its blocks; it is
        then where it was.
        """
        counts = zip(slice_.steps, slice_.tokens, strict=True)
        span, rows = slice_.steps[0].span, [replace(step.row, count=count) for step, count in counts]
        check_rows(span, rows)
        check_blocks(rows)
        if layers < 1 or slice_.layer >= span.stop:
            raise ValueError(f"a piece before layer {slice_.layer} of {span} cannot take {layers} layers")
        self._device.enter()
        self.pool.collect({table for row in rows for table in row.cache.tables})
        states = any(layout.states for layout in rows[0].cache.layouts)
        stop = span.stop if states else min(slice_.layer + layers, span.stop)
        part, tokens = Span(slice_.layer, stop), (slice_.hidden, slice_.positions)
        hidden, batch = self._attended(span, part, tokens, rows, bitwise=False)
        if stop < span.stop:
            slice_.hidden, slice_.layer = hidden, stop
            return (), None
        done, ends = slice_.finishing(hidden), span.stop == self.spec.layers
        if ends:
            _score(self._stages.route(span)[-1], rows, hidden)
        result = None
        if done and ends:
            rows = [replace(step.row, count=1) for step, _ in done]
            last = torch.cat([part[:, -1:] for _, part in done], 1)
            result = self._tensors.logits(self._stages.route(span)[-1], rows, last)
        elif done:
            result = torch.cat([one for step, part in done for one in (*step.results, part)], 1)[0]
        batch.commit()
        slice_.complete(hidden, kept=not ends)
        through = tuple(step for step, _ in done)
        self._unfinished -= set(through)
        self._growing.settle()
        return through, result


def _recorded_drawing(spec: ModelSpec, device: Device, decoding: Decoding | None) -> RecordedDrawing | None:
    if decoding is None or decoding.recorder is None:
        return None
    kernels = drawing_kernels_on(device.place)
    return RecordedDrawing(spec.vocabulary_size, decoding.sizes, device, decoding.recorder, kernels)


def _score(tail: View, rows: Sequence[Rows], hidden: Tensor) -> None:
    """Gives those that score their prompts the log-probabilities of what comes behind their rows, before these count.
    `hidden` is [1, sum of counts, hidden]."""
    first = 0
    for row in rows:
        if row.scores is not None:
            row.scores.score(row.cache.length, hidden[:, first : first + row.count], tail.logits)
        first += row.count


def _through(route: Sequence[View], tokens: tuple[Tensor, Tensor], batch: PackedBatch | MixedBatch) -> Tensor:
    inputs, positions = tokens
    for view in route:
        inputs = view.run(inputs, positions, batch)
    return inputs
