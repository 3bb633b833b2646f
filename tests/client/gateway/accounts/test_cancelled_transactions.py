"""Transactions whose users are cancelled at any moment: no lock is left, and what was committed is not done again."""

import asyncio
import sqlite3
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from itertools import count
from pathlib import Path
from types import coroutine
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope
from molink.client.gateway.accounts.database import Database, opened_database, to_its_end
from molink.client.gateway.accounts.errors import AccountsUnavailable, OutcomeUnknown
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.accounts.usage_ledger import UsageLedger
from molink.client.gateway.accounts.usage_store import UsageCounts, UsageDay, UsageStore

pytestmark = pytest.mark.anyio
NOW_S = 1795600000.0
DAY = UsageDay("2026-11-25", "", "m")
ONCE = UsageCounts(1, 2, 0, 3)


@coroutine
def cancelled_at(
    work: Coroutine[Any, Any, None], moment: int, times: int, *, answered: bool
) -> Generator[Any, Any, int]:
    """Does the work, cancelling its task at its wait of that number and at the next ones, so many times in all: as it
    begins to wait, or when what it waits for has come. Returns how often it waited if it was not cancelled."""
    task = asyncio.current_task()
    assert task is not None
    thrown: BaseException | None = None
    for waits in count(1):
        try:
            waited_for = work.send(None) if thrown is None else work.throw(thrown)
        except StopIteration:
            return waits - 1
        thrown = None
        if moment <= waits < moment + times:
            if answered and waited_for is not None:
                waited_for.add_done_callback(lambda _: task.cancel())
            else:
                task.cancel()
        try:
            yield waited_for
        except BaseException as error:  # noqa: BLE001 - it is the work's
            thrown = error
    raise AssertionError("it never ended")


async def written(database: Database) -> UsageCounts:
    lines = await UsageStore(database).of_days(1, NOW_S)
    total = UsageCounts()
    for line in lines:
        total = total.plus(line.counts)
    return total


async def read_and_write(database: Database) -> None:
    await written(database)
    await UsageStore(database).add({DAY: ONCE, UsageDay(DAY.day, "", "n"): ONCE})


@contextmanager
def at(moment: str, does: Callable[[], object]) -> Iterator[None]:
    """Does that whenever any database begins a transaction, or its commit."""

    def happens(_connection: object) -> None:
        does()

    event.listen(Engine, moment, happens)
    try:
        yield
    finally:
        event.remove(Engine, moment, happens)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("times", [1, 2, 3, 50])
async def test_whoever_is_cancelled_in_a_transaction_at_whatever_moment_keeps_nobody_from_writing(
    url: str, tmp_path: Path, times: int, answered: bool
) -> None:
    tasks: list[asyncio.Task[int]] = []
    """They are kept, with their tracebacks, as they may be for long in a program."""
    async with opened_database(url, tmp_path) as database, opened_database(url, tmp_path) as other:
        while not tasks or tasks[-1].cancelled():
            moment = len(tasks) + 1
            work = cancelled_at(read_and_write(database), moment, times, answered=answered)
            tasks.append(asyncio.create_task(work))
            await asyncio.gather(tasks[-1], return_exceptions=True)
            before = await written(other)
            await UsageStore(other).add({DAY: ONCE})
            # PostgreSQL may do a moment later what somebody was cancelled in as it was told to commit.
            assert (await written(database)).requests > before.requests
    assert len(tasks) > tasks[-1].result() > 10


@pytest.mark.parametrize("times", [1, 2, 3, 50])
async def test_whoever_is_cancelled_while_another_writes_does_not_lock_the_file_afterwards(
    tmp_path: Path, times: int
) -> None:
    path = tmp_path / "a.db"
    tasks: list[asyncio.Task[int]] = []
    async with opened_database(f"sqlite:///{path}", tmp_path) as database:
        for moment in range(1, 20):
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                work = cancelled_at(read_and_write(database), moment, times, answered=False)
                tasks.append(asyncio.create_task(work))
                for _ in range(100):
                    await asyncio.sleep(0)
                other.execute("COMMIT")
            await asyncio.gather(tasks[-1], return_exceptions=True)
            await UsageStore(database).add({DAY: ONCE})


async def test_whoever_is_cancelled_again_and_again_at_any_moment_waits_for_the_end_of_what_must_end() -> (
    None
):
    for moment in range(1, 12):
        ended = False

        async def work() -> None:
            nonlocal ended
            for _ in range(10):
                await asyncio.sleep(0)
            ended = True

        task = asyncio.create_task(cancelled_at(to_its_end(work()), 1, moment, answered=False))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended


@pytest.mark.parametrize("moment", ["begin", "commit"])
@pytest.mark.parametrize("nth", [1, 2])
async def test_usage_whose_writing_is_cancelled_is_counted_once(
    url: str, tmp_path: Path, moment: str, nth: int
) -> None:
    async with opened_database(url, tmp_path) as database:
        keys = KeyStore(database)
        key, _ = await keys.create("alice", scopes=frozenset({KeyScope.USE}), limits=KeyLimits())
        ledger = UsageLedger(UsageStore(database), keys)
        ledger.record(key.id, "m", ONCE, NOW_S)
        writing = asyncio.create_task(ledger.write())
        moments = count(1)
        cancelling = at(moment, lambda: writing.cancel() if next(moments) == nth else None)
        with cancelling, pytest.raises(asyncio.CancelledError):
            await writing
        await ledger.write()
        assert await written(database) == ONCE
        [used] = await keys.all()
        assert used.last_used_at_s == NOW_S


async def test_a_commit_without_an_answer_is_told_apart_from_one_that_is_refused(
    url: str, tmp_path: Path
) -> None:
    def fail(error: Exception) -> None:
        raise error

    full = OperationalError("COMMIT", None, sqlite3.OperationalError("database or disk is full"))
    async with opened_database(url, tmp_path) as database:
        for moment, error, known in (
            ("begin", TimeoutError(), True),
            ("commit", full, True),
            ("commit", TimeoutError(), False),
            ("commit", ConnectionResetError(), False),
        ):
            with at(moment, lambda error=error: fail(error)), pytest.raises(AccountsUnavailable) as failed:
                await UsageStore(database).add({DAY: ONCE})
            assert isinstance(failed.value, OutcomeUnknown) is not known
        assert await written(database) == UsageCounts()


class SilentStore(UsageStore):
    """It writes, and then does not say so."""

    async def add(self, counts: Mapping[UsageDay, UsageCounts]) -> None:
        await super().add(counts)
        raise OutcomeUnknown("it did not answer in time")


async def test_usage_that_may_have_been_written_is_not_written_again(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_database(url, tmp_path) as database:
        ledger = UsageLedger(SilentStore(database))
        ledger.record("", "m", ONCE, NOW_S)
        with pytest.raises(AccountsUnavailable):
            await ledger.write()
        await ledger.write()
        assert await written(database) == ONCE
    assert "usage of 1 requests may be lost" in caplog.text
