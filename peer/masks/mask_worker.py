"""The peer's side of the process that follows grammars. On the event loop; nobody waits for it but the sessions with a
grammar, whose masks are computed while their tokens go round.

Orders are answered in their order, so that whose grammar has ended the process is known: it fails alone, and the others
go on in a new process, which follows them from their beginning.
"""

import asyncio
import contextlib
import itertools
import json
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from molink.shards.grammar import Grammar
from molink.shards.text.token_masks import GrammarFailed

READY_WITHIN_S = 60.0
"""The process starts, and has read the tokenizer."""
ANSWER_WITHIN_S = 10.0
"""The order that it is at."""
_LENGTHS = struct.Struct("<II")
"""As `ranks/messages.py`."""


@dataclass(frozen=True, slots=True)
class MaskedModel:
    """The model of which tokens are masked."""

    folder: Path
    """Of its tokenizer."""
    vocabulary: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NextMask:
    """Which tokens may come at one position."""

    position: int = 0
    allowed: bytes = b""
    """As `SampleRequest.allowed`."""
    ends: bool = False
    """Whether all of them end the text."""
    expected: tuple[int, ...] = ()
    """What probably comes there, and behind that, as far as the grammar leaves little choice."""
    behind: tuple["NextMask", ...] = ()
    """What may come behind each of these."""

    def along(self, tokens: Sequence[int]) -> tuple["NextMask", ...]:
        """This one, and those behind these tokens, as far as they are the ones that were expected."""
        same = 0
        for token, expected in zip(tokens, self.expected, strict=False):
            if token != expected:
                break
            same += 1
        return (self, *self.behind[:same])


@dataclass(slots=True, eq=False, weakref_slot=True)
class GrammarState:
    """How far one session's grammar has been followed."""

    grammar: Grammar
    next: NextMask = field(default=NextMask())
    is_computing: bool = False
    number: int = -1
    """In the process; its own for each process."""
    process: int = -1
    """In which it is followed."""
    followed: int = 0
    """Generated tokens, there."""
    expects: float = 1.0
    """How many tokens were expected of late, on average, when one was to come."""
    unheeded: int = 0
    """In a row: times that expected tokens were told, and not guessed."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskOrder:
    """What may come at that position is asked for."""

    state: GrammarState
    position: int
    generated_behind: Callable[[int], tuple[int, ...]]
    """What was generated behind the first so many generated tokens."""
    done: Callable[[NextMask | Exception], None]
    most_expected: int = 0
    """Behind so many tokens that may be expected it is said too what may come."""


class MaskWorker:
    """Owner of the process, which starts with the first order. Open between `__aenter__` and `__aexit__`."""

    def __init__(self, model: MaskedModel, answer_within_s: float = ANSWER_WITHIN_S) -> None:
        self._model = model
        self.answer_within_s = answer_within_s
        """The process is ended that takes longer at one order."""
        self._orders: deque[MaskOrder] = deque()
        """That have no answer, the one that the process is at first."""
        self._dropped: deque[int] = deque()
        """Numbers of grammars that nobody follows any more; appended to wherever the interpreter finds that out."""
        self._numbers = itertools.count()
        self._processes = itertools.count()
        self._current = -1
        self._process: asyncio.subprocess.Process | None = None
        self._is_ready = False
        self._running: asyncio.Task[None] | None = None
        self._patience: asyncio.Timeout | None = None
        """With the present order."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    @property
    def pid(self) -> int | None:
        """The process's, while there is one."""
        return None if self._process is None else self._process.pid

    def begin(self, order: MaskOrder) -> None:
        """`order.done` hears of what may come, or why nothing may."""
        self._orders.append(order)
        if self._running is None:
            self._running = asyncio.create_task(self._run(), name="follow grammars")
        elif self._is_ready:
            self._send(order)
            if len(self._orders) == 1:
                self._be_patient()

    async def _run(self) -> None:
        """Has all orders answered, by as many processes as that takes; after the last answer the process stays."""
        try:
            while True:
                failure, failed = await self._serve()
                for order in failed:
                    order.done(GrammarFailed(failure))
                if not self._orders:
                    return
        finally:
            self._running = None

    async def _serve(self) -> tuple[str, list[MaskOrder]]:
        """One process, from its start to its end; returns why it ended, and the orders that fail by that."""
        arguments = (sys.executable, "-m", "molink.peer.masks")
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments, stdin=pipe, stdout=pipe, stderr=nowhere
            )
        except OSError as error:
            return f"no process could be started to follow grammars: {error}", self._give_up()
        self._process, self._current = process, next(self._processes)
        try:
            failure = await self._converse(process)
        except (asyncio.IncompleteReadError, ConnectionError):
            failure = "the grammar is more than can be followed: it broke the process that tried"
        except TimeoutError:
            limit_s = self.answer_within_s
            failure = f"the grammar is more than can be followed: a mask took longer than {limit_s:g} s"
        finally:
            failed = self._give_up()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        return failure, failed

    def _give_up(self) -> list[MaskOrder]:
        """The process has ended: the order that it was at fails, or all if it never was ready. What is ordered from now
        on waits for the next process."""
        failed = [self._orders.popleft()] if self._is_ready and self._orders else [*self._orders]
        if not self._is_ready:
            self._orders.clear()
        self._process, self._patience, self._is_ready = None, None, False
        return failed

    async def _converse(self, process: asyncio.subprocess.Process) -> str:
        model, answers = self._model, process.stdout
        if answers is None:
            raise ConnectionError
        opening = {"folder": str(model.folder), "vocabulary": model.vocabulary, "stop_ids": model.stop_ids}
        self._write(opening)
        async with asyncio.timeout(READY_WITHIN_S):
            header, _ = await _read(answers)
        if "error" in header:
            return str(header["error"])
        self._is_ready = True
        for order in self._orders:
            self._send(order)
        async with asyncio.timeout(None) as self._patience:
            while True:
                self._be_patient()
                header, mask = await _read(answers)
                self._answered(self._orders.popleft(), header, mask)

    def _be_patient(self) -> None:
        """From now on, with the order that the process is at, if there is one."""
        if self._patience is not None:
            until_s = asyncio.get_running_loop().time() + self.answer_within_s
            self._patience.reschedule(until_s if self._orders else None)

    def _answered(self, order: MaskOrder, header: dict[str, Any], mask: bytes) -> None:
        if "error" in header:
            order.done(GrammarFailed(str(header["error"])))
        else:
            order.done(_mask_of(order.position, header, mask))

    def _send(self, order: MaskOrder) -> None:
        state = order.state
        is_new = state.process != self._current
        if is_new:
            state.process, state.number, state.followed = self._current, next(self._numbers), 0
            weakref.finalize(state, self._dropped.append, state.number)
        tokens = order.generated_behind(state.followed)
        state.followed += len(tokens)
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        grammar = (state.grammar.kind, state.grammar.text) if is_new else None
        asked = {"number": state.number, "grammar": grammar, "tokens": tokens, "most": order.most_expected}
        self._write({"drop": dropped, **asked})

    def _write(self, header: dict[str, object]) -> None:
        """What is not read any more is answered by the end of the process."""
        if self._process is None or self._process.stdin is None:
            return
        encoded = json.dumps(header, separators=(",", ":")).encode()
        self._process.stdin.write(_LENGTHS.pack(len(encoded), 0) + encoded)


def _mask_of(position: int, header: dict[str, Any], masks: bytes) -> NextMask:
    ends, expected = header["ends"], tuple(header["expected"])
    size = len(masks) // len(ends)
    first, *behind = [
        NextMask(position + at, masks[at * size : (at + 1) * size], bool(ends[at])) for at in range(len(ends))
    ]
    return replace(first, expected=expected, behind=tuple(behind))


async def _read(answers: asyncio.StreamReader) -> tuple[dict[str, Any], bytes]:
    header_bytes, payload_bytes = _LENGTHS.unpack(await answers.readexactly(_LENGTHS.size))
    header = json.loads(await answers.readexactly(header_bytes))
    return header, await answers.readexactly(payload_bytes)
