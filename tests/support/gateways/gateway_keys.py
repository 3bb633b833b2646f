"""Keys for tests of the gateway, made in its database as `molink-gateway keys` makes them."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope, key_text
from molink.client.gateway.accounts.database import Database, opened_database
from molink.client.gateway.accounts.key_store import KeyStore

T = TypeVar("T")
USE = frozenset({KeyScope.USE})
NO_LIMITS = KeyLimits()


async def in_database(url: str | None, folder: Path, work: Callable[[Database], Awaitable[T]]) -> T:
    """What the work in that database comes to."""
    async with opened_database(url, folder) as database:
        return await work(database)


def make_key(
    folder: Path, url: str | None = None, *, scopes: frozenset[KeyScope] = USE, expires_at_s: float | None = None,
    name: str = "alice", limits: KeyLimits = NO_LIMITS,
) -> str:  # fmt: skip
    """A new key, as its user writes it."""

    async def create(database: Database) -> str:
        store = KeyStore(database)
        made = await store.create(name, scopes=scopes, limits=limits, expires_at_s=expires_at_s)
        return key_text(made[0].id, made[1])

    return asyncio.run(in_database(url, folder, create))


def revoke_key(folder: Path, key: str, url: str | None = None) -> None:
    """Revokes a key by its text."""
    asyncio.run(in_database(url, folder, lambda database: KeyStore(database).revoke(id_of(key))))


def id_of(key: str) -> str:
    """The public part of a key's text."""
    return key.split("-")[2]


def bearer(key: str) -> dict[str, str]:
    """The header that shows a key."""
    return {"Authorization": f"Bearer {key}"}
