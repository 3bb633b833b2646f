"""Copy writer: writes and computes what has come of copies, piece by piece, while the engine has nothing else to do."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from molink.peer.compute.backend import StageEngine
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.idle_engine import IdleEngine, IdleWork
from molink.peer.engine.kept_copy import KeptCopy, WaitingPart
from molink.peer.redundancy.copy_intake import ComputingPace
from molink.routing.routes.copy_forms import CopyForm

FINISHED_WITHIN_S = 1.0
"""So long a copy that takes its hop's place is completed from what has come; the rest all hops compute again."""
_log = logging.getLogger(__name__)


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
        idle.add_source(
            self._next_work, lambda: any(one.is_awaited for one in copies.values()), self._next_writing
        )

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

    def _next_writing(self) -> IdleWork | None:
        """A piece of what only has to be written: an engine that is never idle computes nothing of copies."""
        return self._next_work(CopyForm.KEYS_AND_VALUES)

    def _next_work(self, only: CopyForm | None = None) -> IdleWork | None:
        """A piece of what waits, of copies in turn; of that form alone, if one is named."""
        waiting = [one for one in self._copies.values() if one.cache and one.waiting]
        if any(one.is_written for one in waiting):
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
        self._latest = kept = ready[after % len(ready)]
        piece = kept.next_piece(self._pace.tokens)
        kept.is_written = True
        return IdleWork(lambda: self._write(kept, piece), lambda error: self._written(kept, piece, error))

    def _write(self, kept: KeptCopy, piece: WaitingPart) -> None:
        """On the engine's thread."""
        began_s = time.perf_counter()
        kept.write(piece, self._engine)
        if piece.form is not CopyForm.KEYS_AND_VALUES:
            self._pace.record(piece.tokens, time.perf_counter() - began_s)
            self.computed_tokens += piece.tokens

    def _written(self, kept: KeptCopy, piece: WaitingPart, error: Exception | None) -> None:
        kept.is_written = False
        if not kept.waiting or kept.waiting[0] is not piece:
            return
        if error is None:
            kept.record_written(piece)
        else:
            kept.waiting.popleft()
        if self._copies.get(kept.plan.key.session) is kept:
            self._told(kept, error)

    def _wake_at(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(at_s, self._idle.wake)
