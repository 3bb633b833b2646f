"""Nodes in the database: machines that have registered, each with the token by which it did."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.ext.asyncio import AsyncConnection

from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.errors import TokenUsed
from molink.client.gateway.accounts.key_store import is_usable, revoke_key
from molink.client.gateway.accounts.schema import NODES
from molink.client.gateway.services.operation_store import end_operation
from molink.client.gateway.services.service import OperationState


@dataclass(frozen=True, slots=True)
class Node:
    """Node: a machine that has registered."""

    peer_id: str
    key_id: str
    """Of its token."""
    operator_id: str
    """Whose orders it takes: the identity of the gateway that registered it."""
    descriptor: Mapping[str, Any]
    """What it said of itself."""
    registered_at_s: float
    """Seconds since 1970 (UTC)."""


class NodeStore:
    """Nodes as the database has them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def all(self) -> tuple[Node, ...]:
        """Returns all nodes, the first that registered first."""
        async with self._database.transaction() as connection:
            rows = await connection.execute(select(NODES).order_by(NODES.c.registered_at_s, NODES.c.peer_id))
            return tuple(_node_of(row) for row in rows.mappings())

    async def find(self, peer_id: str) -> Node | None:
        """Returns the node of that peer id."""
        async with self._database.transaction() as connection:
            rows = await connection.execute(select(NODES).where(NODES.c.peer_id == peer_id))
            row = rows.mappings().one_or_none()
        return None if row is None else _node_of(row)

    async def register(
        self, peer_id: str, key_id: str, operator_id: str, descriptor: Mapping[str, Any]
    ) -> Node:
        """Registers a machine, or the same one again: with its token, or with another one once that has ended. Peer ids
        are no secrets, so a token alone does not say whose machine it is.

        Raises:
            TokenUsed: the token is another machine's, or the machine has another token.
        """
        async with self._database.transaction() as connection:
            holder = await _holder_of(connection, key_id)
            if holder not in (None, peer_id):
                raise TokenUsed(
                    "This token has registered another machine: have its operator make a new one."
                )
            own_id = await _token_of(connection, peer_id)
            if own_id is not None and own_id != key_id and await is_usable(connection, own_id):
                raise _has_another()
            now_s = time.time()
            row = {
                "peer_id": peer_id,
                "key_id": key_id,
                "operator_id": operator_id,
                "descriptor": json.dumps(descriptor),
                "registered_at_s": now_s,
            }
            made = self._database.insert(NODES).values(row)
            known = NODES.c.key_id.in_((key_id, own_id or key_id))
            written = await connection.execute(
                made.on_conflict_do_update(index_elements=["peer_id"], set_=row, where=known)
            )
            if not written.rowcount:
                raise _has_another()  # another gateway has registered it meanwhile
        return Node(peer_id, key_id, operator_id, descriptor, now_s)

    async def remove(self, peer_id: str, operation_id: str, message: str) -> None:
        """The node is gone, its token too, and the operation that had it go has succeeded."""
        async with self._database.transaction() as connection:
            rows = await connection.execute(select(NODES.c.key_id).where(NODES.c.peer_id == peer_id))
            key_id = rows.scalar_one_or_none()
            if key_id is not None:
                await connection.execute(delete(NODES).where(NODES.c.peer_id == peer_id))
                await revoke_key(connection, key_id)
            await end_operation(connection, operation_id, OperationState.SUCCEEDED, message)


async def _holder_of(connection: AsyncConnection, key_id: str) -> str | None:
    rows = await connection.execute(select(NODES.c.peer_id).where(NODES.c.key_id == key_id).with_for_update())
    return rows.scalar_one_or_none()


async def _token_of(connection: AsyncConnection, peer_id: str) -> str | None:
    rows = await connection.execute(
        select(NODES.c.key_id).where(NODES.c.peer_id == peer_id).with_for_update()
    )
    return rows.scalar_one_or_none()


def _has_another() -> TokenUsed:
    return TokenUsed(
        "This machine has registered with another token: use that one, or have its operator revoke it."
    )


def _node_of(row: Mapping[str, Any] | Any) -> Node:  # noqa: ANN401 - a row of SQLAlchemy
    return Node(
        row["peer_id"],
        row["key_id"],
        row["operator_id"],
        json.loads(row["descriptor"]),
        row["registered_at_s"],
    )
