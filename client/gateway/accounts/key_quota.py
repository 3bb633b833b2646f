"""One key's quota in this gateway: the slices that it has leased, spent without asking the database again."""

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from molink.client.gateway.accounts.api_keys import KeyLimits
from molink.client.gateway.accounts.database import to_its_end
from molink.client.gateway.accounts.errors import AccountsUnavailable, OutcomeUnknown, QuotaExceeded
from molink.client.gateway.accounts.quota_levels import (
    SLICE_PART,
    Exchange,
    Exchanged,
    QuotaKind,
    QuotaLevel,
    quotas_of,
)

RETURNS_AFTER_S: Final = 5.0
"""A slice of which nothing was spent for so long is given back."""
RENEWS_AFTER_S: Final = 5.0
"""Leases of streams are renewed so often, for as many as were under way at once since the last time."""
REFUSES_FOR_S: Final = 1.0
"""What the database has refused is not asked for again within this time; others may give back meanwhile."""
_PERIODS: Final = {
    QuotaKind.REQUESTS: "requests a minute",
    QuotaKind.TOKENS: "tokens a minute",
    QuotaKind.DAY_TOKENS: "tokens a day",
}
STREAMS: Final = "streams"
Resource = QuotaKind | Literal["streams"]
"""What a key may run out of."""
RATE_LIMIT_HEADERS: Final = tuple(
    f"x-ratelimit-{what}-{kind}"
    for kind in (QuotaKind.REQUESTS, QuotaKind.TOKENS)
    for what in ("limit", "remaining", "reset")
)
"""Names of OpenAI's headers of rate limits."""
_log = logging.getLogger(__name__)


class LeasesQuotas(Protocol):
    """What slices are leased from: `QuotaStore`."""

    async def exchange(self, quota_id: str, limits: KeyLimits, asked: Exchange) -> Exchanged: ...


@dataclass(slots=True)
class KeyStreams:
    """Generations of a key: how many may be under way here, are, and were at once since leases were renewed."""

    leased: int = 0
    used: int = 0
    peak: int = 0


class KeyQuota:
    """Quota of one key, or of a row of rotated ones, as far as this gateway has leased it."""

    def __init__(self, quota_id: str, limits: KeyLimits, store: LeasesQuotas) -> None:
        self._quota_id = quota_id
        self._limits = limits
        self._quotas = quotas_of(limits)
        self._store = store
        self._slices: dict[QuotaKind, float] = dict.fromkeys(self._quotas, 0.0)
        """Below 0: spent beyond what was leased, until the next exchange."""
        self._levels: dict[QuotaKind, QuotaLevel] = {}
        """In the database, as they were last seen there, by this machine's clock."""
        self._streams = KeyStreams()
        self._exchanging = asyncio.Lock()
        self._spent_s = self._exchanged_s = float("-inf")
        """When something was last spent, and leased or given back; monotonic."""
        self._refusals: dict[Resource, tuple[float, float]] = {}
        """What the database has refused: how much, and until when as much or more is refused without asking."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is leased and nothing under way, so that it can be forgotten."""
        return not (self._streams.used or self._streams.leased or any(self._slices.values()))

    @property
    def is_low(self) -> bool:
        """Whether less than half a slice is left of something, though the database has more."""
        return any(
            self._slices[kind] < self._slice_of(kind) / 2 and self._level(kind) >= SLICE_PART
            for kind in self._quotas
        )

    async def take(self, needs: Mapping[QuotaKind, float], streams: int) -> None:
        """Takes all of it, or nothing.

        Raises:
            QuotaExceeded: there is not so much left.
            AccountsUnavailable: it would have to be leased, and the database does not answer.
        """
        asked: dict[Resource, float] = {kind: need for kind, need in needs.items() if kind in self._quotas}
        if self._limits.streams is not None:
            asked[STREAMS] = streams
        if self._short(asked):
            self._refuse_at_once(asked)
            async with self._exchanging:
                if self._short(asked):
                    self._refuse_at_once(asked)
                    await self._lease(asked)
                    self._note_refusals(asked)
            if short := self._short(asked):
                raise self._exceeded(short)
        for kind in self._quotas:
            self._slices[kind] -= asked.get(kind, 0.0)
        self._streams.used += streams
        self._streams.peak = max(self._streams.peak, self._streams.used)
        self._spent_s = time.monotonic()

    def give_back(self, amounts: Mapping[QuotaKind, float], streams: int) -> None:
        """Gives back what was taken and not used (below 0: what was used beyond it)."""
        for kind, amount in amounts.items():
            if kind in self._slices:
                self._slices[kind] += amount
        self._streams.used -= streams
        self._refusals.clear()  # the next one may have what this one gives back

    async def refill(self) -> None:
        """Leases the next slices before they are needed."""
        if self._exchanging.locked():
            return
        async with self._exchanging:
            try:
                await self._lease({kind: self._slice_of(kind) / 2 for kind in self._quotas})
            except AccountsUnavailable as error:
                _log.info("no slice could be leased ahead: %s", error)

    async def tend(self, *, ends: bool = False) -> None:
        """Gives back what lies idle, or everything if the gateway ends, and renews the leases of streams.

        Raises:
            AccountsUnavailable: as `Database.transaction` does.
        """
        now_s = time.monotonic()
        idle = ends or now_s - self._spent_s > RETURNS_AFTER_S
        is_due = (idle and self._streams.leased > self._streams.used) or (
            bool(self._streams.leased) and now_s - self._exchanged_s > RENEWS_AFTER_S
        )
        surplus = {kind: self._surplus(kind, idle=idle) for kind in self._quotas}
        if self._exchanging.locked() or not (any(surplus.values()) or is_due):
            return
        async with self._exchanging:
            if is_due:  # nobody takes meanwhile what others may have a moment later
                wanted = self._streams.used if idle else self._streams.peak
                self._streams.leased = 0 if ends else min(wanted, self._streams.leased)
                self._streams.peak = self._streams.used
            await self._exchange({}, surplus, self._streams.leased)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers of rate limits, as far as this gateway knows what others use."""
        made: dict[str, str] = {}
        for kind in (QuotaKind.REQUESTS, QuotaKind.TOKENS):
            quota = self._quotas.get(kind)
            if quota is None:
                continue
            left = min(max(0.0, self._level(kind) + self._slices[kind]), float(quota.amount))
            made[f"x-ratelimit-limit-{kind}"] = str(quota.amount)
            made[f"x-ratelimit-remaining-{kind}"] = str(math.floor(left))
            made[f"x-ratelimit-reset-{kind}"] = duration(
                (quota.amount - left) * quota.period_s / quota.amount
            )
        return made

    def _short(self, asked: Mapping[Resource, float]) -> dict[Resource, float]:
        """What of it is not here, by how much."""
        here: dict[Resource, float] = dict(self._slices.items())
        here[STREAMS] = self._streams.leased - self._streams.used
        return {what: amount - here[what] for what, amount in asked.items() if amount > here[what]}

    def _refuse_at_once(self, asked: Mapping[Resource, float]) -> None:
        """Raises `QuotaExceeded` for what the database has refused a moment ago."""
        now_s = time.monotonic()
        short = self._short(asked)
        for what in short:
            amount, until_s = self._refusals.get(what, (0.0, 0.0))
            if now_s < until_s and asked[what] >= amount:
                raise self._exceeded(short)

    def _note_refusals(self, asked: Mapping[Resource, float]) -> None:
        until_s = time.monotonic() + REFUSES_FOR_S
        short = self._short(asked)
        self._refusals = {what: (asked[what], until_s) for what in short}

    async def _lease(self, asked: Mapping[Resource, float]) -> None:
        """Asks for what is short, and settles what is owed."""
        needs = {
            kind: math.ceil(max(0.0, asked.get(kind, 0.0) - max(0.0, self._slices[kind])))
            for kind in self._quotas
        }
        debts = {kind: min(0.0, held) for kind, held in self._slices.items()}
        streams = self._streams.used + int(asked.get(STREAMS, 0))
        await self._exchange(needs, debts, max(streams, self._streams.leased))

    async def _exchange(
        self, needs: Mapping[QuotaKind, float], returned: Mapping[QuotaKind, float], streams: int
    ) -> None:
        """Leases and gives back. Where the database did not say whether it has done it, what was to be given back is
        not given back again, and what is owed not owed again; what it may have granted fills up there as time passes.

        Who is cancelled meanwhile waits until it is known, so that what is granted is spent or given back later.
        """
        asked = Exchange(
            needs=needs, returned=returned, streams=streams, spare_streams=streams > self._streams.leased
        )
        for kind, amount in returned.items():
            self._slices[kind] -= amount
        await to_its_end(self._settle(asked))

    async def _settle(self, asked: Exchange) -> None:
        """Has an exchange done, of which what is given back is no longer here."""
        try:
            done = await self._store.exchange(self._quota_id, self._limits, asked)
        except OutcomeUnknown:
            raise
        except BaseException:
            for kind, amount in asked.returned.items():
                self._slices[kind] += amount
            raise
        self._exchanged_s = time.monotonic()
        for kind, level in done.levels.items():
            self._levels[kind] = QuotaLevel(level.left, time.time())
            self._slices[kind] += done.granted.get(kind, 0.0)
        self._streams.leased = done.streams

    def _exceeded(self, short: Mapping[Resource, float]) -> QuotaExceeded:
        """The refusal, by what takes longest to come back."""
        waits = [
            (max(0.05, QuotaLevel(self._level(kind), time.time()).wait_s(quota, short[kind])), kind)
            for kind, quota in self._quotas.items()
            if kind in short
        ]
        if not waits:
            message = f"This key has as many generations under way as it may ({self._limits.streams})."
            return QuotaExceeded(message, STREAMS, REFUSES_FOR_S, self.headers())
        wait_s, kind = max(waits)
        most = self._quotas[kind].amount
        message = f"This key has used its {_PERIODS[kind]} ({most}). Try again in {duration(wait_s)}."
        return QuotaExceeded(message, kind, wait_s, self.headers())

    def _level(self, kind: QuotaKind) -> float:
        known = self._levels.get(kind)
        quota = self._quotas[kind]
        return float(quota.amount) if known is None else known.at(quota, time.time()).left

    def _slice_of(self, kind: QuotaKind) -> float:
        return self._level(kind) // SLICE_PART

    def _surplus(self, kind: QuotaKind, *, idle: bool) -> float:
        """What is to be given back: debts, everything of what lies idle, else what is beyond two slices."""
        held = self._slices[kind]
        return held if idle or held < 0 else max(0.0, held - 2 * self._quotas[kind].amount / SLICE_PART)


def duration(seconds: float) -> str:
    """Returns a time as OpenAI's headers have it, such as 6m0s, 8.64s or 12ms."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    if seconds < 60:
        return f"{seconds:.4g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
