"""A backend whose engine is several processes, one for each device, that share every layer (tensor parallelism)."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NoReturn, Self

import torch
from torch import Tensor

from molink.peer.compute.backend import StepResult
from molink.peer.models.model import LocalModel, Progress
from molink.peer.ranks.drawn import described_request, outcome_of
from molink.peer.ranks.messages import MAX_PAYLOAD_BYTES
from molink.peer.ranks.parts import described, joined, raw_of
from molink.peer.ranks.processes import LOAD_SILENCE_S, RankProcesses, RankRefused, RanksLost
from molink.shards.batching.engine import Rows
from molink.shards.batching.ways import DecodingWay
from molink.shards.codec import dtype_of
from molink.shards.errors import LoadAbandoned, WeightsError
from molink.shards.kv.kv_cache import CacheFull, SequenceCache
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.spec import ModelSpec, SamplingParams, Span
from molink.shards.store.blob_part import BlobPart, StandIn

Ask = Callable[..., list[Any]]
_GREEDY = SampleRequest(SamplingParams(), 0, 0)


class RankedCache(SequenceCache):
    """One session's KV state on all ranks, each of which keeps its heads. Here is only how long it is."""

    __slots__ = ("_ask", "_nbytes", "_token_bytes", "number")

    def __init__(
        self, number: int, span: Span, capacity_tokens: int, nbytes: int, token_bytes: int, ask: Ask
    ) -> None:
        """`ask` gives all ranks an order; `token_bytes` is what they keep of a token together."""
        self._ask = ask
        self._token_bytes = token_bytes
        self.number = number
        self.span = span
        self.layouts = ()
        self.capacity_tokens = capacity_tokens
        self.length = self.certain_tokens = self._guesses = 0
        self.reserved = True
        self.closed = False
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def holds_blocks(self) -> bool:
        return not self.closed

    def require(self, tokens: int) -> None:
        if self.length + tokens > self.capacity_tokens:
            raise CacheFull(self.length + tokens, self.capacity_tokens)

    def advance(self, tokens: int) -> None:
        self.length += tokens
        self.certain_tokens = self.length - self._guesses

    def truncate(self, length: int, *, same_tokens: bool = False) -> None:  # noqa: ARG002 - nothing has a name here
        """The ranks hear of it with the next step."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.certain_tokens = min(self.certain_tokens, length)
        self.length = length

    @property
    def least_length(self) -> int:
        """As far back as each rank can go."""
        if not self.length:
            return 0
        return max(int(header["least"]) for header, _ in self._ask("least", self._known))

    def close(self, names: Sequence[bytes] = (), valid_tokens: int = 0) -> None:  # noqa: ARG002 - as above
        """The ranks drop their parts once nothing refers to it."""
        self.closed = True

    def export(self, start: int, stop: int) -> bytearray:
        """As of one device: ranks keep equally many heads, in their order."""
        if (stop - start) * self._token_bytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"[{start}, {stop}) are too many tokens to export at once")
        answers = self._ask("export", {**self._known, "start": start, "stop": stop})
        return joined([part for _, part in answers], answers[0][0]["sizes"])

    def restore(self, start: int, tokens: int, exported: bytes | bytearray | memoryview) -> None:
        if start + tokens > self.capacity_tokens:
            raise CacheFull(start + tokens, self.capacity_tokens)
        if memoryview(exported).nbytes > MAX_PAYLOAD_BYTES:
            raise ValueError(f"{tokens} tokens are too many to restore at once")
        payload = memoryview(exported).cast("B")
        self._ask("restore", {**self._known, "start": start, "tokens": tokens}, payload)
        self.length = self.certain_tokens = start + tokens

    @property
    def _known(self) -> dict[str, object]:
        return {"cache": self.number, "length": self.length}


class RankedEngine:
    """Has all ranks make each step. Used from one thread, as any engine."""

    recorded_drawing: Final = None
    """The first rank draws."""

    def __init__(self, spec: ModelSpec, ranks: RankProcesses) -> None:
        self.spec = spec
        self._ranks = ranks
        self._dropped: deque[int] = deque()
        """Caches that nobody has any more; appended to wherever the interpreter finds that out."""
        self._recorded: set[Span] = set()
        """Spans of sessions of whose steps nothing is left to record."""

    def attach(self, load: int) -> None:
        """Adds what every rank has loaded as `load`. Raises ValueError where it overlaps what is held."""
        self._recorded.clear()
        self._ask("attach", {"load": load})

    def detach(self, span: Span) -> None:
        """Frees the layers of `span`; parts of stages outside it stay. Raises ValueError where some are not held."""
        self._drop_caches()
        self._recorded.clear()
        self._ask("detach", {"span": [span.start, span.stop]})

    def limit_kv(self, limit_bytes: int) -> bool:
        """As `Engine.limit_kv`: every rank may use an equal part, as it keeps an equal part of the heads."""
        self._drop_caches()
        share = -(-limit_bytes // self._ranks.count)
        return all(header["fits"] for header, _ in self._ask("limit", {"bytes": share}))

    def new_cache(
        self,
        span: Span,
        capacity_tokens: int,
        prefix: Sequence[bytes] = (),  # noqa: ARG002 - as Engine's
        *,
        reserve: bool = True,  # noqa: ARG002 - as Engine's
    ) -> SequenceCache:
        """Memory for one session on every rank, allocated now. As `Engine.new_cache`, but sessions share no prefix."""
        self._drop_caches()
        if span not in self._recorded:
            while self._record(span):
                continue
            self._recorded.add(span)
        number = self._ranks.new_number()
        order = {"cache": number, "span": [span.start, span.stop], "capacity": capacity_tokens}
        try:
            answers = self._ask("cache", order)
        except (ValueError, RuntimeError):
            self._dropped.append(number)  # a rank may have had the memory
            raise
        nbytes = sum(header["bytes"] for header, _ in answers)
        token_bytes = sum(self.spec.kv_bytes_per_token[span.start : span.stop])
        cache = RankedCache(number, span, capacity_tokens, nbytes, token_bytes, self._ask)
        weakref.finalize(cache, self._dropped.append, number)
        return cache

    def begin_behind(self, cache: SequenceCache, tokens: int) -> None:
        """As `Engine.begin_behind`."""
        cache.truncate(tokens, same_tokens=True)

    def step(self, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> StepResult:
        """One step of all ranks. As `Engine.step`; hidden states are on the processor, and where the span ends the
        model the first rank draws: for each row that wants logits by its request, or greedily, as `sample_each`.

        Raises:
            RanksLost: a rank failed while the others computed, or they did not compute the same.
        """
        self._drop_caches()
        described, ends = [], span.stop == self.spec.layers
        for row in rows:
            if not isinstance(row.cache, RankedCache):
                raise TypeError("a cache of another engine")
            row.cache.begin_step(row.guesses)
            row.cache.require(row.count)
            ids = None if row.token_ids is None else list(row.token_ids)
            asked = row.requests or (_GREEDY,) * row.logit_rows
            requests = [described_request(one) for one in asked] if ends else []
            described.append([row.cache.number, row.cache.length, row.count, ids, requests])
        payload: bytes | memoryview = b""
        if hidden is not None:
            if hidden.ndim != 2 or hidden.shape[1] != self.spec.hidden_size:
                raise ValueError(
                    f"hidden states have {self.spec.hidden_size} columns, got {tuple(hidden.shape)}"
                )
            payload = raw_of(hidden.to("cpu", dtype_of(self.spec.dtype)))
        answers = self._ask("step", {"span": [span.start, span.stop], "rows": described}, payload)
        if len({header["sums"] for header, _ in answers}) > 1:
            raise self._ranks.end("ranks went different ways through a step")
        for row in rows:
            row.cache.advance(row.count)
        header, content = answers[0]
        if ends:
            return [outcome_of(one) for one in header["drawn"]]
        return torch.frombuffer(content, dtype=dtype_of(self.spec.dtype)).view(-1, self.spec.hidden_size)

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What `step` gives came through pipes."""
        return list(tensors)

    def record_next(self) -> bool:
        """As `Engine.record_next`: all ranks record, or none."""
        return self._record(None)

    def _record(self, span: Span | None) -> bool:
        order: dict[str, object] = {"span": None if span is None else [span.start, span.stop]}
        return all(header["recorded"] for header, _ in self._ask("record", order))

    def pack_next(self) -> bool:
        """Each rank packs what it loads at once."""
        return False

    def _drop_caches(self) -> None:
        numbers = []
        while self._dropped:
            numbers.append(self._dropped.popleft())
        if numbers:
            self._ask("drop", {"caches": numbers})

    def _ask(self, what: str, order: dict[str, object], payload: bytes | memoryview = b"") -> list[Any]:
        try:
            return self._ranks.ask(what, order, payload)
        except RankRefused as refused:
            raise _as_engine_error(refused) from refused


class RankedBackend:
    """Computes a model with several devices between `__aenter__` and `__aexit__`."""

    def __init__(
        self, model: LocalModel, devices: Sequence[str], way: DecodingWay = DecodingWay.RECORDED
    ) -> None:
        """`devices` are those of `choose_devices`, at least two."""
        spec = model.spec
        opening = {
            "folder": str(model.folder),
            "manifest": model.manifest.model_dump_json(),
            "dtype": spec.dtype,
            "quantization": spec.quantization,
            "name": spec.name,
            "exact": model.exact,
            "digests": None if model.digests is None else str(model.digests),
            "way": way.name,
            "faults": None if model.digests is None else str(model.digests.parent),  # the state directory
        }
        self.ranks = RankProcesses(devices, opening)
        self.engine = RankedEngine(spec, self.ranks)
        self._model = model
        self._count = len(devices)

    async def __aenter__(self) -> Self:
        """Starts the ranks.

        Raises:
            RanksLost, OSError: they cannot start.
        """
        await asyncio.to_thread(self.ranks.__enter__)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.ranks.__exit__)

    def fetch(self, span: Span) -> None:
        """As `Backend.fetch`."""
        self._model.with_parts(span, lambda *_: None, lambda *_: None)

    def load(self, span: Span, progress: Progress) -> Callable[[], None]:
        """Has every rank load its part. As `Backend.load`.

        Raises:
            WeightsError, OSError, MemoryError, RuntimeError, ValueError: a rank cannot.
        """
        return self._model.with_parts(span, progress, lambda parts, rest: self._load(span, parts, rest))

    def standing_in(self) -> "MeasuredRanks":
        """The same, but with random weights if the model's own would have to be fetched: to be measured."""
        return MeasuredRanks(self.engine, self._load, self._model.stand_ins())

    def _load(
        self,
        span: Span,
        parts: Mapping[str, BlobPart] | Mapping[str, StandIn] | None,
        progress: Progress,
        *,
        measured: bool = False,
    ) -> Callable[[], None]:
        done = [0] * self._count

        def told(rank: int, read: int, total: int) -> None:
            done[rank] = read
            with suppress(LoadAbandoned):  # ranks end what they have begun
                progress(sum(done), total * self._count)

        number = self.ranks.new_number()
        order: dict[str, object] = {
            "span": [span.start, span.stop],
            "parts": None if parts is None else described(parts),
            "measured": measured,
        }
        try:
            self.ranks.ask("load", order, silence_s=LOAD_SILENCE_S, progress=told, number=number)
        except RankRefused as refused:
            self.ranks.ask("forget", {"load": number})
            if refused.kind in ("WeightsError", "UnsupportedArchitecture"):
                reason = str(refused).removeprefix(f"{self._model.folder}: ")
                raise WeightsError(self._model.folder, reason) from refused
            raise _as_engine_error(refused) from refused
        try:
            progress(1, 1)
        except LoadAbandoned:
            self.ranks.ask("forget", {"load": number})
            raise
        return lambda: self.engine.attach(number)

    def cap_memory(self, cap_bytes: int) -> None:
        """No rank allocates more of its GPU than its share of `cap_bytes`, and the embedding, which each has whole."""
        others_bytes = (self._count - 1) * self._model.spec.embed_bytes
        self.ranks.ask("cap", {"bytes": -(-(cap_bytes + others_bytes) // self._count)})

    def all_reduce_s(self, payload_bytes: int) -> float:
        """Seconds of an all-reduce of so many bytes on the slowest rank: the fastest of a few."""
        answers = self.ranks.ask("time", {"bytes": payload_bytes})
        return max(float(header["seconds"]) for header, _ in answers)

    async def watch(self) -> NoReturn:
        """Waits for the loss of a rank.

        Raises:
            RanksLost: it has come.
        """
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()

        def note(reason: str) -> None:
            if not lost.done():
                lost.set_result(reason)

        def tell(reason: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody watches any more
                loop.call_soon_threadsafe(note, reason)

        self.ranks.tell_loss(tell)
        raise RanksLost(await lost)


class MeasuredRanks:
    """A backend of the same ranks that loads `parts` in the place of weights."""

    def __init__(
        self,
        engine: RankedEngine,
        load: Callable[..., Callable[[], None]],
        parts: Mapping[str, StandIn] | None,
    ) -> None:
        self.engine = engine
        self._load = load
        self._parts = parts

    def fetch(self, span: Span) -> None:
        """As `Backend.fetch`: nothing is missing."""

    def load(self, span: Span, progress: Progress) -> Callable[[], None]:
        """As `Backend.load`."""
        return self._load(span, self._parts, progress, measured=self._parts is not None)


def _as_engine_error(refused: RankRefused) -> Exception:
    """What the engine of one process would have raised."""
    match refused.kind:
        case "MemoryError":
            return MemoryError(str(refused))
        case "OSError" | "FileNotFoundError" | "PermissionError":
            return OSError(str(refused))
        case "ValueError" | "NotHeld" | "CacheFull" | "PoolFull" | "WeightsError" | "UnsupportedArchitecture":
            return ValueError(str(refused))
    return RuntimeError(f"{refused.kind}: {refused}")
