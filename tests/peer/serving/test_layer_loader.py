"""Loads end with their threads: nobody who gives up waiting ends one, no two go on at once, and however one ends,
nothing stays promised that nobody loads."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until
from support.swarms.lease_books import SPEC, book
from support.swarms.served_peer import PATIENT

from molink.peer.compute.backend import Backend, StageEngine
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.models.model import Progress
from molink.peer.serving.layer_loader import LayerLoader, LeasedCompute
from molink.peer.serving.timeouts import ServingTimeouts
from molink.shards.errors import LoadAbandoned
from molink.shards.spec import Span

LOW, HIGH = Span(0, 3), Span(3, 6)


class SlowDisk:
    """A Backend whose loads say how far they are, and then wait, until `goes_on`; with a `problem` they fail."""

    def __init__(self, problem: Exception | None = None) -> None:
        nothing_left = SimpleNamespace(
            limit_kv=lambda _: True, record_next=lambda: False, pack_next=lambda: False
        )
        self.engine = cast("StageEngine", nothing_left)
        self.problem = problem
        self.begun, self.running, self.most_at_once = 0, 0, 0
        self.told = threading.Event()
        """Whether it says how far it is again and again while it waits."""
        self.goes_on = threading.Event()

    def load(self, _: Span, progress: Progress) -> Callable[[], None]:
        self.begun += 1
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            for _ in range(int(DEADLINE_S / 0.01)):
                if self.told.is_set():
                    progress(1, 2)
                if self.goes_on.wait(0.01):
                    break
            if self.problem is not None:
                raise self.problem
        finally:
            self.running -= 1
        return lambda: None


class Loading:
    """A loader on that disk, and what it promises."""

    def __init__(self, disk: SlowDisk, thread: EngineThread, timeouts: ServingTimeouts) -> None:
        self.leases = book()
        compute = LeasedCompute(SPEC, self.leases, cast("Backend", disk), thread, lambda: None, timeouts)
        self.loader = LayerLoader(compute)

    def begin(self, span: Span) -> "asyncio.Task[None]":
        """Somebody who has the span loaded."""
        self.leases.preload(span, 0.0)
        return asyncio.create_task(self.loader.load(span))


@asynccontextmanager
async def loading(disk: SlowDisk, timeouts: ServingTimeouts = PATIENT) -> AsyncIterator[Loading]:
    async with EngineThread() as thread:
        made = Loading(disk, thread, timeouts)
        try:
            yield made
        finally:
            disk.told.set()
            await made.loader.close()


@asynchronous
async def test_a_load_goes_on_for_whoever_comes_next_when_the_first_to_wait_gives_up() -> None:
    disk = SlowDisk()
    async with loading(disk) as made:
        first = made.begin(LOW)
        await until(lambda: disk.running == 1)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        made.loader.forget_promises()  # as when every session is handed back
        assert made.leases.loading == (LOW,)  # the thread takes that memory
        second, other = made.begin(LOW), made.begin(HIGH)
        await asyncio.sleep(0)
        disk.goes_on.set()
        await soon(asyncio.gather(second, other))
        assert made.leases.held == (SPEC.whole,)
        assert (disk.begun, disk.most_at_once) == (2, 1)


@pytest.mark.parametrize("problem", [KeyError("model.norm.weight"), OSError("the disk is gone")])
@asynchronous
async def test_nothing_stays_promised_of_a_load_that_ends_as_nobody_has_foreseen(problem: Exception) -> None:
    disk = SlowDisk(problem)
    disk.goes_on.set()
    async with loading(disk) as made:
        free_bytes = made.leases.free_weight_bytes
        with pytest.raises(type(problem)):
            await soon(made.begin(LOW))
        assert (made.leases.loading, made.loader.loads) == ((), False)
        assert made.leases.free_weight_bytes == free_bytes
        disk.problem = None
        await soon(made.begin(LOW))
        assert made.leases.held == (LOW,)


@asynchronous
async def test_layers_that_nobody_wants_any_more_are_loaded_no_further_and_can_be_wanted_again() -> None:
    disk = SlowDisk()
    async with loading(disk) as made:
        running, waiting = made.begin(LOW), made.begin(HIGH)
        await until(lambda: disk.running == 1)
        disk.told.set()
        made.loader.abandon()
        for one in await soon(asyncio.gather(running, waiting, return_exceptions=True)):
            assert isinstance(one, LoadAbandoned)
        assert (disk.begun, disk.running, made.leases.loading) == (1, 0, ())
        disk.goes_on.set()
        await soon(made.begin(LOW))
        assert made.leases.held == (LOW,)


@asynchronous
async def test_a_loader_closes_when_its_thread_has_ended() -> None:
    disk = SlowDisk()
    disk.told.set()
    async with loading(disk) as made:
        waiting = made.begin(LOW)
        await until(lambda: disk.running == 1)
        await soon(made.loader.close())
        assert (disk.running, made.loader.loads, made.leases.loading) == (0, False, ())
        await asyncio.gather(waiting, return_exceptions=True)


@asynchronous
async def test_a_thread_that_does_not_end_is_left_alone_with_its_memory_booked() -> None:
    disk = SlowDisk()
    async with loading(disk, replace(PATIENT, load_ends_s=0.01)) as made:
        made.begin(LOW).add_done_callback(lambda _: None)
        await until(lambda: disk.running == 1)
        await soon(made.loader.close())
        assert (made.loader.loads, made.leases.loading) == (True, (LOW,))
        disk.goes_on.set()
        await until(lambda: not made.loader.loads)
