"""The quotas of all keys in this gateway: leased ahead, given back when idle, then forgotten."""

import asyncio
import logging
from collections import Counter
from typing import Final

from molink.client.gateway.accounts.api_keys import ApiKey, KeyLimits
from molink.client.gateway.accounts.errors import AccountsUnavailable, DemandTooLarge
from molink.client.gateway.accounts.key_quota import KeyQuota, LeasesQuotas
from molink.client.gateway.accounts.quota_levels import QuotaKind, quotas_of

TENDS_EVERY_S: Final = 1.0
ENDS_WITHIN_S: Final = 2.0
_log = logging.getLogger(__name__)


class TakenQuota:
    """What one request has taken of its key's quota, to be settled once."""

    def __init__(self, quota: KeyQuota, tokens: int, streams: int) -> None:
        self._quota = quota
        self._tokens = tokens
        self._streams = streams

    def settle(self, tokens: int) -> None:
        """So many tokens were used; the rest is given back."""
        rest = self._tokens - tokens
        self._quota.give_back({QuotaKind.TOKENS: rest, QuotaKind.DAY_TOKENS: rest}, self._streams)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers of rate limits."""
        return self._quota.headers()


class Quotas:
    """Quotas of the keys that are in use here."""

    def __init__(self, store: LeasesQuotas | None = None) -> None:
        """Without a store nobody has limits."""
        self._store = store
        self._by_id: dict[str, KeyQuota] = {}
        self._refills: dict[str, asyncio.Task[None]] = {}
        self._takers: Counter[str] = Counter()
        """How many requests are taking from each: what they wait for is not forgotten."""

    async def take(self, key: ApiKey, tokens: int, streams: int) -> TakenQuota | None:
        """Takes a request, so many tokens and streams of a key's quota; None if the key has no limits of these.

        Raises:
            DemandTooLarge: it is more than the key may have at once.
            QuotaExceeded: there is not so much left.
            AccountsUnavailable: the database would have to be asked, and does not answer.
        """
        limits = key.limits
        if self._store is None or (not quotas_of(limits) and limits.streams is None):
            return None
        _require_possible(limits, tokens, streams)
        quota = self._by_id.get(key.quota_id)
        if quota is None:
            quota = self._by_id[key.quota_id] = KeyQuota(key.quota_id, limits, self._store)
        needs = {QuotaKind.REQUESTS: 1, QuotaKind.TOKENS: tokens, QuotaKind.DAY_TOKENS: tokens}
        self._takers[key.quota_id] += 1
        try:
            await quota.take(needs, streams)
        finally:
            self._takers[key.quota_id] -= 1
        if quota.is_low and key.quota_id not in self._refills:
            task = asyncio.create_task(quota.refill(), name="next slice")
            self._refills[key.quota_id] = task
            task.add_done_callback(lambda _: self._refills.pop(key.quota_id, None))
        return TakenQuota(quota, tokens, streams)

    async def keep_tending(self) -> None:
        """Looks after them until it is cancelled."""
        while True:
            await asyncio.sleep(TENDS_EVERY_S)
            try:
                await self._tend_all()
            except AccountsUnavailable as error:
                _log.info("quotas are not given back now: %s", error)

    async def end(self) -> None:
        """Gives everything back, within ENDS_WITHIN_S, or once the transaction has ended that is under way then."""
        refills = tuple(self._refills.values())
        for task in refills:
            task.cancel()
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                # Until they have ended they hold their quotas, which would be left as they are.
                await asyncio.gather(*refills, return_exceptions=True)
                await self._tend_all(ends=True)
        except (AccountsUnavailable, TimeoutError) as error:
            _log.info("quotas could not be given back: %s", error)

    async def _tend_all(self, *, ends: bool = False) -> None:
        for quota_id, quota in tuple(self._by_id.items()):
            await quota.tend(ends=ends)
            if quota.is_idle and not self._takers[quota_id] and quota_id not in self._refills:
                del self._by_id[quota_id], self._takers[quota_id]


def _require_possible(limits: KeyLimits, tokens: int, streams: int) -> None:
    for kind, name in ((QuotaKind.TOKENS, "minute"), (QuotaKind.DAY_TOKENS, "day")):
        quota = quotas_of(limits).get(kind)
        if quota is not None and tokens > quota.amount:
            raise DemandTooLarge(
                f"max_tokens and the prompt together may take {tokens} tokens, and this key has {quota.amount} a "
                f"{name}: ask for fewer",
                "max_tokens",
            )
    if limits.streams is not None and streams > limits.streams:
        raise DemandTooLarge(
            f"n asks for {streams} generations at once, and this key may have {limits.streams}: ask for fewer",
            "n",
        )
