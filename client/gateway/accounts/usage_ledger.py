"""What was used and is not written yet: counted in memory, written in batches, off the way of requests."""

import asyncio
import logging
from typing import Final

from molink.client.gateway.accounts.database import to_its_end
from molink.client.gateway.accounts.errors import AccountsUnavailable, OutcomeUnknown
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.accounts.usage_store import UsageCounts, UsageDay, UsageLine, UsageStore, day_of

WRITES_EVERY_S: Final = 2.0
"""What a crash loses at most."""
MOST_LINES: Final = 10_000
"""Of usage that waits to be written while the database cannot be reached; what is beyond is dropped, and logged."""
_log = logging.getLogger(__name__)


class UsageLedger:
    """Usage that waits to be written."""

    def __init__(self, store: UsageStore | None = None, keys: KeyStore | None = None) -> None:
        """Without stores nothing is counted."""
        self._store = store
        self._keys = keys
        self._counts: dict[UsageDay, UsageCounts] = {}
        self._last_used_at_s: dict[str, float] = {}
        self._dropped = False
        self._reading = asyncio.Lock()
        """Who asks for usage again and again waits for himself, and takes one connection from requests at most."""

    def record(self, key_id: str, model: str, counts: UsageCounts, now_s: float) -> None:
        """Counts one request; `key_id` is empty if it had no key."""
        if self._store is None:
            return
        self._add(UsageDay(day_of(now_s), key_id, model), counts)
        if key_id:
            self._last_used_at_s[key_id] = now_s

    async def of_days(self, days: int, now_s: float, key_id: str) -> tuple[UsageLine, ...]:
        """Returns a key's usage of the last days, with what is not written yet.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        if self._store is None:
            return ()
        async with self._reading:
            await self.write()
            return await self._store.of_days(days, now_s, key_id)

    async def keep_writing(self) -> None:
        """Writes until it is cancelled."""
        failed = False
        while True:
            await asyncio.sleep(WRITES_EVERY_S)
            try:
                await self.write()
            except AccountsUnavailable as error:
                if not failed:
                    _log.warning("usage cannot be written (%s): it waits in memory", error)
                failed = True
            else:
                failed = False

    async def write(self) -> None:
        """Writes what waits. What cannot be written goes on waiting; what may have been written, as the database did
        not say, is not counted again: rather is it lost than charged twice.

        Who is cancelled meanwhile waits until it is known, which takes no longer than a transaction may.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        await to_its_end(self._write())

    async def _write(self) -> None:
        counts, self._counts = self._counts, {}
        last_used_at_s, self._last_used_at_s = self._last_used_at_s, {}
        try:
            if counts and self._store is not None:
                await self._store.add(counts)
                counts = {}
            if last_used_at_s and self._keys is not None:
                await self._keys.note_use(last_used_at_s)
                last_used_at_s = {}
        except OutcomeUnknown as error:
            if counts:
                requests = sum(one.requests for one in counts.values())
                _log.error("usage of %d requests may be lost, and is not written again: %s", requests, error)
            counts = {}
            raise
        finally:
            for of, more in counts.items():
                self._add(of, more)
            self._last_used_at_s = last_used_at_s | self._last_used_at_s

    def _add(self, of: UsageDay, counts: UsageCounts) -> None:
        known = self._counts.get(of)
        if known is None and len(self._counts) >= MOST_LINES:
            if not self._dropped:
                _log.error(
                    "usage of more than %d days, keys and models waits: the rest is not counted", MOST_LINES
                )
            self._dropped = True
            return
        self._counts[of] = counts if known is None else known.plus(counts)
