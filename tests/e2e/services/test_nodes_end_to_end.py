"""A machine registers with a gateway by a token, serves, tells its operator how it is, and exits when that one says."""

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways.forked_gateway import ForkedLocalGateway
from support.gateways.gateway_keys import bearer
from support.gateways.operators import DEADLINE_S, ended, new_key, operating
from support.peer_findings import remind
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.api.swarm import AsyncSwarm
from molink.client.errors import InvalidRequest
from molink.client.gateway.accounts.api_keys import KeyScope
from molink.client.local.local_gateway import LocalGateway

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NODES = "/admin/v1/nodes"
PROMPT = "JULIET:"
NEW_TOKENS = 12
STREAMED_TOKENS = 600


async def access(swarm: ForkedSwarm, gateway: LocalGateway, token: str) -> tuple[Process, list[str]]:
    """The process of a machine that registers, and what it says until it is ready or ends."""
    folder = swarm.folder / "node"
    remind(folder)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "molink.peer", "access", "--gateway", gateway.url, "--model", BUNDLED,
        "--layers", "6:12", "--name", "node", "--state-dir", str(folder),
        stdout=PIPE, stderr=PIPE, env=swarm.environment | {"MOLINK_ACCESS_TOKEN": token},
    )  # fmt: skip
    assert process.stdout is not None
    said: list[str] = []
    async with asyncio.timeout(DEADLINE_S):
        while line := (await process.stdout.readline()).decode().strip():
            said.append(line)
            if line == "ready":
                break
    return process, said


async def completion(http: httpx.AsyncClient, key: str, tokens: int = NEW_TOKENS) -> dict[str, Any]:
    body = {"model": BUNDLED, "prompt": PROMPT, "temperature": 0, "max_tokens": tokens, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_a_machine_registers_serves_is_seen_by_its_operator_alone_and_exits(
    references: References, tmp_path: Path
) -> None:
    folder, state = bundled_folder(), tmp_path / "log.state"
    prompt = references.ids(folder, PROMPT)
    operator = await new_key(state, KeyScope.OPERATE)
    token, user = await new_key(state, KeyScope.ACCESS), await new_key(state, KeyScope.USE)
    async with ForkedSwarm() as swarm:
        volunteer = await swarm.join("front", "--model", BUNDLED, "--layers", "0:6")
        async with (
            ForkedLocalGateway(swarm.addresses, tmp_path / "log") as gateway,
            operating(gateway, operator) as http,
        ):
            process, said = await access(swarm, gateway, token)
            try:
                assert said[-1] == "ready", said
                assert said[0].startswith(f"Registered with {gateway.url}: this machine takes the orders of ")
                listed = (await http.get(NODES)).json()
                assert said[0].endswith(listed["operator"])
                [node] = listed["data"]
                assert node["descriptor"]["memory_bytes"] > 0
                expected = references.text(folder, references.greedy(folder, prompt, NEW_TOKENS))
                assert (await completion(http, user))["choices"][0]["text"] == expected

                status = (await http.get(f"{NODES}/{node['peer_id']}")).json()["status"]
                assert (status["name"], status["spans"], status["draining"]) == ("node", [[6, 12]], False)
                assert status["load"]["process_bytes"] > 0
                assert status["addresses"]
                refused = await http.post(f"{NODES}/{volunteer.peer_id}/drain", json={})
                assert refused.status_code == 404
                async with AsyncSwarm(BUNDLED, initial_peers=swarm.addresses) as stranger:
                    for action in ("status", "drain", "leave"):
                        with pytest.raises(InvalidRequest, match="takes no orders from you"):
                            await stranger.order(node["peer_id"], action)

                running = asyncio.create_task(completion(http, user, STREAMED_TOKENS))
                begun = (await http.delete(f"{NODES}/{node['peer_id']}")).json()["operation"]
                outcome = await ended(http, begun)
                assert (outcome["state"], outcome["kind"]) == ("succeeded", "exit"), outcome
                async with asyncio.timeout(DEADLINE_S):
                    assert await process.wait() == 0
                    assert (await running)["usage"]["completion_tokens"] == STREAMED_TOKENS
                assert (await http.get(NODES)).json()["data"] == []
                async with asyncio.timeout(DEADLINE_S):  # gateways hear of it within a second
                    while (await http.get("/v1/models", headers=bearer(token))).status_code != 401:
                        pass
                again, _ = await access(swarm, gateway, token)
                assert await again.wait() == 1
                assert again.stderr is not None
                assert b"The key was revoked" in await again.stderr.read()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert volunteer.alive
