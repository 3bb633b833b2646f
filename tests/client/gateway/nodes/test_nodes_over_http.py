"""Nodes over a scripted swarm: machines register with a token each, tell how they are, are drained, and exit."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.gateways.eventually import eventually
from support.gateways.gateway_keys import bearer, id_of, make_key
from support.swarms.fake_swarm import DEADLINE_S, MODEL, FakeSwarm, error_of, gateway

from molink.client.errors import InvalidRequest
from molink.client.gateway.accounts.api_keys import KeyLimits, KeyScope
from molink.dht.identity.identity import Identity

NODES = "/admin/v1/nodes"
PEER = Identity.generate().peer_id
MACHINE = {"hostname": "attic", "system": "Linux", "system_version": "#1", "memory_bytes": 2**34}
HOSTILE = "Robert'); DROP TABLE nodes;-- <script>alert(1)</script>"


@contextmanager
def serving(swarm: FakeSwarm, folder: Path) -> Iterator[tuple[httpx.Client, str, str]]:
    """An operator's client, that key, and a token."""
    operator = make_key(folder, scopes=frozenset({KeyScope.OPERATE}))
    token = make_key(folder, scopes=frozenset({KeyScope.ACCESS}))
    with (
        gateway(swarm, accounts=(None, folder)) as url,
        httpx.Client(base_url=url, timeout=DEADLINE_S, headers=bearer(operator)) as http,
    ):
        yield http, operator, token


def register(http: httpx.Client, token: str, peer_id: str = PEER, **changes: object) -> httpx.Response:
    body = {"peer_id": peer_id, "node": MACHINE | changes}
    return http.post(f"{NODES}/access", json=body, headers=bearer(token))


def ended(http: httpx.Client, operation: dict[str, Any]) -> dict[str, Any]:
    path = f"/admin/v1/operations/{operation['id']}"
    eventually(lambda: http.get(path).json()["state"] != "running")
    return dict(http.get(path).json())


def test_a_machine_registers_tells_how_it_is_and_exits_in_three_stages(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    swarm.commanded[PEER] = 3
    with serving(swarm, tmp_path) as (http, _, token):
        told = register(http, token, hostname=HOSTILE)
        assert told.status_code == 201
        assert told.headers["cache-control"] == "no-store"
        assert told.json() == {
            "object": "node",
            "peer_id": PEER,
            "operator": swarm.gateway_id,
            "initial_peers": ["/invited", "/known"],
            "swarm_key": "the line of a key",
            "model": None,
        }
        [node] = http.get(NODES).json()["data"]
        assert (node["token_id"], node["descriptor"]["hostname"]) == (id_of(token), HOSTILE)
        status = http.get(f"{NODES}/{PEER}").json()
        assert (status["reachable"], status["status"]["sessions"]) == (True, 3)

        begun = http.delete(f"{NODES}/{PEER}").json()["operation"]
        outcome = ended(http, begun)
        assert (outcome["state"], outcome["kind"], outcome["progress"]) == ("succeeded", "exit", 1.0)
        drain, *polls, leave = [order for _, order in swarm.orders if order != "status"]
        assert (drain, polls, leave) == ("drain", [], "leave")
        assert http.get(NODES).json()["data"] == []
        assert http.get(f"{NODES}/{PEER}").status_code == 404
        eventually(lambda: register(http, token).status_code != 201)
        again = register(http, token)
        assert (again.status_code, error_of(again)["code"]) == (401, "invalid_api_key")


def test_a_machine_without_a_model_is_told_its_tokens_or_what_services_lack(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    own = make_key(
        tmp_path, scopes=frozenset({KeyScope.ACCESS}), limits=KeyLimits(models=("somebody/other-model",))
    )
    swarm.held.may_stand.clear()
    with serving(swarm, tmp_path) as (http, _, token):
        assert register(http, own, Identity.generate().peer_id).json()["model"] == "somebody/other-model"
        assert register(http, token).json()["model"] is None
        asked = {"name": "poet", "model": MODEL}
        assert http.post("/admin/v1/services", json=asked).status_code == 202
        eventually(lambda: bool(register(http, token).json()["model"] == MODEL))
        swarm.held.may_stand.set()
        eventually(lambda: register(http, token).json()["model"] is None)


@pytest.mark.full
def test_a_drained_node_stays_and_takes_sessions_again_if_that_is_cancelled(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    swarm.commanded[PEER] = 2
    with serving(swarm, tmp_path) as (http, _, token):
        register(http, token)
        assert (
            ended(http, http.post(f"{NODES}/{PEER}/drain", json={}).json()["operation"])["state"]
            == "succeeded"
        )
        assert [order for _, order in swarm.orders if order in ("resume", "leave")] == []
        swarm.commanded[PEER] = 1_000_000
        begun = http.post(f"{NODES}/{PEER}/drain", json={}).json()["operation"]
        assert http.post(f"{NODES}/{PEER}/drain", json={}).json()["operation"]["id"] == begun["id"]
        http.delete(f"/admin/v1/operations/{begun['id']}")
        assert ended(http, begun)["state"] == "cancelled"
        assert swarm.orders[-1] == (PEER, "resume")
        assert len(http.get(NODES).json()["data"]) == 1


def test_a_node_that_is_to_serve_another_model_does_so_or_says_why_not(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    swarm.commanded[PEER] = 1
    with serving(swarm, tmp_path) as (http, _, token):
        register(http, token)
        begun = http.post(f"{NODES}/{PEER}/serve", json={"model": "Qwen/Qwen3-8B"})
        assert (begun.status_code, begun.json()["operation"]["kind"]) == (202, "serve")
        outcome = ended(http, begun.json()["operation"])
        assert (outcome["state"], outcome["message"]) == ("succeeded", "It serves Qwen/Qwen3-8B.")
        swarm.not_served = "Qwen/Qwen3-32B cannot be served: it does not fit"
        begun = http.post(f"{NODES}/{PEER}/serve", json={"model": "Qwen/Qwen3-32B"})
        outcome = ended(http, begun.json()["operation"])
        assert (outcome["state"], outcome["message"]) == ("failed", swarm.not_served)


def test_an_order_that_a_node_does_not_take_begins_no_operation(swarm: FakeSwarm, tmp_path: Path) -> None:
    swarm.order_error = InvalidRequest("peer 12D3 refused: a model that is ordered ...", "peer_id")
    with serving(swarm, tmp_path) as (http, _, token):
        assert http.post(f"{NODES}/{PEER}/serve", json={"model": "a/b"}).status_code == 404
        register(http, token)
        refused = http.post(f"{NODES}/{PEER}/serve", json={"model": "/etc"})
        assert (refused.status_code, error_of(refused)["param"]) == (400, "peer_id")
        swarm.order_error = None
        gone = http.post(f"{NODES}/{PEER}/serve", json={"model": "a/b"})
        assert gone.status_code == 503
        for body in ({}, {"model": ""}, {"model": 3}, {"model": "a/b", "more": 1}):
            assert http.post(f"{NODES}/{PEER}/serve", json=body).status_code == 400


def test_what_was_begun_goes_on_when_the_gateway_starts_again(swarm: FakeSwarm, tmp_path: Path) -> None:
    swarm.commanded[PEER] = 1_000_000
    with serving(swarm, tmp_path) as (http, _, token):
        register(http, token)
        begun = http.delete(f"{NODES}/{PEER}").json()["operation"]
    again = FakeSwarm(commanded={PEER: 1})
    with serving(again, tmp_path) as (http, _, _):
        assert ended(http, begun)["state"] == "succeeded"
        assert http.get(NODES).json()["data"] == []


@pytest.mark.full
def test_a_node_that_is_gone_already_loses_its_registration_all_the_same(
    swarm: FakeSwarm, tmp_path: Path
) -> None:
    with serving(swarm, tmp_path) as (http, _, token):
        register(http, token)
        status = http.get(f"{NODES}/{PEER}").json()
        assert (status["reachable"], status["status"]) == (False, None)
        assert (
            ended(http, http.post(f"{NODES}/{PEER}/drain", json={}).json()["operation"])["state"] == "failed"
        )
        assert ended(http, http.delete(f"{NODES}/{PEER}").json()["operation"])["state"] == "succeeded"
        assert http.get(NODES).json()["data"] == []


@pytest.mark.parametrize("order", ["status", "drain", "serve", "exit"])
def test_a_node_that_has_joined_a_moment_ago_is_waited_for(
    order: str, swarm: FakeSwarm, tmp_path: Path
) -> None:
    swarm.commanded[PEER] = 0
    with serving(swarm, tmp_path) as (http, _, _):
        swarm.joins_after = 1  # the first time that it is asked it is not known here
        if order == "status":
            told = http.get(f"{NODES}/{PEER}")
            assert (told.status_code, told.json()["reachable"]) == (200, True)
            return
        body = {"model": "a/b"} if order == "serve" else {}
        begun = (
            http.delete(f"{NODES}/{PEER}")
            if order == "exit"
            else http.post(f"{NODES}/{PEER}/{order}", json=body)
        )
        assert begun.status_code == 202, begun.text
        assert ended(http, begun.json()["operation"])["state"] == "succeeded"


def test_a_peer_that_takes_no_orders_from_here_is_not_commanded(swarm: FakeSwarm, tmp_path: Path) -> None:
    swarm.order_error = InvalidRequest("peer 12D3 refused: this peer takes no orders from you", "peer_id")
    with serving(swarm, tmp_path) as (http, _, token):
        for method, path in (("GET", ""), ("POST", "/drain"), ("DELETE", "")):
            body = {} if method == "POST" else None
            assert http.request(method, f"{NODES}/{PEER}{path}", json=body).status_code == 404
        register(http, token)
        outcome = ended(http, http.delete(f"{NODES}/{PEER}").json()["operation"])
        assert outcome["state"] == "failed"
        assert "takes no orders from you" in outcome["message"]
        assert len(http.get(NODES).json()["data"]) == 1


def test_a_token_registers_one_machine_and_opens_nothing_else(swarm: FakeSwarm, tmp_path: Path) -> None:
    with serving(swarm, tmp_path) as (http, operator, token):
        assert register(http, token).status_code == 201
        assert register(http, token).status_code == 201  # the same one, started again
        other = register(http, token, Identity.generate().peer_id)
        assert (other.status_code, error_of(other)["code"]) == (409, "token_used")
        for path in (NODES, "/v1/models", "/metrics", "/admin/v1/services"):
            assert http.get(path, headers=bearer(token)).status_code == 403
        for key in (operator, make_key(tmp_path)):
            assert register(http, key).status_code == 403
        assert register(http, "sk-molink-x").status_code == 401
        assert http.post(f"{NODES}/access/", json={}, headers=bearer(token)).status_code in (403, 404, 307)


def test_a_refusal_names_the_parameter(swarm: FakeSwarm, tmp_path: Path) -> None:
    with serving(swarm, tmp_path) as (http, _, token):
        for body, parameter in (
            ({"node": MACHINE}, "peer_id"),
            ({"peer_id": "x", "node": MACHINE}, "peer_id"),
            ({"peer_id": PEER}, "node"),
            ({"peer_id": PEER, "node": MACHINE | {"hostname": "a" * 301}}, "node.hostname"),
            ({"peer_id": PEER, "node": MACHINE | {"memory_bytes": -1}}, "node.memory_bytes"),
            ({"peer_id": PEER, "node": MACHINE | {"gpus": [{"name": "x"}]}}, "node.gpus.0.maker"),
            ({"peer_id": PEER, "node": MACHINE | {"more": 1}}, "node.more"),
            ({"peer_id": PEER, "node": MACHINE, "operator": PEER}, "operator"),
        ):
            refused = http.post(f"{NODES}/access", json=body, headers=bearer(token))
            assert (refused.status_code, error_of(refused)["param"]) == (400, parameter), json.dumps(body)
        assert http.get(f"{NODES}/{HOSTILE.replace('/', '')}").status_code == 404
