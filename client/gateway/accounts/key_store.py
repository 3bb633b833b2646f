"""Keys in the database: made, found, rotated, revoked. Each change has a number, by which gateways see what is new."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import insert, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from molink.client.gateway.accounts.api_keys import (
    ApiKey,
    KeyLimits,
    KeyScope,
    digest_of,
    new_key_id,
    new_secret,
)
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.errors import UnknownKey
from molink.client.gateway.accounts.schema import API_KEYS, KEY_CHANGES


class KeyStore:
    """Keys as the database has them."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(
        self,
        name: str,
        *,
        scopes: frozenset[KeyScope],
        limits: KeyLimits,
        expires_at_s: float | None = None,
    ) -> tuple[ApiKey, bytes]:
        """Makes a key; returns it with its secret, which is kept nowhere."""
        secret, key_id = new_secret(), new_key_id()
        key = ApiKey(
            id=key_id,
            name=name,
            digest=digest_of(secret),
            scopes=scopes,
            limits=limits,
            quota_id=key_id,
            created_at_s=time.time(),
            expires_at_s=expires_at_s,
        )
        async with self._database.transaction() as connection:
            key = await _add(connection, key)
        return key, secret

    async def all(self) -> tuple[ApiKey, ...]:
        """Returns every key there ever was, the oldest first."""
        async with self._database.transaction() as connection:
            rows = await connection.execute(select(API_KEYS).order_by(API_KEYS.c.created_at_s, API_KEYS.c.id))
            return tuple(_key_of(row) for row in rows.mappings())

    async def changed_since(self, revision: int) -> tuple[ApiKey, ...]:
        """Returns the keys of later changes, in their order."""
        newer = select(API_KEYS).where(API_KEYS.c.revision > revision).order_by(API_KEYS.c.revision)
        async with self._database.transaction() as connection:
            rows = await connection.execute(newer)
            return tuple(_key_of(row) for row in rows.mappings())

    async def rotate(self, key_id: str, overlap_s: float) -> tuple[ApiKey, bytes]:
        """Makes a key with the limits of another one, which ends after the overlap; they share one quota meanwhile. If
        the old one had an end, the new one lives as long again.

        Raises:
            UnknownKey: there is none of that id that could still be used.
        """
        now_s = time.time()
        secret = new_secret()
        async with self._database.transaction() as connection:
            old = await _found(connection, key_id)
            fault = old.fault(now_s)
            if fault is not None:
                raise UnknownKey(f"the key {key_id} is {fault.value}: make a new one with `keys create`")
            lived_s = None if old.expires_at_s is None else old.expires_at_s - old.created_at_s
            new = replace(
                old,
                id=new_key_id(),
                digest=digest_of(secret),
                created_at_s=now_s,
                expires_at_s=None if lived_s is None else now_s + lived_s,
                last_used_at_s=None,
            )
            new = await _add(connection, new)
            ends_at_s = min(now_s + overlap_s, old.expires_at_s or float("inf"))
            await _change(connection, key_id, expires_at_s=ends_at_s)
        return new, secret

    async def revoke(self, key_id: str) -> ApiKey:
        """Ends a key, and says what it was; one that is revoked stays so.

        Raises:
            UnknownKey: there is none of that id.
        """
        async with self._database.transaction() as connection:
            key = await _found(connection, key_id)
            if key.revoked_at_s is None:
                await _change(connection, key_id, revoked_at_s=time.time())
                key = await _found(connection, key_id)
        return key

    async def note_use(self, last_used_at_s: Mapping[str, float]) -> None:
        """Writes down when keys were used last. It is no change that gateways look for."""
        async with self._database.transaction() as connection:
            for key_id, at_s in sorted(last_used_at_s.items()):
                earlier = or_(API_KEYS.c.last_used_at_s.is_(None), API_KEYS.c.last_used_at_s < at_s)
                await connection.execute(
                    update(API_KEYS).where(API_KEYS.c.id == key_id, earlier).values(last_used_at_s=at_s)
                )


async def _found(connection: AsyncConnection, key_id: str) -> ApiKey:
    rows = await connection.execute(select(API_KEYS).where(API_KEYS.c.id == key_id).with_for_update())
    row = rows.mappings().one_or_none()
    if row is None:
        raise UnknownKey(f"there is no key {key_id!r}: `keys list` shows the ids of all")
    return _key_of(row)


async def _next_revision(connection: AsyncConnection) -> int:
    """Returns the number of this change. The row stays locked until the end: later numbers are committed later."""
    await connection.execute(update(KEY_CHANGES).values(revision=KEY_CHANGES.c.revision + 1))
    return int((await connection.execute(select(KEY_CHANGES.c.revision))).scalar_one())


async def _add(connection: AsyncConnection, key: ApiKey) -> ApiKey:
    key = replace(key, revision=await _next_revision(connection))
    await connection.execute(insert(API_KEYS).values(_row_of(key)))
    return key


async def _change(connection: AsyncConnection, key_id: str, **values: float) -> None:
    revision = await _next_revision(connection)
    await connection.execute(
        update(API_KEYS).where(API_KEYS.c.id == key_id).values(revision=revision, **values)
    )


def _row_of(key: ApiKey) -> dict[str, Any]:
    return {
        "id": key.id,
        "name": key.name,
        "digest": key.digest,
        "scopes": json.dumps(sorted(key.scopes)),
        "quota_id": key.quota_id,
        "requests_per_minute": key.limits.requests_per_minute,
        "tokens_per_minute": key.limits.tokens_per_minute,
        "tokens_per_day": key.limits.tokens_per_day,
        "streams": key.limits.streams,
        "models": json.dumps(key.limits.models),
        "created_at_s": key.created_at_s,
        "expires_at_s": key.expires_at_s,
        "revoked_at_s": key.revoked_at_s,
        "last_used_at_s": key.last_used_at_s,
        "revision": key.revision,
    }


def _key_of(row: Mapping[str, Any] | Any) -> ApiKey:  # noqa: ANN401 - a row of SQLAlchemy
    """Scopes of a newer version open nothing here."""
    known = {scope.value for scope in KeyScope}
    return ApiKey(
        id=row["id"],
        name=row["name"],
        digest=bytes(row["digest"]),
        scopes=frozenset(KeyScope(scope) for scope in json.loads(row["scopes"]) if scope in known),
        limits=KeyLimits(
            requests_per_minute=row["requests_per_minute"],
            tokens_per_minute=row["tokens_per_minute"],
            tokens_per_day=row["tokens_per_day"],
            streams=row["streams"],
            models=tuple(json.loads(row["models"])),
        ),
        quota_id=row["quota_id"],
        created_at_s=row["created_at_s"],
        expires_at_s=row["expires_at_s"],
        revoked_at_s=row["revoked_at_s"],
        last_used_at_s=row["last_used_at_s"],
        revision=row["revision"],
    )


async def issue_key(
    connection: AsyncConnection, name: str, models: tuple[str, ...], overlap_s: float
) -> tuple[ApiKey, bytes]:
    """Makes a key for exactly these models, within a transaction; older ones for the same end after the overlap.
    Returns it with its secret, which is kept nowhere."""
    now_s, secret, key_id = time.time(), new_secret(), new_key_id()
    for old in await _usable_for(connection, models, now_s):
        await _change(
            connection, old.id, expires_at_s=min(now_s + overlap_s, old.expires_at_s or float("inf"))
        )
    key = ApiKey(
        id=key_id,
        name=name,
        digest=digest_of(secret),
        scopes=frozenset({KeyScope.USE}),
        limits=KeyLimits(models=models),
        quota_id=key_id,
        created_at_s=now_s,
    )
    return await _add(connection, key), secret


async def revoke_keys_for(connection: AsyncConnection, models: tuple[str, ...]) -> int:
    """Ends the keys for exactly these models, within a transaction; returns how many."""
    now_s = time.time()
    usable = await _usable_for(connection, models, now_s)
    for key in usable:
        await _change(connection, key.id, revoked_at_s=now_s)
    return len(usable)


async def _usable_for(connection: AsyncConnection, models: tuple[str, ...], now_s: float) -> list[ApiKey]:
    same = select(API_KEYS).where(API_KEYS.c.models == json.dumps(models), API_KEYS.c.revoked_at_s.is_(None))
    rows = await connection.execute(same.order_by(API_KEYS.c.id).with_for_update())
    return [key for row in rows.mappings() if (key := _key_of(row)).fault(now_s) is None]


async def revoke_key(connection: AsyncConnection, key_id: str) -> None:
    """Ends a key, within a transaction; no error if there is none of that id, or it has ended."""
    rows = await connection.execute(select(API_KEYS.c.revoked_at_s).where(API_KEYS.c.id == key_id))
    row = rows.one_or_none()
    if row is not None and row[0] is None:
        await _change(connection, key_id, revoked_at_s=time.time())


async def is_usable(connection: AsyncConnection, key_id: str) -> bool:
    """Whether there is a key of that id that has not ended, within a transaction."""
    rows = await connection.execute(select(API_KEYS).where(API_KEYS.c.id == key_id))
    row = rows.mappings().one_or_none()
    return row is not None and _key_of(row).fault(time.time()) is None
