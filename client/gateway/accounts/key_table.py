"""The keys that this gateway knows: a copy of the database's in memory, which is never older than it says.

A request's key is looked up here, without the database. Changes are fetched each second, so that a revocation takes
hold within it, and after FRESH_S at the latest: a copy that could not be renewed for so long is not used. A key that is
not there may be new: then changes are fetched at once, for all who ask together, four times a second at most. So wrong
keys, however many, cost one question in a quarter of a second.
"""

import asyncio
import logging
import time
from typing import Final

from molink.client.gateway.accounts.api_keys import ApiKey, KeyScope
from molink.client.gateway.accounts.errors import AccountsUnavailable
from molink.client.gateway.accounts.key_store import KeyStore

POLLS_EVERY_S: Final = 1.0
FRESH_S: Final = 5.0
"""Longest time after which a revocation takes hold; then the copy must not be used."""
LOOKS_AGAIN_AFTER_S: Final = 0.25
_log = logging.getLogger(__name__)


class KeyTable:
    """Copy of all keys, by their ids."""

    def __init__(self, store: KeyStore | None = None) -> None:
        """Without a store there is no key, ever."""
        self._store = store
        self._keys: dict[str, ApiKey] = {}
        self._revision = 0
        self._fetched_s = float("-inf")
        """When the last fetch that succeeded began, by the monotonic clock."""
        self._begun_s = float("-inf")
        self._fetch: asyncio.Task[None] | None = None

    @property
    def has_keys(self) -> bool:
        """Whether there was ever a key; requests need one then, though all of them have ended."""
        return bool(self._keys)

    def usable(self, now_s: float) -> int:
        """Returns how many keys could be used now."""
        return sum(key.fault(now_s) is None for key in self._keys.values())

    def opens(self, scope: KeyScope, now_s: float) -> bool:
        """Returns whether some key could be used now for that scope."""
        return any(scope in key.scopes and key.fault(now_s) is None for key in self._keys.values())

    async def ensure_fresh(self) -> None:
        """Returns once no key that is known here can have been revoked FRESH_S ago, as after a sleep of this machine.

        Raises:
            AccountsUnavailable: the database does not say.
        """
        now_s = time.monotonic()
        if self._store is None or now_s - self._fetched_s <= FRESH_S:
            return
        if self._fetch is None and now_s - self._begun_s < LOOKS_AGAIN_AFTER_S:
            raise AccountsUnavailable("keys could not be read for too long")
        await self.refresh()

    async def find(self, key_id: str) -> ApiKey | None:
        """Returns the key of that id; looks for new ones before it says that there is none.

        Raises:
            AccountsUnavailable: the database does not say.
        """
        asked_s = time.monotonic()
        while key_id not in self._keys and self._store is not None and self._fetched_s < asked_s:
            wait_s = self._begun_s + LOOKS_AGAIN_AFTER_S - time.monotonic()
            if self._fetch is None and wait_s > 0:
                await asyncio.sleep(wait_s)  # all who wait meanwhile are answered by one fetch
            await self.refresh()
        return self._keys.get(key_id)

    async def refresh(self) -> None:
        """Fetches what has changed, once for all who ask meanwhile.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        if self._fetch is None:
            self._fetch = asyncio.create_task(self._fetch_changes(), name="changed keys")
            self._fetch.add_done_callback(self._fetched)
        await asyncio.shield(self._fetch)

    async def keep_fresh(self) -> None:
        """Fetches changes until it is cancelled."""
        failed = False
        while True:
            await asyncio.sleep(POLLS_EVERY_S)
            try:
                await self.refresh()
            except AccountsUnavailable as error:
                if not failed:
                    _log.warning(
                        "keys cannot be read (%s): after %.0f s without, none is taken", error, FRESH_S
                    )
                failed = True
            else:
                failed = False

    async def _fetch_changes(self) -> None:
        if self._store is None:
            return
        self._begun_s = begun_s = time.monotonic()
        had_keys = self.has_keys
        first = self._fetched_s == float("-inf")
        for key in await self._store.changed_since(self._revision):
            self._keys[key.id] = key
            self._revision = max(self._revision, key.revision)
        self._fetched_s = begun_s
        if self.has_keys and not had_keys and not first:
            _log.warning("the first key was made: from now on every request needs one")

    def _fetched(self, task: asyncio.Task[None]) -> None:
        self._fetch = None
        if not task.cancelled():
            task.exception()  # whoever waits has it; where nobody waits any more, it is no news
