"""What keys and quotas add to a request, and what fairness is worth: `python tests/bench/gateway [--requests 20000]`.

PostgreSQL is a server of its own (Debian's package), which ends with the benchmark. A request is timed from its headers
to its admission, as the gateway does both, with its key's limits in force; what it used is settled afterwards. Some of
them lease the next slice meanwhile: they are among the figures. What is fair is measured at the queue before the swarm,
with generations that only take time.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench.tables import Table
from bench.this_machine import processor
from support.gateways.gateway_keys import bearer, in_database
from support.gateways.postgresql_server import fresh_database, postgresql_server
from support.swarms.fake_swarm import SPEC

from molink.client.api.generation import TextPiece
from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope, key_text
from molink.client.gateway.accounts.database import Database
from molink.client.gateway.accounts.gatekeeper import Gatekeeper
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.accounts.opening import opened_accounts
from molink.client.gateway.slots import GatewayBusy, Slots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMITS: Final = KeyLimits(
    requests_per_minute=600_000, tokens_per_minute=60_000_000, tokens_per_day=10**10, streams=1000
)
KEYS: Final = 20
BAR_MS: Final = 2.0
SLOTS: Final = 8
GENERATION_S: Final = 0.02
FLOOD: Final = 64
LIGHT: Final = 200


async def make_keys(url: str | None, folder: Path) -> list[str]:
    """Keys with limits, as their users write them."""

    async def make(database: Database) -> list[str]:
        store = KeyStore(database)
        made = [
            await store.create(f"user {number}", scopes=frozenset({KeyScope.USE}), limits=LIMITS)
            for number in range(KEYS)
        ]
        return [key_text(key.id, secret) for key, secret in made]

    return await in_database(url, folder, make)


async def admissions_ms(gatekeeper: Gatekeeper, keys: Sequence[str], count: int, at_once: int) -> list[float]:
    """Times of so many requests, `at_once` of them under way at any time."""
    headers = [
        [(name.lower().encode(), value.encode()) for name, value in bearer(key).items()] for key in keys
    ]
    times_ms: list[float] = []

    async def user(own: int) -> None:
        for number in range(count // at_once):
            began_s = time.perf_counter()
            caller = await gatekeeper.caller_of(headers[(own + number) % len(headers)])
            admitted = await gatekeeper.admit(caller, SPEC, [30], 200)
            times_ms.append(1000 * (time.perf_counter() - began_s))
            await asyncio.sleep(0.001)  # what comes between two requests of one user
            admitted.note(0, TextPiece("", token_ids=(1,) * 100))
            admitted.end()

    await asyncio.gather(*(user(own) for own in range(at_once)))
    return times_ms


async def measure_admissions(table: Table, name: str, url: str | None, count: int) -> None:
    """A row for one user at a time, and one for a hundred. First requests, which lease, have rows of their own."""
    with tempfile.TemporaryDirectory() as folder:
        keys = await make_keys(url, Path(folder))
        async with opened_accounts(url, Path(folder)) as accounts:
            gatekeeper = accounts.gatekeeper
            for at_once in (1, 100):
                first_ms = await admissions_ms(gatekeeper, keys, max(at_once, KEYS), at_once)
                table.note(
                    f"{name}, {at_once} at once: first requests of all keys",
                    f"{max(first_ms):.1f} ms at most",
                )
                times_ms = sorted(await admissions_ms(gatekeeper, keys, count, at_once))
                table.judge(
                    f"{name}, {at_once} at once: p99",
                    times_ms[round(0.99 * len(times_ms)) - 1],
                    "ms",
                    BAR_MS,
                    p50_ms=statistics.median(times_ms),
                    longest_ms=times_ms[-1],
                )
                table.note("  p50, longest", f"{statistics.median(times_ms):.4f} ms, {times_ms[-1]:.2f} ms")


async def light_ttft_s(turn: Callable[[str], Awaitable[Callable[[], None]]]) -> list[float]:
    """Waits of somebody who asks now and then, while somebody else floods."""
    ends = asyncio.Event()

    async def flood() -> None:
        while not ends.is_set():
            try:
                give = await turn("flood")
            except GatewayBusy:
                await asyncio.sleep(GENERATION_S)
                continue
            await asyncio.sleep(GENERATION_S)
            give()

    flooding = [asyncio.create_task(flood()) for _ in range(FLOOD)]
    waits_s: list[float] = []
    for _ in range(LIGHT):
        await asyncio.sleep(GENERATION_S)
        began_s = time.perf_counter()
        give = await turn("light")
        waits_s.append(time.perf_counter() - began_s)
        await asyncio.sleep(GENERATION_S)
        give()
    ends.set()
    await asyncio.gather(*flooding)
    return waits_s


@asynccontextmanager
async def first_come() -> "AsyncIterator[Callable[[str], Awaitable[Callable[[], None]]]]":
    """First come, first served."""
    queue = asyncio.Semaphore(SLOTS)

    async def turn(_: str) -> Callable[[], None]:
        await queue.acquire()
        return queue.release

    yield turn


@asynccontextmanager
async def fair() -> "AsyncIterator[Callable[[str], Awaitable[Callable[[], None]]]]":
    """The gateway's own queue."""
    slots = Slots(SLOTS)

    async def turn(user: str) -> Callable[[], None]:
        taken = await slots.take(user, 1)
        return lambda: slots.give(user, taken)

    yield turn


async def measure_fairness(table: Table) -> None:
    """A row for the ratio of both."""
    p99_s = {}
    for kind in (first_come, fair):
        async with kind() as turn:
            waits_s = sorted(await light_ttft_s(turn))
        p99_s[kind] = waits_s[round(0.99 * len(waits_s)) - 1]
        table.note(f"light key's p99 wait, {kind.__name__}", f"{1000 * p99_s[kind]:.1f} ms")
    table.judge(
        "first come, first served over ours", p99_s[first_come] / p99_s[fair], "times", 5.0, least=True
    )


async def main(options: argparse.Namespace) -> None:
    """Measures all of it."""
    print(f"{processor()}: key check and quota of {options.requests} requests with {KEYS} keys", flush=True)
    table = Table()
    with postgresql_server() as server:
        await measure_admissions(table, "PostgreSQL", fresh_database(server), options.requests)
    await measure_admissions(table, "SQLite", None, options.requests)
    await measure_fairness(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    asyncio.run(main(parser.parse_args()))
