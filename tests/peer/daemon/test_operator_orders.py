"""Orders over real links: a peer takes its operator's, whoever else asks, and does nothing for anybody without one."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous
from support.swarms.live_swarms import BUNDLED

from molink.dht.identity.identity import Identity
from molink.peer.daemon.operator_orders import OperatorOrders, OrderRefused
from molink.peer.daemon.settings import SettingsError, load_settings
from molink.peer.device.machine_status import describe_machine, read_machine_status
from molink.peer.wire.protocol import molink_pb2 as pb


@dataclass
class Commanded:
    """A peer that writes down what it is ordered."""

    done: list[str] = field(default_factory=list)
    refuses: bool = False
    fails: bool = False

    async def report(self) -> dict[str, Any]:
        return self._note("status")

    async def drain(self) -> dict[str, Any]:
        return self._note("drain")

    async def resume(self) -> dict[str, Any]:
        return self._note("resume")

    async def depart(self) -> dict[str, Any]:
        return self._note("leave")

    async def serve(self, model: str) -> dict[str, Any]:
        return self._note(f"serve {model}")

    def _note(self, order: str) -> dict[str, Any]:
        if self.refuses:
            raise OrderRefused("this peer is still starting")
        if self.fails:
            raise KeyError("secret")
        self.done.append(order)
        return {"did": order}


async def ordered(client: End, peer: End, action: str, model: str = "") -> dict[str, Any]:
    """What the peer answers: its report, or its refusal."""
    link = await client.links.to(peer.facts)
    response, payload = await link.request(pb.Request(order=pb.Order(action=action, model=model)), DEADLINE_S)
    if response.HasField("refusal"):
        return {"refused": response.refusal.code, "detail": response.refusal.detail}
    assert response.content.total_bytes == len(payload)
    return dict(json.loads(bytes(payload)))


def commanding(peer: End, commanded: Commanded, *operators: str) -> None:
    """From now on that peer takes the orders of these."""
    behind = type(peer.handler)()
    peer.handler.answer = OperatorOrders(behind, operators, commanded).on_request


@asynchronous
async def test_the_operators_orders_are_carried_out_and_nobody_elses() -> None:
    operator, commanded = Identity.generate(), Commanded()
    async with (
        End(needed=True) as peer,
        End(is_client=True, identity=operator) as gateway,
        End(is_client=True) as stranger,
        End(needed=True) as member,
    ):
        commanding(peer, commanded, operator.peer_id)
        for action in ("status", "drain", "resume", "leave"):
            assert await ordered(gateway, peer, action) == {"did": action}
        assert commanded.done == ["status", "drain", "resume", "leave"]
        for other in (stranger, member):
            for action in ("status", "drain", "leave", "no such order"):
                refused = await ordered(other, peer, action)
                assert refused == {"refused": "request", "detail": "this peer takes no orders from you"}
        assert len(commanded.done) == 4
        assert (await ordered(gateway, peer, "no such order"))["refused"] == "request"
        link = await stranger.links.to(peer.facts)
        response, _ = await link.request(pb.Request(get_manifest=pb.GetManifest()), DEADLINE_S)
        assert response.HasField("released")  # all else goes on to what is behind


@asynchronous
async def test_an_operator_commands_no_peer_of_another_operator_and_none_without() -> None:
    own, other = Identity.generate(), Identity.generate()
    async with (
        End(needed=True) as theirs,
        End(needed=True) as free,
        End(is_client=True, identity=own) as gateway,
    ):
        done = Commanded(), Commanded()
        commanding(theirs, done[0], other.peer_id)
        commanding(free, done[1])
        for peer in (theirs, free):
            assert (await ordered(gateway, peer, "drain"))["refused"] == "request"
        assert [one.done for one in done] == [[], []]


@asynchronous
async def test_a_model_that_is_ordered_is_no_folder_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator, commanded = Identity.generate(), Commanded()
    (tmp_path / "own" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    async with (
        End(needed=True) as peer,
        End(is_client=True, identity=operator) as gateway,
        End(is_client=True) as stranger,
    ):
        commanding(peer, commanded, operator.peer_id)
        for model in (BUNDLED, "Qwen/Qwen3-8B"):
            assert await ordered(gateway, peer, "serve", model) == {"did": f"serve {model}"}
            assert (await ordered(stranger, peer, "serve", model))["refused"] == "request"
        for model in ("", "own/model", str(tmp_path), "~/model", "../own/model", "a/b/c", "x" * 500):
            refused = await ordered(gateway, peer, "serve", model)
            assert refused["refused"] == "request", model
            assert "a hub's name" in refused["detail"]
        assert len(commanded.done) == 2


@asynchronous
async def test_an_order_that_cannot_be_carried_out_says_so_and_what_fails_says_nothing_of_it() -> None:
    operator, commanded = Identity.generate(), Commanded(refuses=True)
    async with End(needed=True) as peer, End(is_client=True, identity=operator) as gateway:
        commanding(peer, commanded, operator.peer_id)
        assert await ordered(gateway, peer, "leave") == {
            "refused": "busy",
            "detail": "this peer is still starting",
        }
        commanded.refuses, commanded.fails = False, True
        assert await ordered(gateway, peer, "drain") == {
            "refused": "internal",
            "detail": "this peer failed; see its log",
        }


def test_an_operator_is_an_identity(tmp_path: Path) -> None:
    identity = Identity.generate().peer_id
    (tmp_path / "config.toml").touch()
    environment = {"MOLINK_CONFIG": str(tmp_path / "config.toml")}
    given = {"operator": [identity], "new_swarm": True}
    assert load_settings(given, environment).options.operator == (identity,)
    with pytest.raises(SettingsError, match="--operator me: use the identity"):
        load_settings({"operator": ["me"], "new_swarm": True}, environment)


def test_a_machine_tells_what_it_is_and_does_and_nothing_of_its_user() -> None:
    machine, load = describe_machine(), read_machine_status()
    assert machine["processors"] >= 1
    assert 0 < load["memory_used_bytes"] < load["memory_total_bytes"] == machine["memory_bytes"]
    assert 0 <= load["cpu_percent"] <= 100
    assert load["process_bytes"] > 2**20
    told = json.dumps(machine | load)
    assert "127.0.0.1" not in told
