"""One rank of a peer on several devices: `python -m molink.peer.ranks`, started by `processes.py`.

It does what it is told, one order after the other, since all ranks have to take part in the same steps in the same
order; only loading goes on beside them. Orders come through stdin, answers go through stdout, and it ends with stdin.
"""

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from molink.peer.deaths import FaultLog
from molink.peer.device.device import cap_gpu_memory
from molink.peer.ranks.drawn import described_outcome, request_of
from molink.peer.ranks.messages import PipeError, read_message, write_message
from molink.peer.ranks.parts import exported_sizes, part_of, parts_of, raw_of
from molink.shards.batching.collectives import NotOnAllRanks, RankGroup, RankRecorder
from molink.shards.batching.decode import Decoding
from molink.shards.batching.engine import Engine, Rows
from molink.shards.batching.ways import DecodingWay, decoding_in
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.store import describe
from molink.shards.codec import dtype_of
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.model.tensor_parallel import Shard, vocabulary_part
from molink.shards.sampling.sampling import sample_each
from molink.shards.spec import ModelSpec, Span

Order = dict[str, Any]
NO_ORDER = -1
"""The id of what is told without having been asked for."""
PROGRESS_BYTES = 64 * 2**20
"""Loading tells no more often than after so many bytes."""


class RankLoader:
    """Loads a rank's parts of layers beside its steps, and keeps them until they are attached."""

    def __init__(self, opening: Order, shard: Shard, answer: Callable[..., None]) -> None:
        quantization, exact = opening["quantization"], opening["exact"]
        self._folder = Path(opening["folder"])
        self._manifest = Manifest.model_validate_json(opening["manifest"])
        self._settings = StageSettings(
            opening["dtype"], quantization, device=opening["device"], shard=shard, exact=exact
        )
        digests = opening["digests"]
        self._cache = LoadCache(digests=None if digests is None else Path(digests))
        self._answer = answer
        self._loaded: dict[int, Stage] = {}

    def describe(self, name: str) -> ModelSpec:
        """The model whose layers they are."""
        return describe(self._manifest, self._settings.dtype, self._settings.quantization, name=name)

    def begin(self, order: Order) -> None:
        """Loads on a thread of its own, and answers when that has ended."""
        threading.Thread(target=self._load, args=(order,), name="load", daemon=True).start()

    def take(self, load: int) -> Stage | None:
        """What that order has loaded, to be attached or let go."""
        return self._loaded.pop(load, None)

    def _load(self, order: Order) -> None:
        told = 0

        def progress(done: int, total: int) -> None:
            nonlocal told
            if done - told >= PROGRESS_BYTES:
                told = done
                self._answer(order, progress=[done, total])

        try:
            stage = load_stage(
                self._folder,
                Span(*order["span"]),
                self._settings,
                progress=progress,
                manifest=None if order["measured"] else self._manifest,
                parts=None if order["parts"] is None else parts_of(order["parts"]),
                cache=self._cache,
            )
        except Exception as error:  # noqa: BLE001 - the thread's boundary: who asked is told
            self._answer(order, **describe_error(error))
        else:
            self._loaded[order["id"]] = stage
            self._answer(order)


class Rank:
    """One rank's engine and caches."""

    def __init__(self, opening: Order, answer: Callable[..., None]) -> None:
        ranks = self._ranks = int(opening["ranks"])
        rendezvous = Path(opening["rendezvous"])
        self._answer = answer
        self._device: str = opening["device"]
        self._index: int = opening["rank"]
        self._group = RankGroup(self._index, ranks, self._device, rendezvous, opening["timeout_s"])
        self._loader = RankLoader(opening, Shard(self._index, ranks, self._group.all_reduce), answer)
        self._spec = self._loader.describe(opening["name"])
        decoding = decoding_in(DecodingWay[opening["way"]], self._device)
        self._engine = Engine(self._spec, self._device, decoding=decoding and self._together(decoding))
        self._caches: dict[int, SequenceCache] = {}
        parts = [vocabulary_part(self._spec.vocabulary_size, rank, ranks) for rank in range(ranks)]
        self._vocabulary_widths = [stop - start for start, stop in parts]

    def open(self) -> None:
        """Meets the other ranks."""
        self._group.open()

    def obey(self, order: Order, payload: bytearray) -> None:
        """Does one thing, and answers."""
        match order["do"]:
            case "load":
                self._loader.begin(order)
            case "record":
                self._answer(order, recorded=self._record_next(order["span"]))
            case "attach" | "forget" | "detach":
                self._put(order)
            case "cache" | "drop":
                self._keep(order)
            case "limit" | "cap":
                self._limit(order)
            case "export" | "restore":
                self._copy(order, payload)
            case "step":
                self._step(order, payload)
            case "count" | "time" | "least":
                self._tell(order)
            case unknown:
                raise PipeError(f"there is no order {unknown!r}")

    def _put(self, order: Order) -> None:
        """What was loaded is put to use or let go, or a span no longer used."""
        match order["do"]:
            case "attach":
                stage = self._loader.take(order["load"])
                if stage is None:
                    raise PipeError(f"nothing was loaded by order {order['load']}")
                self._engine.attach(stage)
            case "forget":
                self._loader.take(order["load"])
            case _:
                self._engine.detach(Span(*order["span"]))
        self._answer(order)

    def _together(self, decoding: Decoding) -> Decoding:
        """The same, recorded where all ranks can record."""
        recorder = decoding.recorder
        return replace(decoding, recorder=recorder and RankRecorder(recorder, self._group))

    def _record_next(self, span: Sequence[int] | None) -> bool:
        """As `Engine.record_next`, or of that span. All ranks or none: who replays sums pads them as others do not."""
        paged = self._engine.to_record(None if span is None else Span(*span))
        with self._group.stepping():
            if self._group.agree(is_so=paged is not None) and paged is not None:
                return paged.record_next()
        if paged is not None:
            paged.give_up(NotOnAllRanks("another rank cannot record its steps"))
        return False

    def _keep(self, order: Order) -> None:
        """One more cache, or some no longer."""
        if order["do"] == "drop":
            for number in order["caches"]:
                self._caches.pop(number, None)
            self._answer(order)
            return
        cache = self._engine.new_cache(Span(*order["span"]), order["capacity"])
        self._caches[order["cache"]] = cache
        self._answer(order, bytes=cache.nbytes)

    def _limit(self, order: Order) -> None:
        """How much the KV cache may take from now on, or all that this rank allocates."""
        if order["do"] == "cap":
            cap_gpu_memory(self._device, order["bytes"])
            self._answer(order)
        else:
            self._answer(order, fits=self._engine.limit_kv(order["bytes"]))

    def _copy(self, order: Order, payload: bytearray) -> None:
        """Tokens of a cache to the peer, or from it."""
        cache, start = self._cache(order["cache"], order["length"]), order["start"]
        if order["do"] == "export":
            exported = cache.export(start, order["stop"])
            self._answer(order, exported, sizes=exported_sizes(cache, start, order["stop"]))
            return
        sizes = exported_sizes(cache, start, start + order["tokens"])
        cache.restore(start, order["tokens"], part_of(payload, sizes, self._index, self._ranks))
        self._answer(order)

    def _tell(self, order: Order) -> None:
        """What was counted so far, how long a sum takes, or how far back a cache can go."""
        if order["do"] == "time":
            self._answer(order, seconds=self._group.all_reduce_s(order["bytes"]))
            return
        if order["do"] == "least":
            self._answer(order, least=self._cache(order["cache"], order["length"]).least_length)
            return
        group, caches = self._group, len(self._caches)
        self._answer(order, reductions=group.reductions, bytes=group.reduced_bytes, caches=caches)

    def _cache(self, number: int, length: int) -> SequenceCache:
        """The cache, no longer than the peer takes it to be."""
        cache = self._caches[number]
        self._engine.begin_behind(cache, min(length, cache.length))
        return cache

    def _step(self, order: Order, payload: bytearray) -> None:
        """Every rank has the same hidden states, of which the first hands over its own; each has the logits of its
        part of the vocabulary, from all of which the first draws."""
        span = Span(*order["span"])
        rows, requests = [], []
        for number, length, count, token_ids, asked in order["rows"]:
            cache = self._cache(number, length)
            ids = None if token_ids is None else tuple(token_ids)
            rows.append(Rows(cache, count, ids, logit_rows=len(asked)))
            requests += [request_of(one) for one in asked]
        hidden = None
        if payload:
            hidden = torch.frombuffer(payload, dtype=dtype_of(self._spec.dtype)).view(
                -1, self._spec.hidden_size
            )
        before = self._group.reductions
        logits: Tensor | None = None
        with self._group.stepping():
            result = self._engine.step(span, rows, hidden)
            if requests:
                logits = self._group.gather(result, self._vocabulary_widths)
        sums = self._group.reductions - before
        if self._index:
            self._answer(order, sums=sums)
        elif span.stop == self._spec.layers:
            outcomes = [] if logits is None else sample_each(logits, requests)
            self._answer(order, sums=sums, drawn=[described_outcome(one) for one in outcomes])
        else:
            (sent,) = self._engine.to_host([result])
            self._answer(order, raw_of(sent), sums=sums)


class _Warnings(logging.Handler):
    """What the peer's owner should know goes to the peer, which has a log that somebody reads."""

    def __init__(self, answer: Callable[..., None]) -> None:
        super().__init__(logging.WARNING)
        self._answer = answer

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):  # nobody listens any more: this process is about to end
            self._answer({"id": NO_ORDER}, warning=record.getMessage())


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as an answer."""
    return {"error": type(error).__name__, "detail": str(error), "refused": isinstance(error, ValueError)}


def main() -> None:
    """Runs until stdin ends, whatever it is doing then."""
    for name in ("SIGINT", "SIGBREAK"):  # Ctrl-C is for the peer, which ends this process when it has drained
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    orders: queue.Queue[tuple[Order, bytearray]] = queue.Queue(maxsize=64)
    threading.Thread(target=_read_orders, args=(sys.stdin.buffer, orders), name="orders", daemon=True).start()
    writing = threading.Lock()

    def answer(order: Order, payload: bytes | bytearray | memoryview = b"", **content: object) -> None:
        with writing:
            write_message(answers, {"id": order["id"], **content}, payload)

    logging.getLogger("molink").addHandler(_Warnings(answer))
    order, payload = orders.get()
    if order["faults"] is not None:
        with suppress(OSError):  # a crash leaves no trace then, as the peer has said
            FaultLog(Path(order["faults"]), f"rank{order['rank']}").__enter__()
    try:
        torch.set_num_threads(order["threads"])
        rank = Rank(order, answer)
        rank.open()
        answer(order)
    except Exception as error:  # noqa: BLE001 - the process' boundary
        answer(order, **describe_error(error))
        return
    while True:
        order, payload = orders.get()
        try:
            rank.obey(order, payload)
        except Exception as error:  # noqa: BLE001 - the order's boundary: who gave it is told
            answer(order, **describe_error(error))


def _read_orders(stream: BinaryIO, orders: "queue.Queue[tuple[Order, bytearray]]") -> None:
    try:
        while (message := read_message(stream)) is not None:
            orders.put(message)
    finally:
        os._exit(0)  # nobody gives orders any more: a step that waits for other ranks would wait on
