"""Gateways that are killed while they deploy or delete a service: started again, each ends in one of both states."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways.gateway_keys import bearer, make_key
from support.swarms.fake_swarm import DEADLINE_S, MODEL

from molink.client.gateway.accounts.api_keys import KeyScope

pytestmark = pytest.mark.full
SERVICES = "/admin/v1/services"
KILLED_AFTER_S = (0.0, 0.002, 0.01, 0.03, 0.08, 0.2, 0.5)
SLOW_SWARM = """
import asyncio, sys, types
sys.path.insert(0, sys.argv.pop(1))
from support.swarms.fake_swarm import FakeHeldCircuits, FakeSwarm

class SlowlyHeldCircuits(FakeHeldCircuits):
    async def add(self, *given):
        await asyncio.sleep(0.1)
        await super().add(*given)

class AsyncSwarm(FakeSwarm):
    def __init__(self, model=None, **options):
        super().__init__(held=SlowlyHeldCircuits())

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

sys.modules["molink.client.api.swarm"] = types.SimpleNamespace(AsyncSwarm=AsyncSwarm)
from molink.client.gateway.cli import main
main()
"""


@contextmanager
def running(folder: Path, key: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A gateway process on that state directory, and its operator's client. It is killed in the end."""
    command = [sys.executable, "-c", SLOW_SWARM, str(Path(__file__).parents[3]), "--port", "0"]
    with subprocess.Popen(
        [*command, "--state-dir", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().split()[-1]
            with httpx.Client(base_url=url, timeout=DEADLINE_S, headers=bearer(key)) as http:
                yield process, http
        finally:
            process.kill()


def ended(http: httpx.Client, operation_id: str) -> dict[str, Any]:
    last: dict[str, Any] = {}
    with http.stream("GET", f"/admin/v1/operations/{operation_id}/events", timeout=DEADLINE_S) as events:
        for line in events.iter_lines():
            if line.startswith("data: "):
                last = json.loads(line.removeprefix("data: "))
    return last


@pytest.mark.parametrize("after_s", KILLED_AFTER_S)
@pytest.mark.parametrize("kind", ["deploy", "delete"])
def test_a_killed_gateway_ends_in_one_of_both_states(kind: str, after_s: float, tmp_path: Path) -> None:
    key = make_key(tmp_path, scopes=frozenset({KeyScope.OPERATE}))
    asked = {"name": "poet", "model": MODEL, "resources": {"minimum_circuits": 3}}
    with running(tmp_path, key) as (process, http):
        begun = http.post(SERVICES, json=asked).json()["operation"]
        if kind == "delete":
            assert ended(http, begun["id"])["state"] == "succeeded"
            issued = http.post(f"{SERVICES}/poet/keys", json={}).json()["key"]
            begun = http.delete(f"{SERVICES}/poet").json()["operation"]
        time.sleep(after_s)  # not to wait for anything: it is killed at different times
        os.kill(process.pid, signal.SIGKILL)
    with running(tmp_path, key) as (_, http):
        outcome = ended(http, begun["id"])
        assert outcome["state"] == "succeeded"
        there = http.get(f"{SERVICES}/poet")
        assert there.status_code == (200 if kind == "deploy" else 404)
        [*services] = http.get(SERVICES).json()["data"]
        assert [one["name"] for one in services] == (["poet"] if kind == "deploy" else [])
        if kind == "deploy":
            while there.json().get("held") != 3:  # circuits of a service that ran already form again
                there = http.get(f"{SERVICES}/poet")
            assert there.json()["state"] == "running"
        else:
            refused = http.post(
                "/v1/completions", json={"model": "poet", "prompt": "a"}, headers=bearer(issued)
            )
            assert refused.status_code == 401
