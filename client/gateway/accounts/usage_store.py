"""Usage by day, key and model in the database: added to in batches, read by whoever asks."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from sqlalchemy import select

from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.schema import API_KEYS, USAGE_BY_DAY


@dataclass(frozen=True, slots=True)
class UsageCounts:
    """Usage counts, of requests that were let in and of their tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompts' tokens, those that peers did not compute again."""
    completion_tokens: int = 0

    def plus(self, other: "UsageCounts") -> "UsageCounts":
        """Returns the sum of both."""
        return UsageCounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class UsageDay:
    """Usage of one model with one key in one day of UTC, such as 2026-11-25. `key_id` is empty: without a key."""

    day: str
    key_id: str
    model: str


@dataclass(frozen=True, slots=True)
class UsageLine:
    """Line of a usage report."""

    of: UsageDay
    key_name: str
    counts: UsageCounts


def day_of(now_s: float) -> str:
    """Returns the day of UTC that a time lies in."""
    return datetime.fromtimestamp(now_s, UTC).date().isoformat()


class UsageStore:
    """Usage as the database has it."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, counts: Mapping[UsageDay, UsageCounts]) -> None:
        """Adds to what is there, all of it in one transaction."""
        table = USAGE_BY_DAY
        async with self._database.transaction() as connection:
            # In one order, so that gateways which write at once never wait for each other in a circle.
            for of, more in sorted(
                counts.items(), key=lambda item: (item[0].day, item[0].key_id, item[0].model)
            ):
                added = {
                    "requests": more.requests,
                    "prompt_tokens": more.prompt_tokens,
                    "cached_tokens": more.cached_tokens,
                    "completion_tokens": more.completion_tokens,
                }
                await connection.execute(
                    self._database.insert(table)
                    .values(day=of.day, key_id=of.key_id, model=of.model, **added)
                    .on_conflict_do_update(
                        index_elements=["day", "key_id", "model"],
                        set_={name: table.c[name] + number for name, number in added.items()},
                    )
                )

    async def of_days(self, days: int, now_s: float, key_id: str | None = None) -> tuple[UsageLine, ...]:
        """Returns the usage of the last days, today's included, the newest first; of one key, or of all."""
        today = datetime.fromtimestamp(now_s, UTC).date()
        first = (today - timedelta(days=days - 1)).isoformat()
        table = USAGE_BY_DAY
        wanted = (
            select(table, API_KEYS.c.name)
            .outerjoin(API_KEYS, API_KEYS.c.id == table.c.key_id)
            .where(table.c.day >= first)
            .order_by(table.c.day.desc(), table.c.key_id, table.c.model)
        )
        if key_id is not None:
            wanted = wanted.where(table.c.key_id == key_id)
        async with self._database.transaction() as connection:
            rows = (await connection.execute(wanted)).mappings().all()
        return tuple(
            UsageLine(
                UsageDay(row["day"], row["key_id"], row["model"]),
                row["name"] or "",
                UsageCounts(
                    row["requests"], row["prompt_tokens"], row["cached_tokens"], row["completion_tokens"]
                ),
            )
            for row in rows
        )
