"""Quota levels and stream leases in the database: one exchange is one transaction, and decided by `quota_levels.py`."""

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from molink.client.gateway.accounts.api_keys import KeyLimits
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.quota_levels import (
    Exchange,
    Exchanged,
    QuotaKind,
    QuotaLevel,
    exchanged,
)
from molink.client.gateway.accounts.schema import QUOTA_LEVELS, STREAM_LEASES

STREAMS_LAPSE_AFTER_S: Final = 30.0
"""A gateway that ended without a word holds its streams for so long."""


class QuotaStore:
    """Quotas of all keys, as one gateway leases from them."""

    def __init__(self, database: Database, gateway_id: str) -> None:
        """`gateway_id` is another one for each process."""
        self._database = database
        self._gateway_id = gateway_id

    async def exchange(self, quota_id: str, limits: KeyLimits, asked: Exchange) -> Exchanged:
        """Leases and gives back.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        async with self._database.transaction() as connection:
            levels, now_s = await self._locked(connection, quota_id)
            elsewhere = 0
            if limits.streams is not None:
                elsewhere = await self._streams_elsewhere(connection, quota_id, now_s)
            done = exchanged(limits, levels, asked, elsewhere, now_s)
            if done.levels:
                await connection.execute(
                    update(QUOTA_LEVELS)
                    .where(QUOTA_LEVELS.c.quota_id == quota_id)
                    .values(_columns_of(done.levels))
                )
            if limits.streams is not None:
                await self._hold(connection, quota_id, done.streams, now_s)
        return done

    async def _locked(
        self, connection: AsyncConnection, quota_id: str
    ) -> tuple[dict[QuotaKind, QuotaLevel], float]:
        """The levels, which nobody else changes until the end, and the database's time."""
        wanted = (
            select(QUOTA_LEVELS, self._database.now_s().label("now_s"))
            .where(QUOTA_LEVELS.c.quota_id == quota_id)
            .with_for_update()
        )
        row = (await connection.execute(wanted)).mappings().one_or_none()
        if row is None:
            first = self._database.insert(QUOTA_LEVELS).values(quota_id=quota_id).on_conflict_do_nothing()
            await connection.execute(first)
            row = (await connection.execute(wanted)).mappings().one()
        levels = {
            kind: QuotaLevel(float(row[f"{kind}_left"]), float(row[f"{kind}_at_s"]))
            for kind in QuotaKind
            if row[f"{kind}_left"] is not None
        }
        return levels, float(row["now_s"])

    async def _streams_elsewhere(self, connection: AsyncConnection, quota_id: str, now_s: float) -> int:
        held = select(func.coalesce(func.sum(STREAM_LEASES.c.held), 0)).where(
            STREAM_LEASES.c.quota_id == quota_id,
            STREAM_LEASES.c.gateway_id != self._gateway_id,
            STREAM_LEASES.c.expires_at_s > now_s,
        )
        return int((await connection.execute(held)).scalar_one())

    async def _hold(self, connection: AsyncConnection, quota_id: str, held: int, now_s: float) -> None:
        if held == 0:
            own = (STREAM_LEASES.c.quota_id == quota_id, STREAM_LEASES.c.gateway_id == self._gateway_id)
            await connection.execute(delete(STREAM_LEASES).where(*own))
            return
        values: dict[str, Any] = {"held": held, "expires_at_s": now_s + STREAMS_LAPSE_AFTER_S}
        await connection.execute(
            self._database.insert(STREAM_LEASES)
            .values(quota_id=quota_id, gateway_id=self._gateway_id, **values)
            .on_conflict_do_update(index_elements=["quota_id", "gateway_id"], set_=values)
        )


def _columns_of(levels: Mapping[QuotaKind, QuotaLevel]) -> dict[str, float]:
    left = {f"{kind}_left": level.left for kind, level in levels.items()}
    return left | {f"{kind}_at_s": level.at_s for kind, level in levels.items()}
