"""Services on real peers: previewed, deployed, used, held through losses and restarts, deleted."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from support.gateways.forked_gateway import ForkedLocalGateway
from support.gateways.gateway_keys import bearer
from support.gateways.operators import DEADLINE_S, ended, new_key, operating
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import SwarmError
from molink.client.gateway.accounts.api_keys import KeyScope
from molink.peer.daemon.control import call_peer
from molink.peer.memory.lease_table import IDLE_S

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

SERVICES = "/admin/v1/services"
PROMPT = "ROMEO:"
NEW_TOKENS = 16
ASKED = {"name": "poet", "model": BUNDLED, "parameters": {"temperature": 0, "max_tokens": NEW_TOKENS}}


async def until(http: httpx.AsyncClient, **wanted: object) -> dict[str, Any]:
    now: dict[str, Any] = {}
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not all(now.get(name) == value for name, value in wanted.items()):
                await asyncio.sleep(0.1)
                now = (await http.get(f"{SERVICES}/poet")).json()
    except TimeoutError:
        raise AssertionError(f"{wanted} did not come about: {now}") from None
    return now


async def sessions_at(swarm: ForkedSwarm) -> list[int]:
    """Leases at each peer, as it says itself."""
    told = [await call_peer(peer.state_dir, "status", DEADLINE_S) for peer in swarm.peers]
    return [int(str(one["sessions"])) for one in told]


async def until_leased(swarm: ForkedSwarm, wanted: list[int]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if await sessions_at(swarm) == wanted:
                return
            await asyncio.sleep(0.1)


@pytest.fixture
async def swarm() -> AsyncIterator[ForkedSwarm]:
    async with ForkedSwarm() as swarm:
        for name, span in (("front", "0:6"), ("back", "6:12"), ("spare", "6:12")):
            await swarm.join(name, "--model", BUNDLED, "--layers", span)
        yield swarm


async def test_a_service_is_held_through_a_lost_peer_and_a_killed_gateway_and_deleted(
    swarm: ForkedSwarm, references: References, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    key = await new_key(tmp_path / "log.state", KeyScope.OPERATE)
    folder = bundled_folder()
    expected = references.text(folder, references.greedy(folder, references.ids(folder, PROMPT), NEW_TOKENS))
    async with ForkedLocalGateway(swarm.addresses, log) as gateway, operating(gateway, key) as http:
        routing = (await http.post(f"{SERVICES}/preview", json=ASKED)).json()["routing"]
        assert (routing["possible"], routing["load_bytes"], len(routing["circuits"])) == (True, 0, 1)
        too_many = ASKED | {"resources": {"gpu": "H200", "gpu_count": 1}}
        refused = await http.post(SERVICES, json=too_many)
        assert (refused.status_code, await sessions_at(swarm)) == (503, [0, 0, 0])

        begun = (await http.post(SERVICES, json=ASKED)).json()["operation"]
        assert (await ended(http, begun))["state"] == "succeeded"
        now = await until(http, state="running", held=1)
        assert sum(await sessions_at(swarm)) == 2

        made = await http.post(f"{SERVICES}/poet/keys", json={})
        user = openai.AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key=made.json()["key"], max_retries=0, timeout=DEADLINE_S
        )
        async with user:
            answer = await user.completions.create(model="poet", prompt=PROMPT)
            assert (answer.choices[0].text, answer.model) == (expected, "poet")
            seen = await user.get("/swarm", cast_to=httpx.Response)
            assert [circuit["phase"] for circuit in seen.json()["circuits"]] == ["ended"]
            await until(http, held=1, in_use=0, requests=1, generated_tokens=NEW_TOKENS)

            hops = now["circuits"][0]["hops"]
            lost = next(peer for peer in swarm.peers if peer.peer_id == hops[-1]["peer_id"])
            await swarm.kill(lost)
            await until_leased(swarm, [1, 1])
            now = await until(http, state="running", held=1)
            assert lost.peer_id not in {hop["peer_id"] for hop in now["circuits"][0]["hops"]}
            assert gateway.process_id is not None
            os.kill(gateway.process_id, signal.SIGKILL)
        await gateway.wait()

    async with ForkedLocalGateway(swarm.addresses, log) as gateway, operating(gateway, key) as http:
        await until(http, state="running", held=1)
        answer = await http.post(
            "/v1/completions",
            json={"model": "poet", "prompt": PROMPT},
            headers=bearer(made.json()["key"]),
        )
        assert answer.json()["choices"][0]["text"] == expected
        begun = (await http.delete(f"{SERVICES}/poet")).json()["operation"]
        assert (await ended(http, begun))["state"] == "succeeded"
        await until_leased(swarm, [0, 0])
        assert (await http.get(f"{SERVICES}/poet")).status_code == 404


@pytest.mark.full
async def test_a_circuit_is_held_for_longer_than_peers_let_a_lease_stand_that_nobody_uses(
    swarm: ForkedSwarm,
) -> None:
    async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as client:
        await client.held.add(256, DEADLINE_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(IDLE_S + 15):
                await client.held.changed.wait()
        assert sum(await sessions_at(swarm)) == 2
        generation = await client.generate(PROMPT, max_new_tokens=NEW_TOKENS, timeout_s=DEADLINE_S)
        assert (client.held.count, len(generation.token_ids)) == (0, NEW_TOKENS)
    await until_leased(swarm, [0, 0, 0])


@pytest.mark.full
async def test_who_holds_a_circuit_has_room_where_nobody_else_has(references: References) -> None:
    folder = bundled_folder()
    prompt = references.ids(folder, PROMPT)
    async with ForkedSwarm() as swarm:
        await swarm.join("tight", "--model", BUNDLED, "--layers", "0:12", "--memory", "40MB")
        async with (
            AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as holder,
            AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as other,
        ):
            whole = holder.model.context_length
            await holder.held.add(whole, DEADLINE_S)
            long = whole - len(prompt)
            with pytest.raises(SwarmError):
                await other.generate(PROMPT, max_new_tokens=long, timeout_s=3)
            generation = await holder.generate(PROMPT, max_new_tokens=long, timeout_s=DEADLINE_S)
            expected = references.greedy(folder, prompt, NEW_TOKENS)
            assert (generation.token_ids[:NEW_TOKENS], holder.held.count) == (expected, 0)
