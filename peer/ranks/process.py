"""`python -m molink.peer.ranks.process`: one rank of a peer on several devices, started by `ranks.py`.

It does what it is told, one order after the other, since all ranks have to take part in the same steps in the same
order; only loading goes on beside them. Orders come through stdin, answers go through stdout, and it ends with stdin.
"""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from molink.peer.device import cap_gpu_memory
from molink.peer.ranks.messages import PipeError, read_message, write_message
from molink.peer.ranks.parts import exported_sizes, part_of, parts_of
from molink.shards.codec import dtype_of
from molink.shards.collectives import RankGroup
from molink.shards.engine import Engine, Rows
from molink.shards.kv_cache import SequenceCache
from molink.shards.loader import load_stage
from molink.shards.manifest import Manifest
from molink.shards.spec import Span
from molink.shards.stage import Stage
from molink.shards.store import describe
from molink.shards.tensor_parallel import Shard
from molink.shards.ways import Way, decoding_in

Order = dict[str, Any]
PROGRESS_BYTES = 64 * 2**20
"""Loading tells no more often than after so many bytes."""


class Rank:
    """One rank's engine, caches and freshly loaded stages."""

    def __init__(self, opening: Order, answer: Callable[..., None]) -> None:
        self._answer = answer
        self._folder = Path(opening["folder"])
        self._manifest = Manifest.model_validate_json(opening["manifest"])
        self._device: str = opening["device"]
        self._index: int = opening["rank"]
        self._exact: bool = opening["exact"]
        self._ranks: int = opening["ranks"]
        self._spec = describe(self._manifest, opening["dtype"], opening["quantization"], name=opening["name"])
        rendezvous = Path(opening["rendezvous"])
        self._group = RankGroup(self._index, opening["ranks"], self._device, rendezvous, opening["timeout_s"])
        self._shard = Shard(self._index, opening["ranks"], self._group.all_reduce)
        decoding = decoding_in(Way[opening["way"]], self._device, records=False)
        self._engine = Engine(self._spec, self._device, decoding=decoding)
        self._loaded: dict[int, Stage] = {}
        self._caches: dict[int, SequenceCache] = {}

    def open(self) -> None:
        """Meets the other ranks."""
        self._group.open()

    def obey(self, order: Order, payload: bytearray) -> None:
        """Does one thing, and answers."""
        match order["do"]:
            case "load":
                threading.Thread(target=self._load, args=(order,), name="load", daemon=True).start()
                return
            case "attach":
                self._engine.attach(self._loaded.pop(order["load"]))
                self._answer(order)
            case "forget":
                self._loaded.pop(order["load"], None)
                self._answer(order)
            case "detach":
                self._engine.detach(Span(*order["span"]))
                self._answer(order)
            case "cache":
                cache = self._engine.new_cache(Span(*order["span"]), order["capacity"])
                self._caches[order["cache"]] = cache
                self._answer(order, bytes=cache.nbytes)
            case "limit" | "cap":
                self._limit(order)
            case "drop":
                for number in order["caches"]:
                    self._caches.pop(number, None)
                self._answer(order)
            case "export" | "restore":
                self._copy(order, payload)
            case "step":
                self._step(order, payload)
            case "count" | "time":
                self._tell(order)
            case unknown:
                raise PipeError(f"there is no order {unknown!r}")

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
        """What was counted so far, or how long a sum takes."""
        if order["do"] == "time":
            self._answer(order, seconds=self._group.all_reduce_s(order["bytes"]))
            return
        group, caches = self._group, len(self._caches)
        self._answer(order, reductions=group.reductions, bytes=group.reduced_bytes, caches=caches)

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
                dtype=self._spec.dtype,
                quantization=self._spec.quantization,
                device=self._device,
                progress=progress,
                manifest=None if order["measured"] else self._manifest,
                parts=None if order["parts"] is None else parts_of(order["parts"]),
                shard=self._shard,
                exact=self._exact,
            )
        except Exception as error:  # noqa: BLE001 - the thread's boundary: who asked is told
            self._answer(order, **describe_error(error))
        else:
            self._loaded[order["id"]] = stage
            self._answer(order)

    def _cache(self, number: int, length: int) -> SequenceCache:
        """The cache, no longer than the peer takes it to be."""
        cache = self._caches[number]
        cache.truncate(min(length, cache.length))
        return cache

    def _step(self, order: Order, payload: bytearray) -> None:
        span = Span(*order["span"])
        rows = []
        for number, length, count, token_ids, want_logits in order["rows"]:
            cache = self._cache(number, length)
            rows.append(Rows(cache, count, None if token_ids is None else tuple(token_ids), want_logits))
        hidden = None
        if payload:
            hidden = torch.frombuffer(payload, dtype=dtype_of(self._spec.dtype)).view(
                -1, self._spec.hidden_size
            )
        with self._group.stepping():
            result = self._engine.step(span, rows, hidden)
        ends = span.stop == self._spec.layers
        if ends or self._index == 0:
            sent = result.to("cpu").contiguous()
            raw = sent.view(torch.uint8).numpy().reshape(-1).data if sent.numel() else b""
            self._answer(order, raw, shape=list(sent.shape))
        else:
            self._answer(order)  # every rank has the same hidden states


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

    order, payload = orders.get()
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


if __name__ == "__main__":
    main()
