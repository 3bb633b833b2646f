"""The thread that owns the device: work goes in from the event loop, results come back to it."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

STOP_TIMEOUT_S = 30.0
LET_BEGIN_S = 0.001
"""Ten times what waking a thread takes."""
QUICK_MS = 100.0
"""What is not said to take longer takes no longer: a cache is made, a portion of a copy is read."""

ExpectedMs = Callable[[], float | None]
"""Says how many milliseconds a piece of work should take; None: nobody knows."""
P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """One thread, one piece of work at a time, in the order given. Open between `__aenter__` and `__aexit__`.

    Leaner than an executor, whose futures cost two more turns of the loop: this is on the way of every token.
    """

    def __init__(self) -> None:
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[tuple[Callable[[], None], ExpectedMs] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._waiting = False
        """Whether `begin` has given work that nobody has waited for."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._present: tuple[float, ExpectedMs] | None = None
        """Since when it has been at its present work, by `time.monotonic`, and what that should take."""
        self._outstanding = 0
        self._on_idle: Callable[[], None] = _nothing

    @property
    def busy_s(self) -> float:
        """Seconds for which it has been at its present piece of work; 0 while it has none."""
        present = self._present
        return 0.0 if present is None else time.monotonic() - present[0]

    @property
    def expected_ms(self) -> float | None:
        """Milliseconds that its present piece of work should take; None if it has none, or nobody knows."""
        present = self._present
        return None if present is None else present[1]()

    @property
    def is_idle(self) -> bool:
        """Whether it has no work, and all that it has done is known on the loop."""
        return not self._outstanding

    def tell_idle(self, on_idle: Callable[[], None]) -> None:
        """Calls `on_idle` on the loop whenever the last work has ended and was followed by none."""
        self._on_idle = on_idle

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits for the work that has begun; what has not is dropped."""
        self._loop = None
        self._work.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)

    def begin(
        self,
        function: Callable[[], T],
        done: Callable[[T | Exception], None],
        expected_ms: ExpectedMs = lambda: QUICK_MS,
    ) -> None:
        """Runs `function` on the thread, and then `done` on the loop with its result or error. `expected_ms` may be
        asked on the loop while it runs."""
        loop = self._loop
        if loop is None:
            raise RuntimeError("the engine's thread is not running")

        def work() -> None:
            result: T | Exception
            try:
                result = function()
            except Exception as error:  # noqa: BLE001 - the thread's boundary: the error belongs to who asked
                result = error
            self._present = None  # before the loop hears of the end: who is idle is not busy
            if self._loop is not None:
                loop.call_soon_threadsafe(ended, result)

        def ended(result: T | Exception) -> None:
            self._outstanding -= 1
            done(result)
            if not self._outstanding:
                self._on_idle()

        while not self._begun.empty():
            self._begun.get_nowait()
        self._waiting = True
        self._outstanding += 1
        self._work.put((work, expected_ms))

    def let_begin(self) -> None:
        """Holds up the loop until the thread has taken up what `begin` gave it last, at most LET_BEGIN_S.

        For where the loop has more to do that can wait: the two threads share the interpreter, and the loop would keep
        it for as long as it is busy, while the device idles.
        """
        if self._waiting:
            self._waiting = False
            with contextlib.suppress(queue.Empty):
                self._begun.get(timeout=LET_BEGIN_S)

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `function` on the thread, where it is quick. Raises what it raises."""
        return await self._call(lambda: function(*args, **kwargs), lambda: QUICK_MS)

    async def call_long(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `call`, of what may take any time."""
        return await self._call(lambda: function(*args, **kwargs), lambda: None)

    async def _call(self, function: Callable[[], T], expected_ms: ExpectedMs) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def done(result: T | Exception) -> None:
            if answer.done():
                return
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self.begin(function, done, expected_ms)
        return await answer

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            work, expected_ms = given
            self._begun.put(None)
            if self._loop is not None:
                self._present = time.monotonic(), expected_ms
                work()


def _nothing() -> None:
    return None
