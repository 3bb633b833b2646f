"""The engine's idle moments, for what nobody waits for: one small piece of work at a time."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

from molink.peer.engine.engine_thread import EngineThread


class IdleWork(NamedTuple):
    """A piece of work: what runs on the engine's thread, and what hears on the loop what came of it."""

    function: Callable[[], Any]
    done: Callable[[Any], None]


NextWork = Callable[[], IdleWork | None]
"""The next piece; None: there is none now."""


class IdleEngine:
    """Gives work to the engine's thread while that has none. A step that comes meanwhile waits for one piece at most.

    On the event loop.
    """

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread
        self._sources: list[NextWork] = []
        self._looks = False
        """Whether a look is on its way."""

    def add_source(self, source: NextWork) -> None:
        """Asks `source` for work from now on; sources take turns."""
        self._sources.append(source)
        self._engine_thread.tell_idle(self.wake)

    def wake(self) -> None:
        """There may be work, or time for it."""
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
        if not self._engine_thread.is_idle:
            return
        for source in tuple(self._sources):
            work = source()
            if work is not None:
                self._sources.remove(source)
                self._sources.append(source)
                self._engine_thread.begin(work.function, work.done)
                return
