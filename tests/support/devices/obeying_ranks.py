"""The ranks of a peer as threads of a test's process: they obey as its processes do, and sum through gloo, but a test
sees what each of them does."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from molink.peer.models.model import LocalModel
from molink.peer.ranks import process
from molink.peer.ranks.backend import RankedEngine
from molink.peer.ranks.process import Rank, describe_error
from molink.peer.ranks.processes import TOGETHER, RankRefused, RanksLost
from molink.shards.batching.decode import Decoding
from molink.shards.batching.ways import DecodingWay
from molink.shards.spec import Span

WAIT_S = 60.0
GRACE_S = 1.0
"""Once one has failed, the others answer within this time or are taken to wait for it."""
Answer = tuple[dict[str, Any], bytearray]
_SUMS: dict[int, Callable[[Tensor], None]] = {}
_NUMBERS = itertools.count()


@torch.library.custom_op("molink_tests::sum_of_ranks", mutates_args=())
def _sum(partial: Tensor, number: int) -> Tensor:
    """As an operation of its own, so that a recording has it."""
    total = partial.clone()
    _SUMS[number](total)
    return total


class ObeyingRanks:
    """As `processes.Ranks`, to `ask`."""

    def __init__(self, model: LocalModel, count: int, folder: Path) -> None:
        opening = {
            "folder": str(model.folder), "manifest": model.manifest.model_dump_json(), "dtype": model.spec.dtype,
            "quantization": "none", "name": model.spec.name, "exact": False, "way": DecodingWay.RECORDED.name,
            "digests": model.digests and str(model.digests),
            "ranks": count, "rendezvous": str(folder / "rendezvous"), "timeout_s": WAIT_S, "device": "cpu",
        }  # fmt: skip
        self.count = count
        self.told: list[tuple[str, dict[str, Any]]] = []
        """What was asked for, and what the first rank answered."""
        self._numbers = itertools.count()
        self._orders: list[queue.Queue[tuple[dict[str, Any], bytearray] | None]] = []
        self._answers: queue.Queue[tuple[int, Answer]] = queue.Queue()
        self.threads: list[threading.Thread] = []
        for index in range(count):
            self._orders.append(queue.Queue())
            rank = Rank({**opening, "rank": index}, self._answerer(index))
            self.threads.append(threading.Thread(target=self._serve, args=(index, rank), daemon=True))
        for thread in self.threads:
            thread.start()
        assert all(header == {"open": True} for header, _ in self._collect())

    def ask(
        self,
        what: str,
        order: dict[str, Any],
        payload: bytes | memoryview = b"",
        *,
        number: int | None = None,
    ) -> list[Answer]:
        number = self.new_number() if number is None else number
        for orders in self._orders:
            orders.put(({"do": what, "id": number, **order}, bytearray(payload)))
        answers = self._collect()
        self.told.append((what, answers[0][0]))
        failed = next((header for header, _ in answers if "error" in header), None)
        if failed is None:
            return answers
        if what in TOGETHER:
            raise self.end(f"{failed['error']}: {failed['detail']}")
        raise RankRefused(failed["error"], failed["detail"])

    def _collect(self) -> list[Answer]:
        answers: dict[int, Answer] = {}
        failed = False
        while len(answers) < self.count:
            try:
                index, answer = self._answers.get(timeout=GRACE_S if failed else WAIT_S)
            except queue.Empty:
                break
            answers[index] = answer
            failed |= "error" in answer[0]
        assert failed or len(answers) == self.count
        return [answers[index] for index in sorted(answers)]

    def new_number(self) -> int:
        return next(self._numbers)

    def end(self, reason: str) -> RanksLost:
        return RanksLost(reason)

    def close(self) -> None:
        """A rank that still waits for one that has failed wakes when the other's end of the group is closed. None may
        be left: it would come back from its wait into an interpreter that is ending."""
        for orders in self._orders:
            orders.put(None)
        for thread in self.threads:
            thread.join(WAIT_S)
        assert not any(thread.is_alive() for thread in self.threads)

    def _answerer(self, index: int) -> Callable[..., None]:
        def answer(order: dict[str, Any], payload: bytes | memoryview = b"", **content: object) -> None:
            if "progress" not in content:
                self._answers.put((index, ({**content}, bytearray(payload))))

        return answer

    def _serve(self, index: int, rank: Rank) -> None:
        rank.open()
        group = rank._group
        number = next(_NUMBERS)
        assert group._sum is not None
        _SUMS[number] = group._sum
        group._sum = lambda partial: partial.copy_(_sum(partial, number))  # type: ignore[assignment]
        self._answers.put((index, ({"open": True}, bytearray())))
        try:
            while (given := self._orders[index].get()) is not None:
                try:
                    rank.obey(*given)
                except Exception as error:  # noqa: BLE001 - as `process.main`
                    self._answers.put((index, (describe_error(error), bytearray())))
        finally:
            group._sum = group._gather = None  # with nobody to refer to it, torch closes this end
            del _SUMS[number]


@contextmanager
def obeying_engine(
    model: LocalModel, decodings: Sequence[Decoding | None], folder: Path, spans: Sequence[Span]
) -> Iterator[tuple[RankedEngine, ObeyingRanks]]:
    """An engine of as many ranks as decodings, which hold these spans."""
    left = list(decodings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "decoding_in", lambda _way, _device: left.pop(0))
        ranks = ObeyingRanks(model, len(decodings), folder)
        try:
            engine = RankedEngine(model.spec, ranks)  # type: ignore[arg-type]
            for span in spans:
                number = ranks.new_number()
                order = {"span": [span.start, span.stop], "parts": None, "measured": False}
                ranks.ask("load", order, number=number)
                engine.attach(number)
            yield engine, ranks
        finally:
            ranks.close()
