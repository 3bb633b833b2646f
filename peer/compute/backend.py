"""What a peer computes with, and how weights get there: the seam between serving and the device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from molink.peer.models.model import LocalModel, Progress
from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.held_stages import LateLibrary
from molink.shards.batching.partial_step import PartialStep, SliceBatch
from molink.shards.batching.ways import DecodingWay, decoding_in
from molink.shards.checkpoint.verification import StoredPart
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.native.native_way import TrustedWays, WaysTrial
from molink.shards.sampling.recorded_drawing import RecordedDrawing
from molink.shards.sampling.sampling import Outcome
from molink.shards.spec import ModelSpec, Span

StepResult = Tensor | list[Outcome]
"""Hidden states; where the span ends the model, logits, or what came of drawing from them where they lie."""


class StageEngine(Protocol):
    """Steps sessions through the layers that it holds, as `molink.shards.batching.engine.Engine` does. Used from one
    thread."""

    spec: ModelSpec

    @property
    def recorded_drawing(self) -> RecordedDrawing | None:
        """How it draws tokens in one launch, if it can."""
        ...

    def detach(self, span: Span) -> None: ...

    def limit_kv(self, limit_bytes: int) -> bool: ...

    def new_cache(
        self, span: Span, capacity_tokens: int, prefix: Sequence[bytes] = (), *, reserve: bool = True
    ) -> SequenceCache: ...

    def begin_behind(self, cache: SequenceCache, tokens: int) -> None: ...

    def step(self, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> StepResult: ...

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]: ...

    def record_next(self) -> bool: ...

    def pack_next(self) -> bool: ...


@runtime_checkable
class SlicingEngine(StageEngine, Protocol):
    """An engine that also computes steps in slices, as `molink.shards.batching.engine.Engine` does."""

    def begin_partial(self, span: Span, row: Rows, hidden: Tensor | None) -> PartialStep: ...

    def gather_slice(self, steps: Sequence[PartialStep], tokens: Sequence[int]) -> SliceBatch: ...

    def advance_slice(
        self, slice_: SliceBatch, layers: int
    ) -> tuple[tuple[PartialStep, ...], Tensor | None]: ...

    def let_finish_slices(self, finish: Callable[[], bool]) -> None: ...


@runtime_checkable
class CompilingEngine(StageEngine, Protocol):
    """An engine whose decode steps may go by a compiled library, as those of `molink.shards.batching.engine.Engine`."""

    late_library: LateLibrary


class Backend(Protocol):
    """An engine, and the loader that fills it."""

    @property
    def engine(self) -> StageEngine: ...

    def fetch(self, span: Span) -> None:
        """Has the weights of `span` on this machine, so that `load` needs nobody else. It blocks.

        Raises:
            WeightsError, OSError: they cannot be had.
        """
        ...

    def load(self, span: Span, progress: Progress) -> Callable[[], None]:
        """Makes the weights of `span` ready. It blocks: call it on a thread that may wait.

        Returns what has the engine hold them, to be called on the engine's thread.

        Raises:
            WeightsError, OSError, MemoryError, RuntimeError, ValueError: it cannot.
        """
        ...


def scores_prompts(engine: StageEngine) -> bool:
    """Whether it gives `Rows.scores` the log-probabilities of prompts: those that have a device of their own do."""
    return isinstance(engine, Engine)


class DeviceBackend:
    """Computes a model that this machine can load."""

    def __init__(self, model: LocalModel, device: str, way: DecodingWay = DecodingWay.RECORDED) -> None:
        """`device` is as `choose_device` returned it, `way` as its first step has shown."""
        self.engine = Engine(model.spec, device, decoding=decoding_in(way, device))
        self._model = model
        self._device = device

    def fetch(self, span: Span) -> None:
        self._model.fetch(span)

    def load(self, span: Span, progress: Progress) -> Callable[[], None]:
        stage = self._model.load(span, self._device, progress, packs_later=True)
        return lambda: self.engine.attach(stage)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredModel:
    """What is measured and not served: layers of a folder, which needs no manifest, on a device."""

    folder: Path
    spec: ModelSpec
    device: str
    parts: Mapping[str, StoredPart] | None = None
    """The tensors if they are not in the folder; what numbers they hold does not matter."""
    way: DecodingWay = DecodingWay.RECORDED
    ways: WaysTrial = field(default_factory=TrustedWays)
    """As in `LocalModel`."""


class MeasuredDevice:
    """Computes layers of what is measured."""

    def __init__(self, model: MeasuredModel) -> None:
        self.engine = Engine(model.spec, model.device, decoding=decoding_in(model.way, model.device))
        self._model = model

    def fetch(self, span: Span) -> None:
        """Nothing is missing: what is measured needs no weights of its own."""

    def load(self, span: Span, progress: Progress) -> Callable[[], None]:
        model = self._model
        stage = load_stage(
            model.folder,
            span,
            StageSettings(model.spec.dtype, model.spec.quantization, device=model.device, ways=model.ways),
            progress=progress,
            parts=model.parts,
        )
        return lambda: self.engine.attach(stage)
