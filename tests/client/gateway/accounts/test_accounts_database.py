"""The database of keys, quotas and usage: SQLite, and PostgreSQL where the tests take their time."""

import asyncio
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from sqlalchemy import text

from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope
from molink.client.gateway.accounts.database import FILE_NAME, Database, opened_database
from molink.client.gateway.accounts.errors import (
    AccountsUnavailable,
    DatabaseUnusable,
    InvalidDatabaseUrl,
    UnknownKey,
)
from molink.client.gateway.accounts.key_store import KeyStore
from molink.client.gateway.accounts.key_table import KeyTable
from molink.client.gateway.accounts.migrations.migrating import EMPTY, LATEST, current_revision
from molink.client.gateway.accounts.quota_levels import Exchange, QuotaKind
from molink.client.gateway.accounts.quota_store import QuotaStore
from molink.client.gateway.accounts.schema import METADATA
from molink.client.gateway.accounts.usage_ledger import UsageLedger
from molink.client.gateway.accounts.usage_store import UsageCounts, UsageDay, UsageStore, day_of

pytestmark = pytest.mark.anyio
DEADLINE_S = 120.0
USE = frozenset({KeyScope.USE})
LIMITS = KeyLimits(requests_per_minute=7, tokens_per_day=2**40, streams=3, models=("a/b", "c'; --"))
HOSTILE = "'; DROP TABLE api_keys; -- \" \\ %s :name \u202e {}"


@asynccontextmanager
async def store_in(url: str, folder: Path) -> AsyncIterator[KeyStore]:
    async with opened_database(url, folder) as database:
        yield KeyStore(database)


async def revision_of(database: Database) -> str | None:
    async with database.transaction() as connection:
        return await connection.run_sync(current_revision)


async def test_migrations_go_up_and_down_and_keep_what_is_there(url: str, tmp_path: Path) -> None:
    async with opened_database(url, tmp_path) as database:
        assert await revision_of(database) == LATEST
        key, _ = await KeyStore(database).create("alice", scopes=USE, limits=LIMITS)
        await UsageStore(database).add({UsageDay("2026-11-25", key.id, "m"): UsageCounts(1, 2, 3, 4)})
        asked = Exchange(needs={QuotaKind.REQUESTS: 3})
        await QuotaStore(database, "g").exchange(key.id, LIMITS, asked)
    async with opened_database(url, tmp_path, "0001") as database:
        assert await revision_of(database) == "0001"
        assert await KeyStore(database).all() == (key,)
    async with opened_database(url, tmp_path) as database:
        assert await revision_of(database) == LATEST
        assert await KeyStore(database).all() == (key,)
        [line] = await UsageStore(database).of_days(1, 1795600000.0)
        assert line.counts == UsageCounts(1, 2, 3, 4)
        done = await QuotaStore(database, "g").exchange(key.id, LIMITS, Exchange())
        assert done.levels[QuotaKind.REQUESTS].left == 7
    async with opened_database(url, tmp_path, EMPTY) as database, database.transaction() as connection:
        for table in METADATA.sorted_tables:
            found = await connection.run_sync(
                lambda sync, name=table.name: sync.dialect.has_table(sync, name)
            )
            assert not found, table.name


async def test_the_tables_are_those_that_the_revisions_make(url: str, tmp_path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    async with opened_database(url, tmp_path) as database, database.transaction() as connection:
        differences = await connection.run_sync(
            lambda sync: compare_metadata(
                MigrationContext.configure(sync, opts={"compare_type": True}), METADATA
            )
        )
    assert differences == []


async def test_many_that_start_at_once_migrate_once(url: str, tmp_path: Path) -> None:
    async def open_it() -> str | None:
        async with opened_database(url, tmp_path) as database:
            return await revision_of(database)

    assert await asyncio.gather(*(open_it() for _ in range(4))) == [LATEST] * 4


async def test_a_database_of_a_newer_version_is_left_alone(url: str, tmp_path: Path) -> None:
    async with opened_database(url, tmp_path) as database, database.transaction() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(DatabaseUnusable, match="of revision 9999, which a newer version of molink has made"):
        async with opened_database(url, tmp_path):
            raise AssertionError("it was opened")


async def test_keys_are_found_as_they_were_made_and_rotated_and_revoked(url: str, tmp_path: Path) -> None:
    async with store_in(url, tmp_path) as store:
        made, _ = await store.create(HOSTILE, scopes=frozenset(KeyScope), limits=LIMITS, expires_at_s=2e9)
        plain, _ = await store.create("bob", scopes=USE, limits=KeyLimits())
        assert await store.all() == (made, plain)
        new, _ = await store.rotate(made.id, 60.0)
        old = next(key for key in await store.all() if key.id == made.id)
        assert (new.limits, new.scopes, new.name, new.quota_id) == (LIMITS, made.scopes, HOSTILE, made.id)
        assert new.expires_at_s is not None
        assert new.expires_at_s - new.created_at_s == pytest.approx(2e9 - made.created_at_s)
        assert old.expires_at_s == pytest.approx(time.time() + 60, abs=DEADLINE_S)
        revoked = await store.revoke(new.id)
        assert revoked.revoked_at_s is not None
        assert await store.revoke(new.id) == revoked
        with pytest.raises(UnknownKey, match="is revoked"):
            await store.rotate(new.id, 60.0)
        for unknown in ("nobody", HOSTILE, ""):
            with pytest.raises(UnknownKey, match="there is no key"):
                await store.revoke(unknown)
        changed = await store.changed_since(plain.revision)
        assert {key.id for key in changed} == {made.id, new.id}
        assert [key.revision for key in changed] == sorted(key.revision for key in changed)


async def test_usage_adds_up_whoever_writes_it(url: str, tmp_path: Path) -> None:
    async with opened_database(url, tmp_path) as database:
        keys = KeyStore(database)
        key, _ = await keys.create("alice", scopes=USE, limits=KeyLimits())
        now_s = time.time()
        ledgers = [UsageLedger(UsageStore(database), keys) for _ in range(3)]
        for ledger in ledgers:
            for _ in range(5):
                ledger.record(key.id, HOSTILE, UsageCounts(1, 10, 2, 3), now_s)
            ledger.record("", "m", UsageCounts(1, 1, 0, 1), now_s)
        await asyncio.gather(*(ledger.write() for ledger in ledgers))
        lines = await ledgers[0].of_days(1, now_s, key.id)
        assert [(line.key_name, line.of.model, line.counts) for line in lines] == [
            ("alice", HOSTILE, UsageCounts(15, 150, 30, 45))
        ]
        both = await UsageStore(database).of_days(1, now_s)
        assert {line.of: line.counts.requests for line in both} == {
            UsageDay(day_of(now_s), "", "m"): 3,
            UsageDay(day_of(now_s), key.id, HOSTILE): 15,
        }
        assert await UsageStore(database).of_days(1, now_s + 3 * 86_400) == ()
        [used] = await keys.all()
        assert used.last_used_at_s == now_s


async def test_a_quota_is_one_for_all_who_lease_it_at_once(url: str, tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_minute=10, streams=5)
    async with opened_database(url, tmp_path) as database:
        stores = [QuotaStore(database, str(number)) for number in range(4)]
        asked = Exchange(needs={QuotaKind.REQUESTS: 3}, streams=2)
        done = await asyncio.gather(*(store.exchange("k", limits, asked) for store in stores))
    assert sum(one.granted.get(QuotaKind.REQUESTS, 0) for one in done) == 9
    assert sum(one.streams for one in done) == 5


async def test_a_revocation_takes_hold_and_a_new_key_is_found_at_once(url: str, tmp_path: Path) -> None:
    async with store_in(url, tmp_path) as store:
        table = KeyTable(store)
        await table.refresh()
        assert not table.has_keys
        key, _ = await store.create("alice", scopes=USE, limits=KeyLimits())
        assert await table.find(key.id) == key
        assert table.usable(time.time()) == 1
        await store.revoke(key.id)
        await table.refresh()
        known = await table.find(key.id)
        assert known is not None
        assert known.revoked_at_s is not None
        assert (table.has_keys, table.usable(time.time())) == (True, 0)
        assert await table.find("nobody") is None


async def test_keys_that_cannot_be_read_are_not_taken_for_longer_than_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.db"
    async with store_in(f"sqlite:///{path}", tmp_path) as store:
        table = KeyTable(store)
        await table.refresh()
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE api_keys RENAME TO away")
        await table.ensure_fresh()
        monkeypatch.setattr("molink.client.gateway.accounts.key_table.FRESH_S", -1.0)
        monkeypatch.setattr("molink.client.gateway.accounts.key_table.LOOKS_AGAIN_AFTER_S", 0.0)
        for _ in range(2):
            with pytest.raises(AccountsUnavailable):
                await table.ensure_fresh()
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE away RENAME TO api_keys")
        await table.ensure_fresh()


async def test_usage_that_could_not_be_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with opened_database(f"sqlite:///{path}", tmp_path) as database:
        ledger = UsageLedger(UsageStore(database), KeyStore(database))
        now_s = time.time()
        ledger.record("", "m", UsageCounts(1, 2, 0, 3), now_s)
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE usage_by_day RENAME TO away")
        with pytest.raises(AccountsUnavailable):
            await ledger.write()
        ledger.record("", "m", UsageCounts(1, 2, 0, 3), now_s)
        with sqlite3.connect(path) as other:
            other.execute("ALTER TABLE away RENAME TO usage_by_day")
        await ledger.write()
        [line] = await UsageStore(database).of_days(1, now_s)
    assert line.counts == UsageCounts(2, 4, 0, 6)


@pytest.mark.parametrize(
    "url", ["nonsense", "mysql://h/n", "sqlite://", "postgresql://h", "", "postgresql://h:x/n"]
)
async def test_what_is_no_url_of_a_database_is_said(url: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidDatabaseUrl, match="--database takes postgresql://"):
        async with opened_database(url, tmp_path):
            raise AssertionError("it was opened")


@pytest.mark.parametrize(
    "url", ["postgresql://molink:hunter2@127.0.0.1:1/molink", "sqlite:////no/such/folder/here/a.db"]
)
async def test_a_database_that_cannot_be_reached_is_one_sentence_without_its_password(
    url: str, tmp_path: Path
) -> None:
    with pytest.raises(DatabaseUnusable, match=r"^the database .* cannot be used \(.*\): start it") as failed:
        async with opened_database(url, tmp_path):
            raise AssertionError("it was opened")
    assert "hunter2" not in str(failed.value)
    assert "\n" not in str(failed.value)


async def test_a_file_that_is_no_database_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database " * 1000)
    with pytest.raises(DatabaseUnusable, match="cannot be used"):
        async with opened_database(None, tmp_path):
            raise AssertionError("it was opened")


async def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    async with opened_database(None, folder):
        assert sys.platform == "win32" or (folder / FILE_NAME).stat().st_mode & 0o777 == 0o600
        assert sys.platform == "win32" or folder.stat().st_mode & 0o777 == 0o700


def test_migrations_are_in_the_package() -> None:
    script = (
        "import asyncio, pathlib, sys, molink.client.gateway.accounts.migrations.migrating as m\n"
        "names = {p.name for p in (pathlib.Path(m.__file__).parent / 'versions').glob('v*.py')}\n"
        "assert {name[:5] for name in names} == {'v0001', 'v0002', 'v0003', 'v0004', 'v0005', 'v0006'}, names\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=DEADLINE_S)
