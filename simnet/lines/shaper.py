"""The thread that moves bytes along emulated lines, in order of time.

One thread, one selector, waits exact to a tenth of a millisecond. Python lets one thread of a process run at a time, so
what is measured belongs in another process than this thread (`python -m molink.simnet.lines.shaping`).
"""

import contextlib
import heapq
import itertools
import math
import queue
import select
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self, TypeVar

from molink.simnet.lines.line import Line
from molink.simnet.lines.transit import Chunk, Flow, Transit

Result = TypeVar("Result")

CALL_TIMEOUT_S = 5.0
MOST_WAIT_S = 60.0
MAX_SELECT_FILENO = 1023


class Shaper:
    """The thread, between `__enter__` and `__exit__`. Everything but `call` is to be used on the thread itself."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="shaper", daemon=True)
        self._running = False
        self._numbers = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._transit = Transit()
        self._at_exit: dict[Callable[[], None], None] = {}

    def __enter__(self) -> Self:
        for sock in (self._waker, self._woken):
            sock.setblocking(False)
        self._running = True
        self.watch(self._woken, selectors.EVENT_READ, self._on_woken)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(self._stop)
        self._thread.join(CALL_TIMEOUT_S)
        self._selector.close()
        self._waker.close()
        self._woken.close()

    def call(self, function: Callable[[], Result]) -> Result:
        """Runs the function on the thread, waits for what it returns or raises. TimeoutError after 5 s."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
                future.set_exception(error)

        self._calls.put(run)
        with contextlib.suppress(BlockingIOError):  # Enough wakings wait already.
            self._waker.send(b"\0")
        return future.result(CALL_TIMEOUT_S)

    def at(self, when_s: float, function: Callable[[], None]) -> None:
        """Runs the function at a time on `now_s`'s clock."""
        heapq.heappush(self._timers, (when_s, next(self._numbers), function))

    def after(self, delay_s: float, function: Callable[[], None]) -> None:
        self.at(self.now_s() + delay_s, function)

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Calls `ready` with the events whenever there are any; no events: no more."""
        known = self._selector.get_map().get(sock)
        if not events:
            if known is not None:
                self._selector.unregister(sock)
        elif known is None:
            self._selector.register(sock, events, ready)
        elif known.events != events or known.data != ready:
            self._selector.modify(sock, events, ready)

    def at_exit(self, function: Callable[[], None]) -> None:
        """Runs the function when the thread ends, unless forgotten before."""
        self._at_exit[function] = None

    def forget_exit(self, function: Callable[[], None]) -> None:
        self._at_exit.pop(function, None)

    def offer(self, flow: Flow, data: bytes) -> None:
        """Bytes that were just read come to the first line of their flow."""
        self._transit.offer(flow, data, self.now_s())

    def wait_for_room(self, flow: Flow) -> bool:
        """True if a line of the flow is full: then the flow's `update` is called when there is room."""
        return self._transit.wait_for_room(flow)

    def set_rate(self, line: "Line[Chunk]", rate_mbps: float) -> None:
        """Another rate of a line from now on."""
        now_s = self.now_s()
        self._advance(now_s)
        line.set_rate(rate_mbps, now_s)

    @staticmethod
    def now_s() -> float:
        """Seconds on the monotonic clock; Linux has one for all processes."""
        return time.monotonic()

    def _run(self) -> None:
        while self._running:
            self._advance(self.now_s())
            for key, events in self._wait(self._next_s() - self.now_s()):
                if self._selector.get_map().get(key.fileobj) is not None:  # Not closed by the one before it.
                    key.data(events)
            while not self._calls.empty():
                self._calls.get_nowait()()

    def _stop(self) -> None:
        for function in tuple(self._at_exit):
            function()
        self._running = False

    def _on_woken(self, _: int) -> None:
        self._woken.recv(4096)

    def _wait(self, wait_s: float) -> list[tuple[selectors.SelectorKey, int]]:
        """The sockets that are ready. epoll waits whole milliseconds; `select` on its descriptor waits microseconds."""
        wait_s = max(0.0, min(wait_s, MOST_WAIT_S))
        fileno = self._selector.fileno() if hasattr(self._selector, "fileno") else None
        if fileno is None or fileno > MAX_SELECT_FILENO:
            return self._selector.select(wait_s)
        select.select([fileno], [], [], wait_s)
        return self._selector.select(0)

    def _next_s(self) -> float:
        """When there is something to do even if no socket becomes ready."""
        return min(self._timers[0][0] if self._timers else math.inf, self._transit.next_s())

    def _advance(self, now_s: float) -> None:
        """All that happened on the lines until now, in order; then the timers that are due."""
        self._transit.advance(now_s)
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()
        self._transit.update_roomy()
