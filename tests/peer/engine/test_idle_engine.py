"""Work that nobody waits for is done while the engine has none; work that somebody waits for also between two steps."""

import asyncio
import threading
from itertools import pairwise

import pytest
from support.links.data_plane import asynchronous, until

from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.idle_engine import TURN_S, IdleEngine, IdleWork


class Steps:
    """An engine that is never idle: each step is followed by the next at once."""

    def __init__(self, thread: EngineThread) -> None:
        self.thread = thread
        self.count = 0
        self.ends = False

    def go_on(self, _: object = None) -> None:
        self.count += 1
        if not self.ends:
            self.thread.begin(lambda: None, self.go_on)


@pytest.mark.parametrize("awaited", [False, True])
@asynchronous
async def test_an_engine_that_is_never_idle_does_what_is_awaited_alone(awaited: bool) -> None:
    async with EngineThread() as thread:
        idle, steps = IdleEngine(thread), Steps(thread)
        done: list[int] = []
        left = [3]

        def next_work() -> IdleWork | None:
            if not left[0]:
                return None
            left[0] -= 1
            return IdleWork(lambda: steps.count, done.append)

        steps.go_on()
        idle.add_source(next_work, lambda: awaited)
        idle.wake()
        if awaited:
            await until(lambda: len(done) == 3)
        else:
            await until(lambda: steps.count > 200)
            assert done == []
        steps.ends = True
        await until(lambda: len(done) == 3)
        assert left == [0]


@asynchronous
async def test_what_is_awaited_is_looked_for_again_while_the_engine_is_busy() -> None:
    async with EngineThread() as thread:
        idle, steps = IdleEngine(thread), Steps(thread)
        ready: list[IdleWork] = []
        done: list[object] = []
        idle.add_source(lambda: ready.pop() if ready else None, lambda: True)
        steps.go_on()
        idle.wake()
        await until(lambda: steps.count > 50)
        ready.append(IdleWork(lambda: None, done.append))
        await until(lambda: bool(done))
        steps.ends = True
        await asyncio.sleep(0)


@asynchronous
async def test_an_engine_that_is_never_idle_does_what_is_short_now_and_then_and_nothing_that_is_long() -> (
    None
):
    async with EngineThread() as thread:
        idle, steps, loop = IdleEngine(thread), Steps(thread), asyncio.get_running_loop()
        done: list[object] = []
        asked: list[tuple[float, int]] = []

        def short() -> IdleWork:
            asked.append((loop.time(), steps.count))
            return IdleWork(lambda: None, done.append)

        def long() -> IdleWork | None:
            assert steps.ends, "the engine is busy"
            return None

        steps.go_on()
        idle.add_source(long, lambda: False, short)
        idle.wake()
        await until(lambda: len(done) == 3)
        for (before_s, steps_before), (after_s, steps_after) in pairwise(asked):
            assert after_s - before_s >= TURN_S
            assert steps_after > steps_before, "steps go on in between"
        steps.ends = True
        await until(lambda: thread.is_idle)


@asynchronous
async def test_the_engine_says_how_long_it_has_been_at_its_work_and_what_that_should_take() -> None:
    async with EngineThread() as thread:
        assert (thread.busy_s, thread.expected_ms) == (0.0, None)
        goes_on = threading.Event()
        ended: list[object] = []
        thread.begin(goes_on.wait, ended.append, lambda: 7.0)
        await until(lambda: thread.busy_s > 0)
        assert thread.expected_ms == 7.0
        loading = asyncio.create_task(thread.call_long(goes_on.wait))
        quick = asyncio.create_task(thread.call(goes_on.wait))
        goes_on.set()
        await asyncio.gather(loading, quick)
        await until(lambda: thread.is_idle)
        assert (thread.busy_s, thread.expected_ms, ended) == (0.0, None, [True])
