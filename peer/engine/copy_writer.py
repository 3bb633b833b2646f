"""Copy writer: writes and computes what has come of copies, piece by piece, while the engine has nothing else to do."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from molink.peer.compute.backend import StageEngine
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.idle_engine import IdleEngine, IdleWork
from molink.peer.engine.kept_copy import KeptCopy, WaitingPart
from molink.peer.redundancy.copy_intake import ComputingPace
from molink.peer.redundancy.copy_sending import PORTION_BYTES
from molink.routing.routes.copy_forms import CopyForm

FINISHED_WITHIN_S = 1.0
"""So long a copy that takes its hop's place is completed from what has come; the rest all hops compute again."""
_log = logging.getLogger(__name__)

Piece: TypeAlias = tuple[KeptCopy, WaitingPart]


class CopyWriter:
    """Owner of the order in which copies are written. On the event loop."""

    def __init__(
        self,
        engine: StageEngine,
        engine_thread: EngineThread,
        idle: IdleEngine,
        copies: Mapping[bytes, KeptCopy],
        written: Callable[[KeptCopy, Exception | None], None],
    ) -> None:
        """`copies` are all that there are now; `written` hears what came of each piece of one of them."""
        self._engine = engine
        self._engine_thread = engine_thread
        self._idle = idle
        self._copies = copies
        self._told = written
        self._latest: KeptCopy | None = None
        self._pace = ComputingPace()
        self._alarm: asyncio.TimerHandle | None = None
        self.computed_tokens = 0
        """Of copies, from what their hops have sent."""
        self.between_steps = False
        """Whether copies are written beside sessions that always step, too."""
        idle.add_source(self._next_work, self._is_awaited, self._next_writing)

    def wake(self) -> None:
        """Something may be there to be written."""
        self._idle.wake()

    async def finish(self, kept: KeptCopy) -> None:
        """Of a copy that is the session's from now on: writes what has come and only has to be written or computed, as
        far as there is time; others' steps go on in between. On the loop; what is no part of it ends that."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + FINISHED_WITHIN_S
        while kept.waiting and loop.time() < deadline_s:
            piece = kept.next_piece(self._pace.tokens)
            try:
                await self._engine_thread.call(self._write, kept, piece)
            except (ValueError, RuntimeError) as error:
                _log.info("a copy is taken over as it was before a part that is none: %s", error)
                return
            if kept.waiting and kept.waiting[0] is piece:
                kept.record_written(piece)

    def close(self) -> None:
        """Nothing is woken any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _is_awaited(self) -> bool:
        return any(
            one.is_awaited or (self.between_steps and one.parts_to_write()) for one in self._copies.values()
        )

    def _next_writing(self) -> IdleWork | None:
        """What only has to be written: an engine that is never idle computes nothing of copies."""
        return self._next_work(CopyForm.KEYS_AND_VALUES)

    def _next_work(self, only: CopyForm | None = None) -> IdleWork | None:
        """Some of what waits, of copies in turn, those first that sessions wait for: a piece that is computed, or parts
        that are written; of that form alone, if one is named."""
        waiting = [one for one in self._copies.values() if one.cache and one.waiting]
        if any(one.written_parts for one in waiting):
            return None
        waiting = [one for one in waiting if only in (None, one.waiting[0].form)]
        if not waiting:
            return None
        now_s = asyncio.get_running_loop().time()
        ready = [one for one in waiting if one.due_s() <= now_s]
        if not ready:
            self._wake_at(min(one.due_s() for one in waiting))
            return None
        after = ready.index(self._latest) + 1 if self._latest in ready else 0
        turns = sorted(ready[after:] + ready[:after], key=_may_wait)
        self._latest = first = turns[0]
        if first.waiting[0].form is CopyForm.KEYS_AND_VALUES:
            pieces = _together(turns)
        else:
            pieces = [(first, first.next_piece(self._pace.tokens))]
        for kept, _ in pieces:
            kept.written_parts += 1
        return IdleWork(lambda: self._write_all(pieces), lambda errors: self._all_written(pieces, errors))

    def _write_all(self, pieces: Sequence[Piece]) -> list[Exception | None]:
        """On the engine's thread. What is wrong with one copy's part is no other copy's fault."""
        errors: list[Exception | None] = []
        for kept, piece in pieces:
            try:
                self._write(kept, piece)
            except (ValueError, RuntimeError) as error:
                errors.append(error)
            else:
                errors.append(None)
        return errors

    def _write(self, kept: KeptCopy, piece: WaitingPart) -> None:
        began_s = time.perf_counter()
        kept.write(piece, self._engine)
        if piece.form is not CopyForm.KEYS_AND_VALUES:
            self._pace.record(piece.tokens, time.perf_counter() - began_s)
            self.computed_tokens += piece.tokens

    def _all_written(self, pieces: Sequence[Piece], errors: "Sequence[Exception | None] | Exception") -> None:
        if isinstance(errors, Exception):
            errors = [errors] * len(pieces)
        faults: dict[KeptCopy, Exception | None] = {}
        for (kept, piece), error in zip(pieces, errors, strict=True):
            kept.written_parts -= 1
            faults[kept] = faults.get(kept) or error
            if not kept.waiting or kept.waiting[0] is not piece:
                continue
            if error is None:
                kept.record_written(piece)
            else:
                kept.waiting.popleft()
        for kept, fault in faults.items():
            if self._copies.get(kept.plan.key.session) is kept:
                self._told(kept, fault)

    def _wake_at(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(at_s, self._idle.wake)


def _may_wait(kept: KeptCopy) -> bool:
    return not kept.is_awaited


def _together(turns: Sequence[KeptCopy]) -> list[Piece]:
    """Parts that are written in one go: of each copy in turn, up to PORTION_BYTES, and one in any case."""
    pieces: list[Piece] = []
    size_bytes = 0
    for kept in turns:
        for part in kept.parts_to_write():
            size_bytes += len(part.content)
            if pieces and size_bytes > PORTION_BYTES:
                return pieces
            pieces.append((kept, part))
    return pieces
