"""The gateway's database: SQLite in a file, or PostgreSQL. Every transaction has a deadline and one kind of failure."""

import asyncio
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

from sqlalchemy import URL, ColumnElement, Float, Table, event, func, literal, make_url
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from molink.client.gateway.accounts.errors import (
    AccountsUnavailable,
    DatabaseUnusable,
    InvalidDatabaseUrl,
    OutcomeUnknown,
)
from molink.client.gateway.accounts.migrations.migrating import LATEST, migrate

FILE_NAME: Final = "gateway.db"
ANSWERS_WITHIN_S: Final = 3.0
OPENS_WITHIN_S: Final = 30.0
TRIES_AGAIN_S: Final = 0.02
_BUSY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
CONNECTIONS: Final = 4
"""To PostgreSQL."""
_DRIVERS: Final = {
    "postgresql": "postgresql+asyncpg",
    "postgres": "postgresql+asyncpg",
    "postgresql+asyncpg": "postgresql+asyncpg",
    "sqlite": "sqlite+aiosqlite",
    "sqlite+aiosqlite": "sqlite+aiosqlite",
}
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Database:
    """Database: transactions, and what differs between PostgreSQL and SQLite."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        own = _driver_failures(engine)
        self._failures: tuple[type[Exception], ...] = (SQLAlchemyError, OSError, TimeoutError, *own)

    @property
    def is_postgresql(self) -> bool:
        return self._engine.dialect.name == "postgresql"

    @asynccontextmanager
    async def transaction(self, within_s: float = ANSWERS_WITHIN_S) -> AsyncIterator[AsyncConnection]:
        """A transaction that is committed at the end. SQLite has one at a time, of all processes.

        Who is cancelled in it does not know whether it was committed, and whoever must runs all of it `to_its_end`.

        Raises:
            AccountsUnavailable: the database cannot be reached, or not in time; nothing is committed.
            OutcomeUnknown: it was told to commit and did not answer.
        """
        is_committing = False
        try:
            async with asyncio.timeout(within_s) as deadline, self._engine.connect() as connection:
                async with connection.begin():
                    yield connection
                    is_committing = True
                deadline.reschedule(None)  # it is committed, however long the connection takes to go back
        except self._failures as error:
            is_known = not is_committing or _is_answer(error)
            raise (AccountsUnavailable if is_known else OutcomeUnknown)(_reason(error)) from error

    def now_s(self) -> ColumnElement[float]:
        """Returns the time as an expression: PostgreSQL's own, since gateways' clocks differ; else this machine's."""
        if self.is_postgresql:
            return func.extract("epoch", func.clock_timestamp()).cast(Float(53))
        return literal(time.time())

    def insert(self, table: Table) -> "postgresql.Insert | sqlite.Insert":
        """Returns an INSERT that can say what happens where there is such a row."""
        return postgresql.insert(table) if self.is_postgresql else sqlite.insert(table)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Returns what the work comes to. Who is cancelled meanwhile waits for its end, which it has to have, and is
    cancelled then."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from (None if task.cancelled() else task.exception())
    return task.result()


@asynccontextmanager
async def opened_database(
    url: str | None, folder: Path, revision: str = LATEST, *, makes: bool = True
) -> AsyncIterator[Database]:
    """Opens the database and brings it to a revision.

    Args:
        url: of PostgreSQL or SQLite; None: the file in the folder, which is made.
        folder: state directory of the gateway.
        revision: the newest one, unless told.
        makes: whether a file in the folder is made where there is none.

    Raises:
        DatabaseUnusable: it cannot be reached, is newer than this program, or is none.
    """
    if url is None and not makes and not (folder / FILE_NAME).is_file():
        raise DatabaseUnusable(
            f"{folder} holds no gateway's state: check --state-dir, name the database with --database, or make a first "
            "key with `molink-gateway keys create NAME`"
        )
    where = _checked_url(url, folder)
    if where.get_backend_name() == "sqlite":
        await asyncio.to_thread(_prepare_file, where)
    await _bring_to(where, revision)
    engine = _engine_for(where, ANSWERS_WITHIN_S)
    try:
        yield Database(engine)
    finally:
        await engine.dispose()


async def _bring_to(where: URL, revision: str) -> None:
    """Over a connection of its own: it waits longer for others that start at the same time than a request may."""
    engine = _engine_for(where, OPENS_WITHIN_S)
    try:
        async with Database(engine).transaction(OPENS_WITHIN_S) as connection:
            await connection.run_sync(migrate, revision)
    except AccountsUnavailable as error:
        raise _unusable(where, str(error)) from error
    finally:
        await engine.dispose()


def _checked_url(url: str | None, folder: Path) -> URL:
    if url is None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (folder / FILE_NAME).touch(mode=0o600)
        except OSError as error:
            raise DatabaseUnusable(
                f"the state directory {folder} cannot be used ({error.strerror or error}): choose another one with "
                "--state-dir, or name a database with --database"
            ) from error
        return URL.create("sqlite+aiosqlite", database=str(folder / FILE_NAME))
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        parsed = None
    if parsed is None or parsed.drivername not in _DRIVERS or not parsed.database:
        raise InvalidDatabaseUrl(
            "--database takes postgresql://USER:PASSWORD@HOST/NAME or sqlite:///PATH: write it so, or leave it out for "
            "a file in the state directory"
        )
    return parsed.set(drivername=_DRIVERS[parsed.drivername])


def _prepare_file(url: URL) -> None:
    """Opens SQLite's file once, so that a failure is said here: aiosqlite leaves a thread that writes to stderr.

    It stays in WAL mode, in which readers do not wait for writers. Two that change the mode at once do not wait for
    each other as they do for a transaction: one of them is told that the file is locked, and tries again.
    """
    until_s = time.monotonic() + OPENS_WITHIN_S
    while True:
        try:
            with closing(sqlite3.connect(url.database or "", timeout=OPENS_WITHIN_S)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.Error as error:
            is_busy = getattr(error, "sqlite_errorcode", None) in _BUSY
            if not is_busy or time.monotonic() > until_s:
                raise _unusable(url, str(error)) from error
            time.sleep(TRIES_AGAIN_S)


def _unusable(url: URL, reason: str) -> DatabaseUnusable:
    shown = url.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)
    return DatabaseUnusable(
        f"the database {shown} cannot be used ({reason}): start it or mend it, or name another with --database"
    )


def _engine_for(url: URL, waits_s: float) -> AsyncEngine:
    """Returns an engine whose transactions wait so long for others' on SQLite."""
    common: dict[str, Any] = {"max_overflow": 0, "hide_parameters": True}
    if url.get_backend_name() == "postgresql":
        connect = {"timeout": ANSWERS_WITHIN_S, "command_timeout": OPENS_WITHIN_S}
        return create_async_engine(
            url, pool_size=CONNECTIONS, pool_pre_ping=True, connect_args=connect, **common
        )
    # SQLite has one transaction at a time. Who waits for a connection has it in turn; who waits for the file, by luck.
    engine = create_async_engine(url, pool_size=1, **common)
    event.listen(engine.sync_engine, "connect", partial(_prepare_sqlite, waits_s=waits_s))
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    event.listen(engine.sync_engine, "invalidate", _end_sqlite)
    return engine


def _prepare_sqlite(connection: Any, _record: object, waits_s: float) -> None:  # noqa: ANN401 - SQLAlchemy's adapter
    """Writers wait for each other. Transactions are begun below, tables' too."""
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in (f"busy_timeout = {round(1000 * waits_s)}", "synchronous = NORMAL"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Any) -> None:  # noqa: ANN401 - SQLAlchemy's connection
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _end_sqlite(connection: Any, _record: object, error: BaseException | None) -> None:  # noqa: ANN401 - as above
    """Ends a connection in whose statement somebody was cancelled; SQLAlchemy gives it up after this.

    It would close it, which is not enough: SQLite keeps a closed connection's transaction, and so the file locked, for
    as long as Python has a statement of it that was not read to its end, as tracebacks have. Who is cancelled again
    meanwhile waits all the same; SQLAlchemy would leave a task behind that never ends.
    """
    if isinstance(error, asyncio.CancelledError):
        with suppress(asyncio.CancelledError):  # the first one is under way already
            connection.run_async(lambda driver: to_its_end(_rolled_back_and_closed(driver)))


async def _rolled_back_and_closed(driver: Any) -> None:  # noqa: ANN401 - aiosqlite's connection, maybe not installed
    """Once the statement has ended that its thread is at: no longer than SQLite waits for others."""
    try:
        await driver.rollback()
    except (sqlite3.Error, ValueError) as error:  # aiosqlite's ValueError: it is closed
        _log.info("a transaction that was cancelled could not be rolled back: %s", error)
    finally:
        await driver.close()


def _driver_failures(engine: AsyncEngine) -> tuple[type[Exception], ...]:
    """What a driver raises on its own: SQLAlchemy does not wrap what happens while a connection is made."""
    if engine.dialect.name != "postgresql":
        return (sqlite3.Error,)
    import asyncpg

    return (asyncpg.PostgresError, asyncpg.InterfaceError)


def _is_answer(error: Exception) -> bool:
    """Whether the database itself has refused, so that nothing is committed; else the connection failed, or time ran
    out."""
    return isinstance(error, DBAPIError) and not error.connection_invalidated


def _reason(error: BaseException) -> str:
    """What is wrong, in a few words without statements."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause).splitlines()[0].rpartition(">: ")[2] if str(cause) else type(cause).__name__
