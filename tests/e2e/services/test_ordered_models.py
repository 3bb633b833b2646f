"""An operator has a running peer serve another model: it answers with that one, and with its own where it cannot."""

import asyncio
from pathlib import Path

import httpx
import pytest
from support.gateways.forked_gateway import ForkedLocalGateway
from support.gateways.gateway_keys import bearer
from support.gateways.operators import DEADLINE_S, ended, new_key, operating
from support.swarms.forked_peers import ForkedSwarm
from support.swarms.live_swarms import BUNDLED

from molink.client.gateway.accounts.api_keys import KeyScope
from molink.shards.checkpoint.catalog import BUNDLED as BUNDLED_MODELS

pytestmark = [pytest.mark.real, pytest.mark.full, pytest.mark.anyio]

NODES = "/admin/v1/nodes"
OTHER = next(name for name in BUNDLED_MODELS if name != BUNDLED)
NOWHERE = "nobody/has-this-model"


async def answer(http: httpx.AsyncClient, key: str, model: str) -> str:
    body = {"model": model, "prompt": "ROMEO:", "temperature": 0, "max_tokens": 8}
    told = await http.post("/v1/completions", json=body, headers=bearer(key))
    assert told.status_code == 200, told.text
    return str(told.json()["choices"][0]["text"])


async def seen(http: httpx.AsyncClient, peer_id: str) -> None:
    """Returns when the gateway has heard of the peer."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            if (await http.get(f"{NODES}/{peer_id}")).status_code == 200:
                return
            await asyncio.sleep(0.5)


async def test_a_peer_serves_what_its_operator_orders_and_its_own_model_again_where_it_cannot(
    tmp_path: Path,
) -> None:
    state = tmp_path / "log.state"
    operator, user = await new_key(state, KeyScope.OPERATE), await new_key(state, KeyScope.USE)
    async with ForkedSwarm() as swarm:
        await swarm.join("whole", "--model", BUNDLED, "--layers", "0:12")
        async with (
            ForkedLocalGateway(swarm.addresses, tmp_path / "log") as gateway,
            operating(gateway, operator) as http,
        ):
            identity = (await http.get(NODES)).json()["operator"]
            node = await swarm.join(
                "node", "--model", BUNDLED, "--layers", "0:12", "--operator", identity, "--memory", "1GB"
            )
            await seen(http, node.peer_id)
            first = await answer(http, user, BUNDLED)
            begun = await http.post(f"{NODES}/{node.peer_id}/serve", json={"model": OTHER})
            assert begun.status_code == 202, begun.text
            outcome = await ended(http, begun.json()["operation"])
            assert (outcome["state"], outcome["message"]) == ("succeeded", f"It serves {OTHER}."), outcome
            status = (await http.get(f"{NODES}/{node.peer_id}")).json()["status"]
            assert (status["model"], status["serves_next"], bool(status["spans"])) == (OTHER, None, True)
            assert await answer(http, user, OTHER)
            assert await answer(http, user, BUNDLED) == first

            begun = await http.post(f"{NODES}/{node.peer_id}/serve", json={"model": NOWHERE})
            outcome = await ended(http, begun.json()["operation"])
            assert outcome["state"] == "failed", outcome
            assert outcome["message"].startswith(f"{NOWHERE} cannot be served: ")
            assert await answer(http, user, OTHER)
            assert node.alive
