"""The processes of a peer on several devices: started together, told the same, and ended together.

No rank runs in the peer itself. A collective whose partner has gone waits, on a GPU without a way out but the end of
the process; so it is the ranks that end, and the peer stays able to say why.
"""

import contextlib
import itertools
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Self

from molink.peer.device.device import processor_count
from molink.peer.ranks.messages import PipeError, read_message, write_message

OPEN_TIMEOUT_S = 180.0
"""Importing torch and transformers, and meeting each other, on a slow and busy machine."""
ANSWER_TIMEOUT_S = 120.0
"""Any single order but loading."""
LOAD_SILENCE_S = 600.0
"""Loading may take long, but not without progress."""
GRACE_S = 10.0
"""When one rank has failed, the others answer within this time or never."""
TOGETHER = frozenset({"step", "record"})
"""Orders in which ranks wait for each other: one that fails alone leaves the others waiting."""
CHECK_S = 0.5
LAST_WORDS_BYTES = 2000

_log = logging.getLogger(__name__)

Answer = tuple[dict[str, Any], bytearray]


class RanksLost(RuntimeError):
    """The ranks cannot go on, and have been ended: the sentence names the one that failed and why."""


class RankRefused(Exception):
    """Every rank, or one of them alone, refused an order before it did anything."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        """The error's class in the rank."""


@dataclass(slots=True, eq=False)
class _RankProcess:
    """One rank."""

    device: str
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    writing: threading.Lock = field(default_factory=threading.Lock)

    def last_words(self) -> str:
        """The last line that it wrote to stderr, if any."""
        self.log.seek(max(0, self.log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


@dataclass(slots=True, eq=False)
class _PendingOrder:
    """An order on its way."""

    what: str
    silence_s: float
    deadline_s: float
    failure: str = ""
    """Of the first rank that has failed, if one has."""
    answers: "queue.SimpleQueue[tuple[int, Answer] | None]" = field(default_factory=queue.SimpleQueue)


class RankProcesses:
    """One process for each device between `__enter__` and `__exit__`. `ask` from any thread."""

    def __init__(self, devices: Sequence[str], opening: Mapping[str, object]) -> None:
        self.lost: str | None = None
        """Why they have been ended, if they have."""
        self.payload_bytes = 0
        """Of all messages to and from ranks, without headers."""
        self._devices = tuple(devices)
        self._opening = dict(opening)
        self._processes: list[_RankProcess] = []
        self._numbers = itertools.count()
        self._waiting: dict[int, _PendingOrder] = {}
        self._ended = threading.Event()
        self._failing = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._on_lost: Callable[[str], None] | None = None

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._devices)

    def __enter__(self) -> Self:
        """Starts all, and waits until they have met.

        Raises:
            RanksLost, OSError: one could not.
        """
        with contextlib.ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="molink-ranks-"))
            stack.callback(self._end)
            for device in self._devices:
                self._processes.append(self._start(device, stack))
            for index, rank in enumerate(self._processes):
                threading.Thread(target=self._listen, args=(index, rank), daemon=True).start()
            threading.Thread(target=self._watch, name="ranks", daemon=True).start()
            opening = {
                **self._opening,
                "ranks": len(self._devices),
                "rendezvous": str(Path(folder) / "rendezvous"),
                "timeout_s": ANSWER_TIMEOUT_S,
                "threads": max(1, processor_count() // len(self._devices)),
            }
            own = [{"rank": index, "device": device} for index, device in enumerate(self._devices)]
            try:
                self.ask("open", opening, own=own, silence_s=OPEN_TIMEOUT_S)
            except RankRefused as error:
                raise RanksLost(f"the ranks could not start: {error}") from error
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' processes."""
        return tuple(rank.process.pid for rank in self._processes)

    def tell_loss(self, on_lost: Callable[[str], None]) -> None:
        """Has `on_lost` called once, on some thread, with the reason when a fault has ended them."""
        with self._failing:
            self._on_lost = on_lost
            lost = self.lost
        if lost is not None:
            on_lost(lost)

    def ask(
        self,
        what: str,
        order: Mapping[str, object],
        payload: bytes | memoryview = b"",
        *,
        own: Sequence[Mapping[str, object]] | None = None,
        silence_s: float = ANSWER_TIMEOUT_S,
        progress: Callable[[int, int, int], None] | None = None,
        number: int | None = None,
    ) -> list[Answer]:
        """Gives all ranks an order, each with what is its `own`, and returns their answers in order.

        `progress` is called with (rank, done, total).

        Raises:
            RankRefused: at least one refused, and none has done anything that the others have not.
            RanksLost: they cannot go on.
        """
        number = self.new_number() if number is None else number
        waiting = _PendingOrder(what, silence_s, time.monotonic() + silence_s)
        self._waiting[number] = waiting
        try:
            if self._ended.is_set():
                raise RanksLost(self.lost or "the ranks have been ended")
            for index, rank in enumerate(self._processes):
                header = {"do": what, "id": number, **order, **(own[index] if own else {})}
                try:
                    with rank.writing:
                        write_message(rank.process.stdin, header, payload)  # type: ignore[arg-type] # it is a pipe
                except (OSError, ValueError):
                    self._lose(self._death_of(index))
            answers = self._collect(waiting, progress)
            self.payload_bytes += len(payload) * len(answers) + sum(len(content) for _, content in answers)
            return answers
        finally:
            del self._waiting[number]

    def end(self, reason: str) -> RanksLost:
        """Ends them for that reason, unless they have been ended for another; an error that says why, to be raised."""
        self._lose(reason)
        return RanksLost(self.lost or reason)

    def new_number(self) -> int:
        """A number for an order or for something that it makes."""
        return next(self._numbers)

    def _collect(
        self, waiting: _PendingOrder, progress: Callable[[int, int, int], None] | None
    ) -> list[Answer]:
        answers: dict[int, Answer] = {}
        while len(answers) < len(self._processes):
            arrived = waiting.answers.get()  # `_watch` ends this wait at the deadline
            if arrived is None:
                raise RanksLost(self.lost or "the ranks have been ended")
            index, answer = arrived
            if "progress" in answer[0]:
                waiting.deadline_s = time.monotonic() + waiting.silence_s
                if progress is not None:
                    progress(index, *answer[0]["progress"])
                continue
            answers[index] = answer
            if "error" in answer[0]:
                waiting.failure = waiting.failure or self._failure_of(index, answer[0])
                waiting.deadline_s = min(waiting.deadline_s, time.monotonic() + GRACE_S)
        failed = {index: answer[0] for index, answer in answers.items() if "error" in answer[0]}
        if failed:
            index, first = min(failed.items())
            unanimous = len(failed) == len(answers) and all(one["refused"] for one in failed.values())
            if waiting.what in TOGETHER and not unanimous:
                raise self.end(self._failure_of(index, first))
            raise RankRefused(first["error"], first["detail"])
        return [answers[index] for index in range(len(self._processes))]

    def _start(self, device: str, stack: contextlib.ExitStack) -> _RankProcess:
        log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - closed with the stack
        environment = {**os.environ}
        if device.startswith("cuda"):
            environment.setdefault(
                "NCCL_SOCKET_IFNAME", "lo"
            )  # ranks are of one machine: nobody else may reach them
        process = subprocess.Popen(
            [sys.executable, "-m", "molink.peer.ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=environment,
        )
        return _RankProcess(device, process, log)

    def _listen(self, index: int, rank: _RankProcess) -> None:
        """Hands a rank's answers to whoever waits for them, until it ends."""
        try:
            while (answer := read_message(rank.process.stdout)) is not None:  # type: ignore[arg-type] # it is a pipe
                if "warning" in answer[0]:
                    _log.warning("rank %d on %s: %s", index, rank.device, answer[0]["warning"])
                waiting = self._waiting.get(answer[0].get("id", -1))
                if waiting is not None:
                    waiting.answers.put((index, answer))
        except (PipeError, OSError, ValueError) as error:
            self._lose(f"rank {index} on {rank.device} said what is no answer: {error}")
        if not self._ended.is_set():
            self._lose(self._death_of(index))

    def _watch(self) -> None:
        """Ends them all when an order is overdue."""
        while not self._ended.wait(CHECK_S):
            now_s = time.monotonic()
            for waiting in list(self._waiting.values()):
                if now_s > waiting.deadline_s:
                    self._lose(waiting.failure or f"a rank did not answer to {waiting.what!r} in time")

    def _failure_of(self, index: int, header: Mapping[str, Any]) -> str:
        return f"rank {index} on {self._devices[index]} failed: {header['error']}: {header['detail']}"

    def _death_of(self, index: int) -> str:
        rank = self._processes[index]
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.process.wait(GRACE_S)
        said = rank.last_words()
        return f"rank {index} on {rank.device} ended with code {rank.process.returncode}" + (
            f": {said}" if said else ""
        )

    def _lose(self, reason: str) -> None:
        """The first reason counts."""
        with self._failing:
            if self._ended.is_set():
                return
            self.lost = reason
            on_lost = self._on_lost
            self._kill()
        if on_lost is not None:
            threading.Thread(target=on_lost, args=(reason,), daemon=True).start()

    def _end(self) -> None:
        with self._failing:
            self._kill()
        for rank in self._processes:
            rank.process.wait()  # killed: it is a matter of milliseconds
            for pipe in (rank.process.stdin, rank.process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def _kill(self) -> None:
        self._ended.set()
        for rank in self._processes:
            rank.process.kill()
        for waiting in list(self._waiting.values()):
            waiting.answers.put(None)
