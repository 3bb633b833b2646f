"""Opening the accounts of a gateway: database, keys, quotas, usage, and what runs beside requests for them."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from molink.client.gateway.accounts.database import Database, opened_database
from molink.client.gateway.accounts.errors import AccountsUnavailable, DatabaseUnusable
from molink.client.gateway.accounts.gatekeeper import Gatekeeper
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.accounts.key_table import KeyTable
from molink.client.gateway.accounts.quota_store import QuotaStore
from molink.client.gateway.accounts.quotas import Quotas
from molink.client.gateway.accounts.usage_ledger import UsageLedger
from molink.client.gateway.accounts.usage_store import UsageStore

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenAccounts:
    """Open accounts of a gateway: who lets requests in, and the database behind it."""

    gatekeeper: Gatekeeper
    database: Database


@asynccontextmanager
async def opened_accounts(url: str | None, folder: Path) -> AsyncIterator[OpenAccounts]:
    """The gatekeeper over a database. In the end quotas are given back and usage is written.

    Args:
        url: as `opened_database` takes it.
        folder: state directory of the gateway.

    Raises:
        DatabaseUnusable: as `opened_database` says.
    """
    async with opened_database(url, folder) as database:
        store = KeyStore(database)
        keys = KeyTable(store)
        quotas = Quotas(QuotaStore(database, secrets.token_hex(16)))
        ledger = UsageLedger(UsageStore(database), store)
        try:
            await keys.refresh()
        except AccountsUnavailable as error:
            raise DatabaseUnusable(f"the keys in the database cannot be read: {error}") from error
        beside = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("keys", keys.keep_fresh()),
                ("quotas", quotas.keep_tending()),
                ("usage", ledger.keep_writing()),
            )
        ]
        try:
            yield OpenAccounts(Gatekeeper(keys, quotas, ledger), database)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)
            await quotas.end()
            try:
                await ledger.write()
            except AccountsUnavailable as error:
                _log.error("usage could not be written in the end: %s", error)


def open_to_anybody() -> Gatekeeper:
    """Returns a gatekeeper without a database: everybody is let in, and nothing is counted."""
    return Gatekeeper(KeyTable(), Quotas(), UsageLedger())
