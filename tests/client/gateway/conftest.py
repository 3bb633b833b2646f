"""What the gateway's tests share: a scripted swarm, and a gateway over it that takes two requests at once."""

from collections.abc import Iterator

import httpx
import pytest
from support.swarms.fake_swarm import DEADLINE_S, FakeSwarm, gateway


@pytest.fixture
def swarm() -> FakeSwarm:
    return FakeSwarm()


@pytest.fixture
def http(swarm: FakeSwarm) -> Iterator[httpx.Client]:
    with gateway(swarm, max_requests=2) as url, httpx.Client(base_url=url, timeout=DEADLINE_S) as client:
        yield client
