"""Decode steps at a few batch sizes, recorded once and replayed: a step of a large model is over a thousand small
kernels, and to launch each from Python takes longer than the device needs for it."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from molink.shards.kv_cache import SequenceCache
from molink.shards.mixed import MixedBatch
from molink.shards.paged import PagedAttention
from molink.shards.paged_rows import NotPaged, PagedBatch, PagedRows
from molink.shards.stage import View
from molink.shards.transfers import Staging

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""A step of fewer sessions than one of these has rows of nobody."""


class Recorder(Protocol):
    """Makes a function that does again what `step` does, on the same memory."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """`step` is called at least once. Raises RuntimeError where it waits for the device, and what it raises."""
        ...


class CudaGraphs:
    """Records what a step launches on a CUDA device and replays it in one launch."""

    def __init__(self) -> None:
        self._memory: Any = None  # torch has no public name for the type

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Kernels are compiled and libraries opened by a first call, which is not recorded."""
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call] # torch's
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            result = step()
        self._memory = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """How a device decodes many sessions together."""

    attention: PagedAttention
    recorder: Recorder | None
    """None: steps are launched from Python each time."""


def decoding_on(device: str, *, records: bool = True) -> Decoding | None:
    """On CUDA devices, where torch brings Triton along; None elsewhere, and where `Engine` steps session by session.

    Without `records` steps may do on the way what cannot be recorded, such as talk to other processes.
    """
    if torch.device(device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from molink.shards.paged_triton import TritonAttention, shared_bytes_of

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    attention = TritonAttention(processors, shared_bytes_of(torch.device(device).index or 0))
    return Decoding(attention, CudaGraphs() if records else None)


class PagedSpan:
    """Steps of sessions on one span whose decode rows attend together."""

    def __init__(
        self,
        route: Sequence[View],
        rows: PagedRows,
        decoding: Decoding,
        hidden: Staging | None,
        *,
        ends: bool,
    ) -> None:
        """`hidden` [most rows, hidden size] are the inputs, where the span does not start the model; `ends`: whether it
        ends it."""
        self._route = tuple(route)
        self._rows = rows
        self._attention = decoding.attention
        self._recorder = decoding.recorder
        self._hidden = hidden
        self._ends = ends
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def replay(
        self, caches: Sequence[SequenceCache], token_ids: Sequence[int], hidden: Tensor | None
    ) -> Tensor | None:
        """One new token of each session: hidden states [sessions, hidden size], or float32 logits [sessions,
        vocabulary]. None where such a step cannot be recorded."""
        size = next((size for size in BATCH_SIZES if size >= len(caches)), None)
        if size is None or self._recorder is None:
            return None
        if self._hidden is not None and hidden is not None:
            self._send(self._hidden, hidden)
        replay = self._replays.get(size) or self._record(self._recorder, size)
        if replay is None:
            return None
        self._rows.fill(caches, token_ids)
        return replay()[: len(caches)].clone()

    def batch(
        self, caches: Sequence[SequenceCache], counts: Sequence[int], device: torch.device
    ) -> MixedBatch:
        """Of any step, for the model to run."""
        singles = [cache for cache, count in zip(caches, counts, strict=True) if count == 1]
        if not 0 < len(singles) <= BATCH_SIZES[-1]:
            return MixedBatch(caches, counts, None, device)
        self._rows.fill(singles)
        return MixedBatch(caches, counts, PagedBatch(self._attention, self._rows, len(singles)), device)

    def _send(self, staging: Staging, hidden: Tensor) -> None:
        if hidden.device == staging.on_device.device:
            staging.on_device[: len(hidden)].copy_(hidden)
            return
        staging.host()[: len(hidden)].copy_(hidden)
        staging.send(len(hidden))

    def _record(self, recorder: Recorder, size: int) -> Callable[[], Tensor] | None:
        """Rows of nobody do what all rows will do, and leave no trace."""
        batch = PagedBatch(self._attention, self._rows, size)
        inputs = self._rows.token_ids(size) if self._hidden is None else self._hidden.on_device[None, :size]
        positions = self._rows.positions(size)

        def step() -> Tensor:
            states = inputs
            for view in self._route:
                states = view.run(states, positions, batch)
            return self._route[-1].logits(states) if self._ends else states[0]

        self._rows.fill(())
        try:
            replay = recorder.record(step)
        except (NotPaged, RuntimeError):
            self._recorder = None
            return None
        self._replays[size] = replay
        return replay
