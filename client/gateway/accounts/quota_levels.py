"""Quota levels: token buckets from which gateways lease slices, as values. Pure.

A bucket lies in the database, one for each key and kind. A gateway leases a slice of what is left, spends it without
asking again, and gives back what it does not need. A slice is a fixed part of what is left (guided self-scheduling,
Polychronopoulos and Kuck 1987): large while there is plenty, single units at the end, so that gateways side by side
come to one limit together. What is leased has left the bucket, so that all of them never spend more than it gave.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from molink.client.gateway.accounts.api_keys import KeyLimits

MINUTE_S: Final = 60.0
DAY_S: Final = 86_400.0
SLICE_PART: Final = 8
"""A slice is one part in so many of what is left, or what is needed if that is more."""


class QuotaKind(StrEnum):
    """Kind of quota."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    DAY_TOKENS = "day_tokens"


@dataclass(frozen=True, slots=True)
class Quota:
    """Quota: so much in each period. It is refilled evenly, or at once when a period of UTC begins."""

    amount: int
    period_s: float = MINUTE_S
    at_once: bool = False


@dataclass(frozen=True, slots=True)
class QuotaLevel:
    """Level of a token bucket at a time. Below 0: more was used than was leased, as by an underestimated prompt."""

    left: float
    at_s: float

    def at(self, quota: Quota, now_s: float) -> "QuotaLevel":
        """Returns the level by then. A clock that goes back, or another one that is behind, refills nothing."""
        now_s = max(now_s, self.at_s)
        if quota.at_once:
            begins_anew = now_s // quota.period_s > self.at_s // quota.period_s
            left = min(float(quota.amount), self.left + quota.amount) if begins_anew else self.left
        else:
            left = self.left + (now_s - self.at_s) * quota.amount / quota.period_s
        return QuotaLevel(min(float(quota.amount), left), now_s)

    def changed(self, quota: Quota, by: float) -> "QuotaLevel":
        """Returns the level with so much taken (below 0) or given back; never more than a full bucket."""
        return QuotaLevel(min(float(quota.amount), self.left + by), self.at_s)

    def wait_s(self, quota: Quota, amount: float) -> float:
        """Returns the seconds until so much is left; for more than a full bucket, until it is full."""
        missing = min(amount, float(quota.amount)) - self.left
        if missing <= 0:
            return 0.0
        if quota.at_once:
            return quota.period_s - self.at_s % quota.period_s
        return missing * quota.period_s / quota.amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Exchange between a gateway and the database, for one key: what it needs, and what it gives back."""

    needs: Mapping[QuotaKind, float] = field(default_factory=lambda: MappingProxyType({}))
    returned: Mapping[QuotaKind, float] = field(default_factory=lambda: MappingProxyType({}))
    """Below 0: what it has spent beyond its slices."""
    streams: int = 0
    """Generations that it is to have room for, those under way included."""
    spare_streams: bool = False
    """Whether a slice beyond these is of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What the database answered: what it granted, and what is left there."""

    granted: Mapping[QuotaKind, float]
    levels: Mapping[QuotaKind, QuotaLevel]
    streams: int


def quotas_of(limits: KeyLimits) -> dict[QuotaKind, Quota]:
    """Returns the quotas that a key's limits mean."""
    amounts = {
        QuotaKind.REQUESTS: (limits.requests_per_minute, MINUTE_S, False),
        QuotaKind.TOKENS: (limits.tokens_per_minute, MINUTE_S, False),
        QuotaKind.DAY_TOKENS: (limits.tokens_per_day, DAY_S, True),
    }
    return {
        kind: Quota(amount, period_s, at_once)
        for kind, (amount, period_s, at_once) in amounts.items()
        if amount is not None
    }


def full(quota: Quota, now_s: float) -> QuotaLevel:
    """Returns the level of a bucket from which nothing was taken."""
    return QuotaLevel(float(quota.amount), now_s)


def exchanged(
    limits: KeyLimits,
    levels: Mapping[QuotaKind, QuotaLevel],
    asked: Exchange,
    streams_elsewhere: int,
    now_s: float,
) -> Exchanged:
    """Decides an exchange. What is needed is granted as a whole or not at all.

    Args:
        limits: the key's.
        levels: of its buckets in the database; one that is missing is full.
        asked: by one gateway.
        streams_elsewhere: that other gateways hold.
        now_s: by the database's clock.
    """
    granted: dict[QuotaKind, float] = {}
    after: dict[QuotaKind, QuotaLevel] = {}
    for kind, quota in quotas_of(limits).items():
        level = levels.get(kind, full(quota, now_s)).at(quota, now_s)
        level = level.changed(quota, asked.returned.get(kind, 0.0))
        need = asked.needs.get(kind, 0.0)
        slice_ = max(need, float(level.left // SLICE_PART))
        if 0 < need <= level.left:
            granted[kind] = slice_
            level = level.changed(quota, -slice_)
        after[kind] = level
    return Exchanged(granted=granted, levels=after, streams=_streams(limits, asked, streams_elsewhere))


def _streams(limits: KeyLimits, asked: Exchange, elsewhere: int) -> int:
    if limits.streams is None:
        return 0
    free = max(0, limits.streams - elsewhere)
    spare = max(0, free - asked.streams) // SLICE_PART if asked.spare_streams else 0
    return min(free, asked.streams + spare)
