"""A backend that computes nothing and takes as long as a device would: for emulating machines that nobody has here."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from molink.dht.records.records import DeviceProperties
from molink.peer.compute.backend import Backend
from molink.peer.device.device import describe_device
from molink.peer.models.model import Progress
from molink.peer.profiling.profile import Profile
from molink.peer.serving.artifact_server import ArtifactServer
from molink.shards.batching.held_stages import NotHeld
from molink.shards.batching.partial_step import (
    PartialStep,
    Rows,
    SliceBatch,
    check_rows,
    next_rows,
    next_slice_batch,
)
from molink.shards.kv.cache_opening import open_cache
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.kv.kv_pool import KvPool
from molink.shards.spec import Span, merge_spans, missing_spans
from molink.simnet.core.generations import GenerationTape
from molink.simnet.devices.devices import USABLE_MEMORY, DeviceProfile, SequenceChunk
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.devices.timed_profile import timed_profile

TAPE_VOCABULARY = 1024
"""Of the model that said what is drawn here. By positions alone, so that a session begins in the tape where its prompt
ends, and all say the same."""
_NOISE_ROWS = 4096
"""At least the rows of one micro-batch."""


class TimedEngine:
    """Steps like `molink.shards.batching.engine.Engine`, but its results are noise, and its time is a profile's."""

    recorded_drawing: Final = None

    def __init__(self, shape: ModelShape, device: DeviceProfile) -> None:
        self.spec = shape.spec()
        self.held: tuple[Span, ...] = ()
        self._shape = shape
        self._device = device
        dtype = getattr(torch, shape.dtype)
        self._layout = LayerLayout(0, shape.head_dim, 0, shape.head_dim, dtype, expands=False)
        self._tape = GenerationTape(0)
        self._pool = KvPool(torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        # noise, not zeros: what compresses better than activations do would not load the links as they do
        self._noise = torch.randn(_NOISE_ROWS, shape.boundary_size, generator=generator).to(dtype)

    def attach(self, span: Span) -> None:
        """The layers can be stepped from now on."""
        self.held = merge_spans((*self.held, span))

    def detach(self, span: Span) -> None:
        """Raises NotHeld where some of them are not held."""
        self._require(span)
        self.held = tuple(left for held in self.held for left in missing_spans(held, (span,)))

    def limit_kv(self, limit_bytes: int) -> bool:  # noqa: ARG002 - as Engine's
        """Whatever the limit, caches that keep nothing fit."""
        return True

    def new_cache(
        self, span: Span, capacity_tokens: int, prefix: Sequence[bytes] = (), *, reserve: bool = True
    ) -> SequenceCache:
        """A cache that counts tokens and keeps none, but remembers which prefixes it would have. Raises NotHeld."""
        self._require(span)
        layouts = [self._layout] * len(span)
        return open_cache(self._pool, span, layouts, capacity_tokens, prefix, reserve=reserve)

    def begin_behind(self, cache: SequenceCache, tokens: int) -> None:
        """As `Engine.begin_behind`."""
        cache.truncate(tokens, same_tokens=True)

    def step(self, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> Tensor:
        """Waits as long as the device would compute. Returns noise [sum of counts, hidden_size], or, where the span
        ends the model, logits [sum of logit_rows, tokens of the tape]: at each position the tape's token is likeliest.

        Raises NotHeld and CacheFull, and ValueError where rows and hidden do not fit each other.
        """
        began_s = time.perf_counter()
        self._require(span)
        count = sum(row.count for row in rows)
        if hidden is not None and hidden.shape != (count, self.spec.hidden_size):
            raise ValueError(f"{count} rows came with hidden states {tuple(hidden.shape)}")
        for row in rows:
            row.cache.begin_step(row.guesses)
            row.cache.require(row.count)
        sampled = sum(row.logit_rows for row in rows)
        result = self._noise[:count]
        if span.stop == self.spec.layers:
            drawn = [(row.cache.length + row.count, row.logit_rows) for row in rows]
            result = self._logits([end + 1 + at - draws for end, draws in drawn for at in range(draws)])
        self._take_time(began_s, span, rows, sampled)
        for row in rows:
            row.cache.advance(row.count)
        return result

    def begin_partial(self, span: Span, row: Rows, hidden: Tensor | None) -> PartialStep:
        """As `Engine.begin_partial`: a step of one session that is computed in slices. Raises as `step`."""
        self._require(span)
        check_rows(span, (row,))
        if hidden is not None and hidden.shape != (row.count, self.spec.hidden_size):
            raise ValueError(f"{row.count} rows came with hidden states {tuple(hidden.shape)}")
        return PartialStep(span, row, self._noise[None, : row.count])

    def gather_slice(self, steps: Sequence[PartialStep], tokens: Sequence[int]) -> SliceBatch:
        """As `Engine.gather_slice`."""
        rows = next_rows(steps, tokens)
        for row in rows:
            row.cache.require(row.count)
        places = [at for row in rows for at in range(row.cache.length, row.cache.length + row.count)]
        return next_slice_batch(steps, tokens, torch.tensor([places]))

    def advance_slice(self, slice_: SliceBatch, layers: int) -> tuple[tuple[PartialStep, ...], Tensor | None]:
        """As `Engine.advance_slice`; waits as long as the device would for these tokens through these layers."""
        began_s = time.perf_counter()
        counts = zip(slice_.steps, slice_.tokens, strict=True)
        span, rows = slice_.steps[0].span, [replace(step.row, count=count) for step, count in counts]
        part = Span(slice_.layer, min(slice_.layer + layers, span.stop))
        done = slice_.finishing(slice_.hidden) if part.stop == span.stop else []
        sampled = sum(step.row.logit_rows for step, _ in done)
        ends = [step.row.cache.length + part.shape[1] for step, part in done if step.row.logit_rows]
        self._take_time(began_s, part, rows, sampled)
        slice_.layer = part.stop
        if part.stop < span.stop:
            return (), None
        for row in rows:
            row.cache.advance(row.count)
        slice_.complete(slice_.hidden, kept=False)
        through = tuple(step for step, _ in done)
        if not through:
            return (), None
        if span.stop == self.spec.layers:
            return through, self._logits(ends)
        return through, self._noise[: sum(step.row.count for step in through)]

    def let_finish_slices(self, finish: Callable[[], bool]) -> None:
        """Nobody needs to: sessions have reserved what they take."""

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What `step` gives is there already."""
        return list(tensors)

    def record_next(self) -> bool:
        """There is nothing to record."""
        return False

    def pack_next(self) -> bool:
        """There is nothing to pack."""
        return False

    def _logits(self, positions: Sequence[int]) -> Tensor:
        """Those after which tokens of these positions are drawn: the tape's are likeliest."""
        logits = torch.zeros(len(positions), TAPE_VOCABULARY)
        for row, position in enumerate(positions):
            logits[row, self._tape.token(position)] = 1.0
        return logits

    def _take_time(self, began_s: float, span: Span, rows: Sequence[Rows], sampled: int) -> None:
        """Waits until the device would be done with these rows through the span."""
        chunks = [SequenceChunk(row.count, row.cache.length) for row in rows]
        compute_s = self._device.compute_s(self._shape, span, chunks, sampled)
        time.sleep(max(0.0, began_s + compute_s - time.perf_counter()))

    def _require(self, span: Span) -> None:
        if missing_spans(span, self.held):
            raise NotHeld(span, self.held)


class TimedBackend:
    """A TimedEngine, whose layers are there as soon as they are asked for."""

    def __init__(self, shape: ModelShape, device: DeviceProfile) -> None:
        self.engine = TimedEngine(shape, device)

    def fetch(self, span: Span) -> None:
        """Nothing is missing: it computes with no weights."""

    def load(self, span: Span, progress: Progress) -> Callable[[], None]:
        total = self.engine.spec.weight_bytes(span)
        progress(total, total)
        return lambda: self.engine.attach(span)


@dataclass(frozen=True, slots=True, eq=False)
class Machine:
    """What a peer needs of the machine that it runs on."""

    backend: Backend
    artifacts: ArtifactServer
    device: DeviceProperties
    profile: Profile
    memory_bytes: int


def timed_machine(shape: ModelShape, device: DeviceProfile) -> Machine:
    """A machine with that device, whose time is the profile's."""
    spec = shape.spec()
    return Machine(
        backend=TimedBackend(shape, device),
        artifacts=ArtifactServer(spec.model_hash, b"", Path(), {}),
        device=replace(
            describe_device("cpu"), kind="cuda", name=device.name, memory_bytes=device.memory_bytes
        ),
        profile=timed_profile(shape, device),
        memory_bytes=int(USABLE_MEMORY * device.memory_bytes),
    )
