"""Bridge between asyncio and trio: a thread that runs trio, calls into it from the asyncio thread, and back."""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Generic, TypeVar

import trio

Service = TypeVar("Service")
Result = TypeVar("Result")

STOP_TIMEOUT_S = 15.0


class ThreadStoppedError(ConnectionError):
    """The trio thread has ended, or ended while the call was under way."""


class TrioThread(Generic[Service]):
    """`async with TrioThread(open_service) as thread` runs a service in a trio thread of its own.

    The thread lives as long as the block. What the service raises while it starts comes out of `__aenter__`.
    A call that the asyncio side cancels is cancelled in trio; calls under way when the thread ends get
    ThreadStoppedError.
    """

    def __init__(
        self, open_service: Callable[[], AbstractAsyncContextManager[Service]], *, name: str
    ) -> None:
        self._open_service = open_service
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started: concurrent.futures.Future[Service] = _running()
        self._ended: concurrent.futures.Future[None] = _running()
        self._token: trio.lowlevel.TrioToken | None = None
        self._nursery: trio.Nursery | None = None
        self._stopping: trio.Event | None = None
        self._stop_asked = False
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the thread, if it was not asked to end."""
        return self._failure

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    async def __aenter__(self) -> "TrioThread[Service]":
        self._thread.start()
        try:
            await asyncio.wrap_future(self._started)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._stop()

    @property
    def service(self) -> Service:
        """Service that its context manager gave. Its methods may be called in the trio thread only."""
        return self._started.result(timeout=0)

    async def call(self, function: Callable[[], Awaitable[Result]], *, timeout_s: float) -> Result:
        """Runs `function` in trio and waits for what it returns.

        Raises:
            TimeoutError: it took longer than `timeout_s`, and was cancelled.
            ThreadStoppedError: the thread has ended.
        """
        outcome: concurrent.futures.Future[Result] = _running()
        scope = trio.CancelScope()
        self._in_trio(lambda: self._spawn(function, outcome, scope, timeout_s), outcome)
        try:
            return await asyncio.wrap_future(outcome)
        except asyncio.CancelledError:
            self._in_trio(scope.cancel, None)
            raise

    def _spawn(
        self,
        function: Callable[[], Awaitable[Result]],
        outcome: "concurrent.futures.Future[Result]",
        scope: trio.CancelScope,
        timeout_s: float,
    ) -> None:
        if self._nursery is None or self._nursery.cancel_scope.cancel_called:
            _settle(outcome, ThreadStoppedError("the network thread is stopping"))
        else:
            self._nursery.start_soon(self._call, function, outcome, scope, timeout_s)

    async def _call(
        self,
        function: Callable[[], Awaitable[Result]],
        outcome: "concurrent.futures.Future[Result]",
        scope: trio.CancelScope,
        timeout_s: float,
    ) -> None:
        error: BaseException = ThreadStoppedError("the network thread stopped during the call")
        try:
            with scope, trio.fail_after(timeout_s):
                result = await function()
                if not outcome.done():
                    outcome.set_result(result)
        except trio.TooSlowError:
            error = TimeoutError(f"the network took longer than {timeout_s:g} s")
        except Exception as raised:  # noqa: BLE001 a call's failure belongs to its caller, not to the thread
            error = raised
        finally:
            _settle(outcome, error)

    def _in_trio(
        self, function: Callable[[], object], outcome: "concurrent.futures.Future[Result] | None"
    ) -> None:
        try:
            if self._token is None:
                raise trio.RunFinishedError
            self._token.run_sync_soon(function)
        except trio.RunFinishedError:
            if outcome is not None:
                outcome.set_exception(ThreadStoppedError("the network thread is not running"))

    async def _stop(self) -> None:
        self._stop_asked = True
        if self._stopping is not None:
            self._in_trio(self._stopping.set, None)
        await asyncio.wait_for(asyncio.wrap_future(self._ended), STOP_TIMEOUT_S)
        self._thread.join(timeout=STOP_TIMEOUT_S)

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:  # noqa: BLE001 the thread's boundary: who waits gets the failure
            self._failure = error
            if not self._started.done():
                self._started.set_exception(_plain(error))
        finally:
            self._token = None
            _settle(self._started, ThreadStoppedError("the network thread was stopped while it started"))
            self._ended.set_result(None)

    async def _main(self) -> None:
        self._stopping = trio.Event()
        self._token = trio.lowlevel.current_trio_token()
        if self._stop_asked:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stop_when_asked, nursery.cancel_scope)
            async with self._open_service() as service, _calls() as calls:
                self._nursery = calls
                self._started.set_result(service)
                await self._stopping.wait()
                calls.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    async def _stop_when_asked(self, scope: trio.CancelScope) -> None:
        """A start given up is cancelled; a service that runs is left to close by itself, in limited time."""
        if self._stopping is not None:
            await self._stopping.wait()
        if self._started.done():
            await trio.sleep(STOP_TIMEOUT_S / 2)
        scope.cancel()


@contextlib.asynccontextmanager
async def _calls() -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        yield nursery


def _running() -> "concurrent.futures.Future[Result]":
    """A future that only the trio thread settles: who gives up waiting for it cancels nothing but the wait.

    Not asyncio.shield: once its waiter is gone, an error would stay in a future that nobody asks, and asyncio
    reports such errors to the loop's exception handler.
    """
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()
    return outcome


def _settle(outcome: "concurrent.futures.Future[Result]", error: BaseException) -> None:
    if not outcome.done():
        outcome.set_exception(error)


def _plain(error: BaseException) -> BaseException:
    """Nurseries wrap what goes wrong in groups; the caller wants the one error inside."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


async def ask_asyncio(
    loop: asyncio.AbstractEventLoop, work: Coroutine[object, object, Result], *, timeout_s: float
) -> Result | None:
    """What `work` returns, which runs on an asyncio loop of another thread; called in trio. None: the loop is closing,
    or it takes longer than `timeout_s`, and is cancelled then."""
    token, ended = trio.lowlevel.current_trio_token(), trio.Event()
    try:
        outcome = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:  # nobody runs it any more
        work.close()
        return None

    def tell(_: "concurrent.futures.Future[Result]") -> None:
        with contextlib.suppress(trio.RunFinishedError):
            token.run_sync_soon(ended.set)

    outcome.add_done_callback(tell)
    try:
        with trio.move_on_after(timeout_s):
            await ended.wait()
        return outcome.result() if outcome.done() and not outcome.cancelled() else None
    finally:
        outcome.cancel()
