"""Decode steps at a few batch sizes, recorded once and replayed: a step of a large model is over a thousand small
kernels, and to launch each from Python takes longer than the device needs for it."""

import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.shards.batching.mixed import MixedBatch, Upload
from molink.shards.batching.partial_step import Rows
from molink.shards.device.cuda_graphs import CudaGraphs, Recorder
from molink.shards.device.device import Device
from molink.shards.device.transfers import Staging
from molink.shards.device.waiting import WaitsForDevice, refusing_waits
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.model.stage import View
from molink.shards.paged_attention.paged import (
    NotPaged,
    PagedAttention,
    PagedLatentAttention,
    keeps_latents,
    pages,
)
from molink.shards.paged_attention.paged_rows import PagedBatch, PagedRows

BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""A step of fewer sessions than one of these has rows of nobody."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Decoding:
    """How a device decodes many sessions together."""

    attention: PagedAttention
    recorder: Recorder | None
    """None: steps are launched from Python each time."""
    sizes: tuple[int, ...] = BATCH_SIZES
    """Of the steps that are recorded, ascending; the largest is the most rows that attend together."""
    fuses: bool = False
    """Whether layers go by fused kernels where they have some (`kernels/fused.py`)."""
    latents: PagedLatentAttention | None = None
    """None: where layers expand latents, sessions attend one after the other."""

    def pages(self, layouts: Sequence[LayerLayout]) -> bool:
        """Whether rows on such layers attend together."""
        return pages(layouts) or (self.latents is not None and keeps_latents(layouts))


def decoding_on(device: str, *, records: bool = True, fuses: bool = False) -> Decoding | None:
    """On CUDA devices, where torch brings Triton along; None elsewhere, and where `Engine` steps session by session."""
    if torch.device(device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from molink.shards.kernels.triton_latents import TritonLatents
    from molink.shards.paged_attention.paged_triton import TritonAttention, shared_bytes_of

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    limit_bytes = shared_bytes_of(torch.device(device).index or 0)
    return Decoding(
        TritonAttention(processors, limit_bytes),
        CudaGraphs(Device(device)) if records else None,
        fuses=fuses,
        latents=TritonLatents(processors, limit_bytes),
    )


class PagedSpan:
    """Steps of sessions on one span whose decode rows attend together: with guesses several of one session."""

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
        self._decoding = decoding
        self._recorder = decoding.recorder
        self._sizes = decoding.sizes
        self._hidden = hidden
        self._ends = ends
        self._replays: dict[int, Callable[[], Tensor]] = {}

    def prove(self) -> None:
        """Makes the smallest step, of rows of nobody, which compiles what it needs and shows whether its like can be
        recorded. Raises what it raises, if rows cannot attend together here."""
        step = self._step_of(self._sizes[0])
        try:
            refusing_waits(step)
        except NotPaged as reason:
            self._recorder = None
            _log.debug("decode steps are not recorded: %s", reason)
        except WaitsForDevice as reason:
            step()
            if self._recorder is not None:
                self.give_up(reason)

    @property
    def next_size(self) -> int | None:
        """The smallest step that is not recorded; None: there is none, or it cannot be."""
        if self._recorder is None:
            return None
        return next((size for size in self._sizes if size not in self._replays), None)

    @property
    def is_recorded(self) -> bool:
        """Whether steps of few rows are. Those that end the model make logits, wanted or not."""
        return bool(self._replays)

    @torch.inference_mode()
    def record_next(self) -> bool:
        """Records the smallest step that is not recorded; whether there was one. Not while a step is under way."""
        size = self.next_size
        if size is None or self._recorder is None:
            return False
        try:
            replay = self._recorder.record(self._step_of(size))
            replay()
            self._rows.wait()
        except Exception as error:  # noqa: BLE001 - drivers and compilers raise what they like: the next way needs neither
            self.give_up(error)
        else:
            self._replays[size] = replay
        return True

    def replay(
        self,
        caches: Sequence[SequenceCache],
        counts: Sequence[int],
        token_ids: Sequence[int],
        hidden: Tensor | None,
    ) -> Tensor | None:
        """So many new tokens of each session: hidden states [tokens, hidden size], or float32 logits [tokens,
        vocabulary]. None where no such step has been recorded."""
        rows = sum(counts)
        size = next((size for size in self._sizes if size >= rows), None)
        replay = None if size is None else self._replays.get(size)
        if replay is None:
            return None
        if self._hidden is not None and hidden is not None:
            self._send(self._hidden, hidden)
        self._rows.fill(caches, counts, token_ids)
        try:
            return replay()[:rows].clone()
        except Exception as error:  # noqa: BLE001 - as above; what it has stored already, the next way stores again
            self._replays.clear()
            self.give_up(error)
            return None

    def batch(self, rows: Sequence[Rows], upload: Upload) -> MixedBatch:
        """Of any step, for the model to run."""
        together = [row for row in rows if row.decodes]
        counts = [row.count for row in together]
        if not 0 < sum(counts) <= self._sizes[-1]:
            return MixedBatch(rows, None, upload, fuses=self._decoding.fuses)
        self._rows.fill([row.cache for row in together], counts)
        return MixedBatch(rows, self._batch(sum(counts)), upload, fuses=self._decoding.fuses)

    def _batch(self, rows: int) -> PagedBatch:
        decoding = self._decoding
        return PagedBatch(
            decoding.attention, self._rows, rows, latents=decoding.latents, fuses=decoding.fuses
        )

    def _send(self, staging: Staging, hidden: Tensor) -> None:
        if hidden.device == staging.on_device.device:
            staging.on_device[: len(hidden)].copy_(hidden)
            return
        staging.host()[: len(hidden)].copy_(hidden)
        staging.send(len(hidden))

    def _step_of(self, size: int) -> Callable[[], Tensor]:
        """Rows of nobody do what all rows will do, and leave no trace."""
        batch = self._batch(size)
        inputs = self._rows.token_ids(size) if self._hidden is None else self._hidden.on_device[None, :size]
        positions = self._rows.positions(size)

        def step() -> Tensor:
            states = inputs
            for view in self._route:
                states = view.run(states, positions, batch)
            return self._route[-1].logits(states) if self._ends else states[0]

        self._rows.fill((), ())
        return step

    def give_up(self, reason: Exception) -> None:
        """No further steps are recorded; what has been recorded stays."""
        self._recorder = None
        span = f"layers {self._route[0].span.start} to {self._route[-1].span.stop}"
        kind = "" if isinstance(reason, WaitsForDevice) else f"{type(reason).__name__}: "
        _log.warning(
            "decode steps on %s are launched one operation at a time: recording ended with %s%s",
            span,
            kind,
            " ".join(str(reason).split())[:300],
        )
