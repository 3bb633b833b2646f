"""Services in the database: each change is one transaction, so a gateway that is killed leaves none in between.

A service belongs to one gateway at a time, by a lease in its row; whoever has it does what the state says.
"""

import json
import time
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from molink.client.gateway.accounts.api_keys import ApiKey
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.key_store import issue_key, revoke_keys_for
from molink.client.gateway.accounts.schema import CIRCUIT_LEASES, OPERATIONS, SERVICES, USAGE_BY_DAY
from molink.client.gateway.services.operation_store import (
    begin_operation,
    end_operation,
    find_operation,
)
from molink.client.gateway.services.service import (
    LongRunningOperation,
    OperationKind,
    OperationState,
    Service,
    ServiceExists,
    ServiceSpecification,
    ServiceState,
    UnknownService,
)

OWNED_S: Final = 10.0
"""A gateway that does not renew its lease for so long has lost it."""
RENEWED_AFTER_S: Final = OWNED_S / 2


class ServiceStore:
    """Services as the database has them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> tuple[Service, ...]:
        """Returns all services, by name."""
        async with self._database.transaction() as connection:
            return await _services(connection)

    async def get(self, name: str) -> Service:
        """Returns a service.

        Raises:
            UnknownService: there is none of that name.
        """
        async with self._database.transaction() as connection:
            return await _found(connection, name)

    async def usage(self, name: str) -> tuple[int, int]:
        """Returns the requests and generated tokens of a service since it was deployed; 0 where there is none."""
        async with self._database.transaction() as connection:
            requests, tokens = await _used(connection, name)
            before = select(SERVICES.c.requests_before, SERVICES.c.tokens_before).where(
                SERVICES.c.name == name
            )
            row = (await connection.execute(before)).one_or_none()
        return (0, 0) if row is None else (max(0, requests - row[0]), max(0, tokens - row[1]))

    async def sync(self, gateway_id: str, observed: Mapping[str, Mapping[str, Any]]) -> tuple[Service, ...]:
        """Takes what nobody holds, renews what this gateway has with what it has `observed` of it, and returns all."""
        table = SERVICES.c
        async with self._database.transaction() as connection:
            now_s = float((await connection.execute(select(self._database.now_s()))).scalar_one())
            rows = await connection.execute(select(table.name, table.owner_id, table.owned_until_s))
            for name, owner_id, until_s in rows.all():
                is_due = until_s - now_s < RENEWED_AFTER_S if owner_id == gateway_id else until_s <= now_s
                if not is_due:
                    continue
                told = {"observed": json.dumps(observed[name])} if name in observed else {}
                ours = or_(table.owner_id == gateway_id, table.owned_until_s <= now_s)
                await connection.execute(
                    update(SERVICES)
                    .where(table.name == name, ours)
                    .values(owner_id=gateway_id, owned_until_s=now_s + OWNED_S, **told)
                )
            return await _services(connection)

    async def give_up(self, gateway_id: str) -> None:
        """Leaves all that this gateway has to others."""
        async with self._database.transaction() as connection:
            await connection.execute(
                update(SERVICES)
                .where(SERVICES.c.owner_id == gateway_id)
                .values(owner_id="", owned_until_s=0.0)
            )

    async def deploy(
        self, name: str, specification: ServiceSpecification, gateway_id: str
    ) -> LongRunningOperation:
        """Begins to deploy a service, which this gateway has.

        Raises:
            ServiceExists: there is one of that name.
        """
        async with self._database.transaction() as connection:
            now_s = float((await connection.execute(select(self._database.now_s()))).scalar_one())
            operation = await begin_operation(connection, OperationKind.DEPLOY, name)
            requests, tokens = await _used(connection, name)
            row = {
                "name": name,
                "specification": specification.to_json(),
                "state": ServiceState.DEPLOYING,
                "operation_id": operation.id,
                "created_at_s": time.time(),
                "requests_before": requests,
                "tokens_before": tokens,
                "owner_id": gateway_id,
                "owned_until_s": now_s + OWNED_S,
                "observed": "{}",
            }
            made = await connection.execute(
                self._database.insert(SERVICES).values(row).on_conflict_do_nothing()
            )
            if not made.rowcount:
                raise ServiceExists(
                    f"There is a service {name} already: delete it first, or choose another name."
                )
        return operation

    async def deployed(self, name: str, operation_id: str) -> None:
        """The service runs from now on, if that operation still is what brings it there."""
        async with self._database.transaction() as connection:
            if await _run(connection, name, operation_id, time.time()):
                await end_operation(connection, operation_id, OperationState.SUCCEEDED, "The service runs.")

    async def begin_delete(self, name: str) -> LongRunningOperation:
        """Begins to delete a service; what was being done with it otherwise ends. Where it is being deleted already,
        returns that operation.

        Raises:
            UnknownService: there is none of that name.
        """
        async with self._database.transaction() as connection:
            service = await _found(connection, name, locks=True)
            if service.state is ServiceState.DELETING:
                return await find_operation(connection, service.operation_id)
            await end_operation(
                connection, service.operation_id, OperationState.CANCELLED, "The service is being deleted."
            )
            operation = await begin_operation(connection, OperationKind.DELETE, name)
            await connection.execute(
                update(SERVICES)
                .where(SERVICES.c.name == name)
                .values(state=ServiceState.DELETING, operation_id=operation.id)
            )
        return operation

    async def keep(self, name: str, operation_id: str) -> None:
        """The service runs on: it is not to be deleted after all."""
        async with self._database.transaction() as connection:
            since_s = func.coalesce(SERVICES.c.running_since_s, time.time())
            if await _run(connection, name, operation_id, since_s):
                await end_operation(
                    connection, operation_id, OperationState.CANCELLED, "The service stays as it was."
                )

    async def remove(self, name: str, operation_id: str, state: OperationState, message: str) -> None:
        """The service is gone, with its keys, if that operation still is what ends it."""
        async with self._database.transaction() as connection:
            gone = await connection.execute(
                delete(SERVICES).where(SERVICES.c.name == name, SERVICES.c.operation_id == operation_id)
            )
            if gone.rowcount:
                await connection.execute(delete(CIRCUIT_LEASES).where(CIRCUIT_LEASES.c.service == name))
                await revoke_keys_for(connection, (name,))
                await end_operation(connection, operation_id, state, message)

    async def issue_key(self, name: str, overlap_s: float) -> tuple[ApiKey, bytes]:
        """Makes a key that opens this service and nothing else; older ones end after the overlap. Returns it with its
        secret.

        Raises:
            UnknownService: there is none of that name, or it is being deleted.
        """
        async with self._database.transaction() as connection:
            service = await _found(connection, name, locks=True)
            if service.state is ServiceState.DELETING:
                raise UnknownService(f"The service {name} is being deleted.")
            return await issue_key(connection, f"service {name}", (name,), overlap_s)


async def _run(
    connection: AsyncConnection, name: str, operation_id: str, since_s: float | ColumnElement[float]
) -> bool:
    """The service runs, if that operation is its latest."""
    moved = await connection.execute(
        update(SERVICES)
        .where(SERVICES.c.name == name, SERVICES.c.operation_id == operation_id)
        .values(state=ServiceState.RUNNING, running_since_s=since_s)
    )
    return bool(moved.rowcount)


async def _used(connection: AsyncConnection, name: str) -> tuple[int, int]:
    """Requests and generated tokens under that name, ever."""
    table = USAGE_BY_DAY.c
    sums = select(func.sum(table.requests), func.sum(table.completion_tokens)).where(table.model == name)
    requests, tokens = (await connection.execute(sums)).one()
    return int(requests or 0), int(tokens or 0)


async def _services(connection: AsyncConnection) -> tuple[Service, ...]:
    rows = await connection.execute(_with_cancels().order_by(SERVICES.c.name))
    return tuple(_service_of(row) for row in rows.mappings())


async def _found(connection: AsyncConnection, name: str, *, locks: bool = False) -> Service:
    wanted = _with_cancels().where(SERVICES.c.name == name)
    if locks:
        wanted = wanted.with_for_update(of=SERVICES)
    row = (await connection.execute(wanted)).mappings().one_or_none()
    if row is None:
        raise UnknownService(f"There is no service {name[:63]!r}.")
    return _service_of(row)


def _with_cancels() -> Any:  # noqa: ANN401 - a statement of SQLAlchemy
    return select(SERVICES, OPERATIONS.c.cancels).outerjoin(
        OPERATIONS, OPERATIONS.c.id == SERVICES.c.operation_id
    )


def _service_of(row: Mapping[str, Any] | Any) -> Service:  # noqa: ANN401 - a row of SQLAlchemy
    return Service(
        name=row["name"],
        specification=ServiceSpecification.from_json(row["specification"]),
        state=ServiceState(row["state"]),
        operation_id=row["operation_id"],
        cancels=bool(row["cancels"]),
        created_at_s=row["created_at_s"],
        running_since_s=row["running_since_s"],
        owner_id=row["owner_id"],
        observed=json.loads(row["observed"]),
    )
