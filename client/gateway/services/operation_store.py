"""Operations in the database: begun, told how far they are, asked to be undone, ended; watched from any gateway."""

import secrets
import time
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import delete, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.schema import MESSAGE_LENGTH, OPERATIONS
from molink.client.gateway.services.service import (
    LongRunningOperation,
    OperationKind,
    OperationState,
    UnknownService,
)
from molink.commands import plain

REMEMBERED_S: Final = 7 * 86_400.0
"""An operation that has ended is remembered for so long."""
MOST_LISTED: Final = 200


class OperationStore:
    """Operations as the database has them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> tuple[LongRunningOperation, ...]:
        """Returns the latest, the newest first."""
        latest = select(OPERATIONS).order_by(OPERATIONS.c.created_at_s.desc(), OPERATIONS.c.id)
        async with self._database.transaction() as connection:
            rows = await connection.execute(latest.limit(MOST_LISTED))
            return tuple(_operation_of(row) for row in rows.mappings())

    async def running(self, *kinds: OperationKind) -> tuple[LongRunningOperation, ...]:
        """Returns those of these kinds that are under way, the oldest first."""
        state, kind = OPERATIONS.c.state == OperationState.RUNNING, OPERATIONS.c.kind.in_(kinds)
        under_way = select(OPERATIONS).where(state, kind).order_by(OPERATIONS.c.created_at_s)
        async with self._database.transaction() as connection:
            rows = await connection.execute(under_way)
            return tuple(_operation_of(row) for row in rows.mappings())

    async def get(self, operation_id: str) -> LongRunningOperation:
        """Returns an operation.

        Raises:
            UnknownService: there is none of that id.
        """
        async with self._database.transaction() as connection:
            return await find_operation(connection, operation_id)

    async def cancel(self, operation_id: str) -> LongRunningOperation:
        """Asks for an operation to be undone. One that has ended stays as it is.

        Raises:
            UnknownService: there is none of that id.
        """
        running = OPERATIONS.c.state == OperationState.RUNNING
        async with self._database.transaction() as connection:
            await connection.execute(
                update(OPERATIONS).where(OPERATIONS.c.id == operation_id, running).values(cancels=1)
            )
            return await find_operation(connection, operation_id)

    async def tell(self, operation_id: str, message: str, progress: float) -> None:
        """Says how far an operation is, if it is still under way."""
        async with self._database.transaction() as connection:
            await _change(connection, operation_id, message=message, progress=progress)

    async def begin(self, kind: OperationKind, subject: str) -> LongRunningOperation:
        """Begins an operation on its own."""
        async with self._database.transaction() as connection:
            return await begin_operation(connection, kind, subject)

    async def end(self, operation_id: str, state: OperationState, message: str) -> None:
        """Ends an operation on its own."""
        async with self._database.transaction() as connection:
            await end_operation(connection, operation_id, state, message)


async def begin_operation(
    connection: AsyncConnection, kind: OperationKind, subject: str
) -> LongRunningOperation:
    """Begins an operation within a transaction. Those that ended long ago are forgotten."""
    now_s = time.time()
    begun = LongRunningOperation(
        id=secrets.token_hex(8), kind=kind, subject=subject, created_at_s=now_s, updated_at_s=now_s
    )
    ended = OPERATIONS.c.state != OperationState.RUNNING
    await connection.execute(
        delete(OPERATIONS).where(ended, OPERATIONS.c.updated_at_s < now_s - REMEMBERED_S)
    )
    await connection.execute(
        insert(OPERATIONS).values(
            id=begun.id,
            kind=kind,
            subject=subject,
            state=begun.state,
            message="",
            progress=0.0,
            cancels=0,
            created_at_s=now_s,
            updated_at_s=now_s,
        )
    )
    return begun


async def end_operation(
    connection: AsyncConnection, operation_id: str, state: OperationState, message: str
) -> None:
    """Ends an operation within a transaction, unless it has ended."""
    progress = {"progress": 1.0} if state is OperationState.SUCCEEDED else {}
    await _change(connection, operation_id, state=state, message=message, **progress)


async def _change(connection: AsyncConnection, operation_id: str, **values: str | float) -> None:
    if "message" in values:
        values["message"] = plain(str(values["message"]))[:MESSAGE_LENGTH]
    running = OPERATIONS.c.state == OperationState.RUNNING
    await connection.execute(
        update(OPERATIONS)
        .where(OPERATIONS.c.id == operation_id, running)
        .values(updated_at_s=time.time(), **values)
    )


async def find_operation(connection: AsyncConnection, operation_id: str) -> LongRunningOperation:
    """Returns an operation within a transaction. Raises `UnknownService` if there is none of that id."""
    rows = await connection.execute(select(OPERATIONS).where(OPERATIONS.c.id == operation_id))
    row = rows.mappings().one_or_none()
    if row is None:
        raise UnknownService("There is no such operation; those that ended a week ago are forgotten.")
    return _operation_of(row)


def _operation_of(row: Mapping[str, Any] | Any) -> LongRunningOperation:  # noqa: ANN401 - a row of SQLAlchemy
    return LongRunningOperation(
        id=row["id"],
        kind=OperationKind(row["kind"]),
        subject=row["subject"],
        state=OperationState(row["state"]),
        message=row["message"],
        progress=row["progress"],
        cancels=bool(row["cancels"]),
        created_at_s=row["created_at_s"],
        updated_at_s=row["updated_at_s"],
    )
