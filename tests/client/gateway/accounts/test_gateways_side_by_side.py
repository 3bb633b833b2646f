"""Two gateway processes on one database: one quota, one set of keys, one account of what was used."""

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from support.gateways.gateway_keys import bearer, id_of, in_database, make_key, revoke_key
from support.gateways.postgresql_server import postgresql_server
from support.swarms.fake_swarm import MODEL, TEXT

from molink.client.gateway.accounts.api_keys import KeyLimits
from molink.client.gateway.accounts.usage_store import UsageStore

DEADLINE_S = 120.0
pytestmark = pytest.mark.full
FAKE_SWARM = """
import sys, types
sys.path.insert(0, sys.argv.pop(1))
from support.swarms.fake_swarm import FakeSwarm

class AsyncSwarm(FakeSwarm):
    def __init__(self, model=None, **options):
        super().__init__()
        self.hangs_at = 1 if model == "hanging" else None

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

sys.modules["molink.client.api.swarm"] = types.SimpleNamespace(AsyncSwarm=AsyncSwarm)
from molink.client.gateway.cli import main
main()
"""


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'shared.db'}"
    else:
        with postgresql_server() as url:
            yield url


@contextmanager
def two_gateways(database: str, folder: Path, *options: str) -> Iterator[list[str]]:
    """The URLs of two processes; both end in order."""
    command = [sys.executable, "-c", FAKE_SWARM, str(Path(__file__).parents[3]), "--port", "0"]
    group = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
    with ExitStack() as stack:
        running = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, "--database", database, "--state-dir", str(folder / name), *options],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    creationflags=group,
                )
            )
            for name in ("first", "second")
        ]
        try:
            lines = [process.stdout.readline() for process in running if process.stdout is not None]
            yield [line.split()[-1] for line in lines]
            for process in running:
                process.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT)
            for process in running:
                said = process.communicate(timeout=DEADLINE_S)[1]
                assert process.returncode == 0
                assert "Every request needs a key" in said
                assert "Traceback" not in said
        finally:
            for process in running:
                process.kill()


def statuses(users: ThreadPoolExecutor, urls: list[str], key: str, count: int) -> list[int]:
    """Of so many requests at once, to each gateway in turn."""

    def ask(number: int) -> int:
        url = f"{urls[number % len(urls)]}/v1/completions"
        return httpx.post(url, json=TEXT, headers=bearer(key), timeout=DEADLINE_S).status_code

    return list(users.map(ask, range(count)))


def test_two_gateways_on_one_database_keep_one_quota_and_know_the_same_keys(
    database: str, tmp_path: Path
) -> None:
    limits = KeyLimits(requests_per_minute=12, tokens_per_day=10_000)
    key, other = make_key(tmp_path, database, limits=limits), make_key(tmp_path, database, name="bob")
    began_s = time.monotonic()
    with two_gateways(database, tmp_path) as urls, ThreadPoolExecutor(8) as users:
        done = statuses(users, urls, key, 40)
        refilled = int((time.monotonic() - began_s) * 12 / 60) + 1
        assert set(done) == {200, 429}
        assert 10 <= done.count(200) <= 12 + refilled
        assert statuses(users, urls, other, 8) == [200] * 8
        revoke_key(tmp_path, other, database)
        revoked_s = time.monotonic()
        while 200 in statuses(users, urls, other, 2):
            assert time.monotonic() - revoked_s < DEADLINE_S
        assert statuses(users, urls, other, 4) == [401] * 4
    lines = asyncio.run(
        in_database(database, tmp_path, lambda opened: UsageStore(opened).of_days(2, time.time(), id_of(key)))
    )
    assert sum(line.counts.requests for line in lines) == done.count(200)
    assert {line.of.model for line in lines} == {MODEL}


def test_generations_under_way_are_counted_over_both(database: str, tmp_path: Path) -> None:
    key = make_key(tmp_path, database, limits=KeyLimits(streams=3))

    def begun(held: ExitStack, http: httpx.Client, n: int) -> int:
        """The status of a generation, which goes on while `held` is."""
        body = TEXT | {"stream": True, "n": n}
        answer = http.send(
            http.build_request("POST", "/v1/completions", json=body, headers=bearer(key)), stream=True
        )
        if answer.status_code == 200:
            held.callback(answer.close)
        else:
            answer.close()
        return answer.status_code

    with two_gateways(database, tmp_path, "--model", "hanging") as urls, ExitStack() as clients:
        both = [clients.enter_context(httpx.Client(base_url=url, timeout=DEADLINE_S)) for url in urls]
        with ExitStack() as held:
            assert sorted(begun(held, both[number % 2], 1) for number in range(6)) == [200] * 3 + [429] * 3
        with ExitStack() as held:  # all have ended: one gateway can have all three
            while (status := begun(held, both[1], 3)) != 200:
                assert status == 429
