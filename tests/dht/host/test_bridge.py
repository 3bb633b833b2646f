"""Trio beside asyncio: calls, cancellation, failures and endings go both ways, and nothing is left behind."""

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator

import pytest
import trio
import trio.lowlevel

from molink.dht.host.bridge import ThreadStoppedError, TrioThread


class Service:
    """Something that lives in trio."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.closed = threading.Event()
        self.broken = trio.Event()

    async def add(self, one: int, other: int) -> int:
        await trio.lowlevel.checkpoint()
        return one + other

    async def fail(self) -> None:
        await trio.lowlevel.checkpoint()
        raise LookupError("not here")

    async def hang(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            self.cancelled.set()


@contextlib.asynccontextmanager
async def open_service() -> AsyncIterator[Service]:
    service = Service()
    try:
        yield service
    finally:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        service.closed.set()


@contextlib.asynccontextmanager
async def every_error_is_fetched() -> AsyncIterator[None]:
    """Fails if the block leaves an error behind that nobody has fetched, which asyncio tells the loop's handler."""
    unfetched: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unfetched.append(context))
    yield
    await asyncio.sleep(0)  # what the thread has sent before it ended arrives
    gc.collect()
    assert unfetched == []


def test_calls_return_what_trio_returns_or_raises() -> None:
    async def scenario() -> None:
        async with TrioThread(open_service, name="test-trio") as thread:
            service = thread.service
            assert await thread.call(lambda: service.add(1, 2), timeout_s=120) == 3
            with pytest.raises(LookupError, match="not here"):
                await thread.call(service.fail, timeout_s=120)
            assert await asyncio.gather(
                *(thread.call(lambda n=n: service.add(n, n), timeout_s=120) for n in range(50))
            ) == [2 * n for n in range(50)]
        assert service.closed.is_set()
        assert not thread.is_alive
        with pytest.raises(ThreadStoppedError):
            await thread.call(lambda: service.add(1, 2), timeout_s=120)

    asyncio.run(scenario())


def test_a_call_past_its_deadline_is_cancelled_in_trio() -> None:
    async def scenario() -> None:
        async with TrioThread(open_service, name="test-trio") as thread:
            with pytest.raises(TimeoutError):
                await thread.call(thread.service.hang, timeout_s=0.05)
            assert await asyncio.to_thread(thread.service.cancelled.wait, 30)

    asyncio.run(scenario())


def test_a_call_cancelled_in_asyncio_is_cancelled_in_trio() -> None:
    async def scenario() -> None:
        async with TrioThread(open_service, name="test-trio") as thread:
            call = asyncio.create_task(thread.call(thread.service.hang, timeout_s=60))
            await thread.call(lambda: thread.service.add(1, 1), timeout_s=120)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await asyncio.to_thread(thread.service.cancelled.wait, 30)

    asyncio.run(scenario())


def test_a_call_given_up_before_the_thread_ends_leaves_no_error_behind() -> None:
    async def scenario() -> None:
        async with every_error_is_fetched(), TrioThread(open_service, name="test-trio") as thread:
            call = asyncio.create_task(thread.call(thread.service.hang, timeout_s=60))
            await thread.call(lambda: thread.service.add(1, 1), timeout_s=120)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(scenario())


def test_calls_under_way_when_the_thread_ends_are_told() -> None:
    async def scenario() -> None:
        async with TrioThread(open_service, name="test-trio") as thread:
            call = asyncio.create_task(thread.call(thread.service.hang, timeout_s=60))
            await thread.call(lambda: thread.service.add(1, 1), timeout_s=120)
        with pytest.raises(ThreadStoppedError):
            await call

    asyncio.run(scenario())


def test_a_start_that_fails_says_why_and_leaves_no_thread() -> None:
    @contextlib.asynccontextmanager
    async def open_broken() -> AsyncIterator[Service]:
        async with trio.open_nursery():
            raise PermissionError("no port for you")
        yield Service()

    async def scenario() -> None:
        thread = TrioThread(open_broken, name="test-trio")
        with pytest.raises(PermissionError, match="no port"):
            async with thread:
                pytest.fail("it must not start")
        assert not thread.is_alive

    asyncio.run(scenario())


def test_a_start_that_is_given_up_ends() -> None:
    @contextlib.asynccontextmanager
    async def open_slowly() -> AsyncIterator[Service]:
        await trio.sleep_forever()
        yield Service()

    async def scenario() -> None:
        thread = TrioThread(open_slowly, name="test-trio")
        async with every_error_is_fetched():
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await thread.__aenter__()
            assert not thread.is_alive

    asyncio.run(scenario())


def test_a_service_that_dies_ends_its_thread_and_its_calls() -> None:
    @contextlib.asynccontextmanager
    async def open_mortal() -> AsyncIterator[Service]:
        service = Service()

        async def die() -> None:
            await service.broken.wait()
            raise LookupError("died")

        async with trio.open_nursery() as nursery:
            nursery.start_soon(die)
            yield service

    async def scenario() -> None:
        async with TrioThread(open_mortal, name="test-trio") as thread:
            call = asyncio.create_task(thread.call(thread.service.hang, timeout_s=60))

            async def break_it() -> None:
                thread.service.broken.set()

            with contextlib.suppress(ThreadStoppedError):
                await thread.call(break_it, timeout_s=120)
            with pytest.raises(ThreadStoppedError):
                await call
        assert isinstance(thread.failure, BaseExceptionGroup)
        assert not thread.is_alive

    asyncio.run(scenario())


def test_cycles_leave_no_threads() -> None:
    async def scenario() -> None:
        for _ in range(20):
            async with TrioThread(open_service, name="test-trio") as thread:
                await thread.call(lambda: thread.service.add(1, 1), timeout_s=120)
        assert "test-trio" not in [thread.name for thread in threading.enumerate()]

    asyncio.run(scenario())
