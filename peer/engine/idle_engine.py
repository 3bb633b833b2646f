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


LOOK_AGAIN_S = 0.005
"""While the engine is busy, work that somebody waits for is looked for so often."""
TURN_S = 0.05
"""An engine that is never idle does one short piece of what nobody waits for in so long: one that takes no longer than
1 ms takes a fiftieth of its time at most."""


class IdleEngine:
    """Gives work to the engine's thread while that has none. A step that comes meanwhile waits for one piece at most.

    Work that somebody waits for goes between two steps of an engine that is never idle, one piece at a time; what is
    short, once in TURN_S. On the event loop.
    """

    def __init__(self, engine_thread: EngineThread) -> None:
        self._engine_thread = engine_thread
        self._sources: dict[NextWork, tuple[Callable[[], bool], NextWork]] = {}
        """With whether somebody waits for what they have, and what of it is short; who was served last at the end."""
        self._turn_s = 0.0
        """When a busy engine is next given something short (the loop's clock)."""
        self._works = False
        """Whether a piece of work is on the thread."""
        self._looks = False
        """Whether a look is on its way."""
        self._alarm: asyncio.TimerHandle | None = None

    def add_source(
        self, source: NextWork, is_awaited: Callable[[], bool], short: NextWork | None = None
    ) -> None:
        """Asks `source` for work from now on; sources take turns. `is_awaited`: whether somebody waits for it; `short`:
        asked instead while the engine is busy, for what takes about a millisecond."""
        self._sources[source] = is_awaited, short or _no_work
        self._engine_thread.tell_idle(self.wake)

    def wake(self) -> None:
        """There may be work, or time for it."""
        if not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._looks = False
        if self._works:
            return
        is_idle, loop = self._engine_thread.is_idle, asyncio.get_running_loop()
        is_turn, is_any_awaited = loop.time() >= self._turn_s, False
        for source, (is_awaited, short) in tuple(self._sources.items()):
            is_source_awaited = is_awaited()
            is_any_awaited |= is_source_awaited
            work = source() if is_idle or is_source_awaited else short() if is_turn else None
            if work is not None:
                self._sources[source] = self._sources.pop(source)
                self._turn_s = loop.time() + TURN_S
                self._begin(work)
                return
        if not is_idle and self._sources and self._alarm is None:
            wait_s = LOOK_AGAIN_S if is_any_awaited else max(LOOK_AGAIN_S, self._turn_s - loop.time())
            self._alarm = loop.call_later(wait_s, self._look_again)

    def _look_again(self) -> None:
        self._alarm = None
        self.wake()

    def _begin(self, work: IdleWork) -> None:
        def done(result: object) -> None:
            self._works = False
            work.done(result)
            self.wake()

        self._works = True
        self._engine_thread.begin(work.function, done)


def _no_work() -> IdleWork | None:
    return None
