"""Layers on their way from disk into the engine, and out of it again."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from molink.peer.compute.backend import Backend, CompilingEngine
from molink.peer.compute.library_compiler import library_compiled_beside
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.memory.leases import LeaseBook
from molink.peer.memory.memory import common_spans
from molink.peer.serving.timeouts import TIMEOUTS, ServingTimeouts
from molink.shards.errors import LoadAbandoned, WeightsError
from molink.shards.native.compiling import user_folder
from molink.shards.spec import ModelSpec, Span, missing_spans

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LayerLoad:
    """A span on its way into the engine; `done` ends when it is held, or as what went wrong. Who waits for it shields
    it: others may wait for the same."""

    span: Span
    done: asyncio.Task[None]
    loaded_bytes: int
    total_bytes: int
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class LeasedCompute:
    """What a peer has to serve with: a model's backend, the lease book that promises it, its thread."""

    spec: ModelSpec
    leases: LeaseBook
    backend: Backend
    engine_thread: EngineThread
    on_change: Callable[[], None]
    """Hears of what has come and gone."""
    timeouts: ServingTimeouts = TIMEOUTS


class LayerLoader:
    """Owner of the loads that the lease book has promised, one at a time, and of the room that weights leave the KV
    cache."""

    def __init__(self, compute: LeasedCompute) -> None:
        self._timeouts = compute.timeouts
        self._spec = compute.spec
        self._leases = compute.leases
        self._backend = compute.backend
        self._engine_thread = compute.engine_thread
        self._on_change = compute.on_change
        self._loads: dict[Span, LayerLoad] = {}
        self._order = asyncio.Lock()
        self._hastening: set[asyncio.Task[None]] = set()
        """What makes steps faster, behind each load."""

    @property
    def loads(self) -> bool:
        """Whether weights are being fetched or loaded, or wait for that: a thread may take memory that no cancelling
        gives back."""
        return bool(self._loads)

    @property
    def loaded_bytes(self) -> int:
        """Of all loads under way."""
        return sum(load.loaded_bytes for load in self._loads.values())

    @property
    def total_bytes(self) -> int:
        """Of all loads under way, when they have ended."""
        return sum(load.total_bytes for load in self._loads.values())

    def begin(self, span: Span) -> list[LayerLoad]:
        """The loads that `span` waits for: those under way, and new ones for what was only promised so far."""
        for promised in common_spans(self._leases.loading, span):
            for part in missing_spans(promised, tuple(self._loads)):
                task = asyncio.create_task(self._load(part), name=f"load {part}")
                task.add_done_callback(_retrieve)
                self._loads[part] = LayerLoad(part, task, 0, self._spec.weight_bytes(part))
        return [load for load in self._loads.values() if common_spans((load.span,), span)]

    async def load(self, span: Span) -> None:
        """Loads what the lease book has committed memory to in `span`. Who is cancelled meanwhile ends no load.

        Raises:
            WeightsError: the weights are missing, damaged or not this model's.
            LoadAbandoned: nobody wants them any more.
        """
        for load in self.begin(span):
            await asyncio.shield(load.done)

    async def fetch(self, span: Span) -> None:
        """Has the weights of `span` on this machine. It takes no memory, and holds up no load.

        Raises:
            WeightsError, OSError: they cannot be had.
        """
        await asyncio.to_thread(self._backend.fetch, span)

    async def drop(self, spans: tuple[Span, ...]) -> None:
        """Holds these layers no longer, if nobody needs one: their memory is free when it returns.

        Raises:
            ValueError: a lease needs one of them, or one is being loaded. Then all of them stay.
        """
        async with self._order:  # what is ordered meanwhile takes its memory only when it is free
            self._leases.drop(*spans)
            # in one turn with the book: the engine lets go of them before it makes a cache for any later grant
            await self._engine_thread.call_long(self._detach, spans)
            await self._record()
        self._on_change()

    def forget_promises(self) -> None:
        """Memory that was committed to layers whose load was never begun, and which nobody wants any more, is free."""
        wanted = tuple(lease.span for lease in self._leases.leases)
        for promised in self._leases.loading:
            for span in missing_spans(promised, (*self._loads, *wanted)):
                self._fail(span)

    def abandon(self) -> None:
        """Nobody wants what is being loaded: each load fails as soon as its thread can end."""
        for load in self._loads.values():
            load.is_abandoned = True

    async def close(self) -> None:
        """Ends every load in progress, and what follows on one. A thread that does not end within `load_ends_s` is
        left alone, with `loads` true for as long as it goes on."""
        self.abandon()
        tasks = [load.done for load in self._loads.values()]
        tasks += self._hastening
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=self._timeouts.load_ends_s)

    async def _load(self, span: Span) -> None:
        held = False
        try:
            async with self._order:
                self._require_wanted(span)
                await self._engine_thread.call_long(self._limit_kv)
                attach = await self._loaded_by_thread(span)
            await self._engine_thread.call_long(attach)
            await self._record()
            self._leases.loaded(span)
            held = True
        except LoadAbandoned:
            _log.info("%s is not loaded: nobody wants it any more", span)
            raise
        except (WeightsError, OSError, MemoryError, RuntimeError, ValueError) as error:
            _log.error("loading %s failed: %s", span, error)
            raise
        finally:  # whatever ended it: nothing stays promised that nobody loads
            del self._loads[span]
            if not held:
                self._fail(span)
            self._on_change()
        _log.info("holds %s", span)
        task = asyncio.create_task(self._hasten(), name=f"hasten {span}")
        self._hastening.add(task)
        task.add_done_callback(self._hastening.discard)
        task.add_done_callback(_retrieve)

    async def _loaded_by_thread(self, span: Span) -> Callable[[], None]:
        """As `Backend.load`. Ends with the thread and not before, also when it is cancelled: as long as the thread
        goes on it takes memory, and no other load may begin."""

        def progress(done: int, total: int) -> None:
            self._require_wanted(span)
            if (load := self._loads.get(span)) is not None:
                load.loaded_bytes, load.total_bytes = done, total

        work = asyncio.ensure_future(asyncio.to_thread(self._backend.load, span, progress))
        work.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait((work,))
            raise

    def _require_wanted(self, span: Span) -> None:
        """Raises LoadAbandoned if it is not."""
        load = self._loads.get(span)
        if load is None or load.is_abandoned:
            raise LoadAbandoned(f"nobody wants {span} any more")

    async def _record(self) -> None:
        """Decode steps on new layers are recorded before sessions make any; steps on others go in between."""
        while await self._engine_thread.call_long(self._backend.engine.record_next):
            continue

    async def _hasten(self) -> None:
        """Weights are packed while they serve as they lie, and what few rows are multiplied by is compiled while torch
        multiplies them: steps go in between."""
        engine, call = self._backend.engine, self._engine_thread.call_long
        while await call(engine.pack_next):
            continue
        if not isinstance(engine, CompilingEngine):
            return
        late = engine.late_library
        if await call(lambda: late.awaits_library):
            library = await library_compiled_beside(user_folder())
            if library is not None and await asyncio.to_thread(late.try_library):
                await call(late.bind_library, library)
                _log.info("decode steps go by the compiled library")

    def _fail(self, span: Span) -> None:
        self._leases.load_failed(span)
        self._engine_thread.begin(self._limit_kv, _log_error)

    def _detach(self, spans: tuple[Span, ...]) -> None:
        for span in spans:
            self._backend.engine.detach(span)
        self._limit_kv()

    def _limit_kv(self) -> None:
        """On the engine's thread: what weights take is not the KV cache's."""
        if not self._backend.engine.limit_kv(self._leases.kv_limit_bytes):
            _log.warning("sessions hold more KV cache than weights leave")


def _log_error(result: Exception | None) -> None:
    if isinstance(result, Exception):
        _log.error("the KV cache could not be resized", exc_info=result)


def _retrieve(ended: "asyncio.Future[Any]") -> None:
    """Marks an error as seen: nobody may be waiting for it any more."""
    if not ended.cancelled():
        ended.exception()
