"""What the gateway's tests share: a scripted swarm, a gateway over it that takes two requests at once, databases."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from support.gateways.postgresql_server import fresh_database, postgresql_server
from support.swarms.fake_swarm import DEADLINE_S, FakeSwarm, gateway


@pytest.fixture
def swarm() -> FakeSwarm:
    return FakeSwarm()


@pytest.fixture
def http(swarm: FakeSwarm) -> Iterator[httpx.Client]:
    with gateway(swarm, max_requests=2) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture(scope="module")
def unasked() -> FakeSwarm:
    """A swarm that no test of a file asks for anything."""
    return FakeSwarm()


@pytest.fixture(scope="module")
def refusing(unasked: FakeSwarm) -> Iterator[httpx.Client]:
    """A gateway over it, for all requests of a file that are refused before a swarm is asked."""
    with gateway(unasked) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A PostgreSQL server, where a test needs one."""
    with postgresql_server() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'accounts.db'}"
    return fresh_database(request.getfixturevalue("server"))
