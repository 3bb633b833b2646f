"""Operators of gateways that run, in tests: their keys, their client, and the operations that they wait for."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
from support.gateways.gateway_keys import bearer, in_database

from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope, key_text
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.local.local_gateway import LocalGateway

DEADLINE_S = 120.0


async def new_key(state_dir: Path, scope: KeyScope) -> str:
    """A key of the gateway with that state directory, as its user writes it."""

    async def create(database: Database) -> str:
        made = await KeyStore(database).create("a test", scopes=frozenset({scope}), limits=KeyLimits())
        return key_text(made[0].id, made[1])

    return await in_database(None, state_dir, create)


def operating(gateway: LocalGateway, key: str) -> httpx.AsyncClient:
    """The client of who has that key."""
    return httpx.AsyncClient(base_url=gateway.url, timeout=DEADLINE_S, headers=bearer(key))


async def ended(http: httpx.AsyncClient, operation: dict[str, Any]) -> dict[str, Any]:
    """The operation, once it has ended."""
    async with asyncio.timeout(DEADLINE_S):
        while operation["state"] == "running":
            await asyncio.sleep(0.1)
            operation = (await http.get(f"/admin/v1/operations/{operation['id']}")).json()
    return operation
