"""Homes behind NATs join a swarm and serve: real processes in namespaces, one volunteer that others can dial."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.links.home_peers import HomePeer, invited_by
from support.links.namespaces import INSIDE, Internet, require_namespaces, run
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

pytestmark = [pytest.mark.real, pytest.mark.full]

PROMPT = "To be, or not to be"
TOKENS = 40
CLIENT = f"""
import asyncio, json, sys
from molink import SamplingParams
from molink.client.api.swarm import AsyncSwarm

async def main():
    async with AsyncSwarm({BUNDLED!r}, initial_peers=sys.argv[1:]) as swarm:
        params = SamplingParams(max_new_tokens={TOKENS}, temperature=0.0)
        generation = await swarm.generate({PROMPT!r}, params=params, timeout_s=120)
        print(json.dumps([list(generation.token_ids), len(generation.circuit.hops)]))

asyncio.run(main())
"""


def examined(net: Internet, name: str, *options: str) -> dict[str, Any]:
    """What the doctor says in a namespace."""
    command = net.command(name, sys.executable, "-m", "molink.peer", "doctor", "--json", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return dict(json.loads(done.stdout))


def test_a_circuit_over_two_homes_that_nobody_can_dial_gives_a_third_home_transformers_tokens(
    tmp_path: Path,
) -> None:
    require_namespaces()
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        volunteer = HomePeer(
            stack, net, net.volunteer("192.0.2.1"), tmp_path / "volunteer", "--new-swarm", "--layers", "0:4",
            "--listen", "192.0.2.1", "--announce", "192.0.2.1", "--relay-port", "443",
        )  # fmt: skip
        invited = invited_by(volunteer.ready())
        homes = [
            HomePeer(
                stack,
                net,
                net.home(kind, host),
                tmp_path / kind,
                "--initial-peers",
                invited,
                "--layers",
                span,
            )
            for kind, host, span in (
                ("port", "203.0.113.10", "4:8"),
                ("symmetric", "203.0.114.20", "8:12"),
            )
        ]
        for home in homes:
            said = home.ready()
            assert "Nobody can dial this peer: others reach it over 192.0.2.1" in said
            assert not any("Invite others" in line for line in said)
        third = net.home("carrier", "203.0.115.30")
        newcomer = examined(net, third, "--initial-peers", invited, "--state-dir", str(tmp_path / "third"))
        assert newcomer["router"] == "unknown", "one relay alone cannot tell"
        assert [relay["reaches"] for relay in newcomer["relays"]] == [False]
        assert [one["way"] for one in newcomer["ways"] if one["took_s"] is None] == ["reversed"]
        beside = examined(net, homes[0].name, "--state-dir", str(homes[0].folder))
        assert beside["peer_id"]
        assert [relay["sees"].rpartition(":")[0] for relay in beside["relays"]] == ["203.0.113.10"]
        assert {"direct", "relayed"} <= {one["way"] for one in beside["ways"] if one["took_s"] is not None}
        assert generated(net, third, invited) == transformers_tokens(hops=3)


def test_the_doctor_says_whether_who_cannot_be_dialled_comes_to_a_machine_that_can(tmp_path: Path) -> None:
    require_namespaces()
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        founder = HomePeer(
            stack, net, net.volunteer("192.0.2.1"), tmp_path / "founder", "--new-swarm", "--layers", "0:1",
            "--listen", "192.0.2.1", "--announce", "192.0.2.1", "--relay-port", "443",
        )  # fmt: skip
        invited = invited_by(founder.ready())
        for host, closed in (("198.51.100.2", ""), ("198.51.100.3", "4003")):
            name = net.host(host)
            if closed:
                arriving = f"type filter hook input priority 0; tcp dport {closed} drop;"
                drops = f"table ip firewall {{ chain arriving {{ {arriving} }}; }}"
                run("ip", "netns", "exec", name, "nft", drops)
            said = examined(
                net, name, "--initial-peers", invited, "--state-dir", str(tmp_path / name),
                "--grpc-port", "4002", "--relay-port", "4003",
            )  # fmt: skip
            (tried,) = (one for one in said["ways"] if one["way"] == "reversed")
            (check,) = (one for one in said["checks"] if one["name"] == "way reversed")
            assert tried["to"] == f"{host}:4003"
            assert (tried["took_s"] is None, "--relay-port" in check["remedy"]) == (
                bool(closed),
                bool(closed),
            )
        container = net.home("full", "203.0.113.10")
        net.forward("203.0.113.10", {4002: 4002})
        said = examined(
            net, container, "--initial-peers", invited, "--state-dir", str(tmp_path / "container"),
            "--grpc-port", "4002",
        )  # fmt: skip
        assert [relay["reaches"] for relay in said["relays"]] == [True]
        (tried,) = (one for one in said["ways"] if one["way"] == "reversed")
        assert "only they could try" in tried["why_not"], (
            "this router does not pass its own address on from inside"
        )


def test_a_host_that_may_only_open_connections_to_port_443_serves(tmp_path: Path) -> None:
    require_namespaces()
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        founder = HomePeer(
            stack, net, net.volunteer("192.0.2.1"), tmp_path / "founder", "--new-swarm", "--layers", "0:6",
            "--listen", "192.0.2.1", "--announce", "192.0.2.1", "--port", "443",
        )  # fmt: skip
        invited = invited_by(founder.ready())
        HomePeer(
            stack, net, net.volunteer("198.51.100.2"), tmp_path / "relay", "--initial-peers", invited, "--layers",
            "0:6", "--listen", "198.51.100.2", "--announce", "198.51.100.2", "--relay-port", "443",
        ).ready()  # fmt: skip
        blocked = net.home("blocked", "203.0.113.10")
        home = HomePeer(
            stack, net, blocked, tmp_path / "blocked", "--initial-peers", invited, "--layers", "6:12"
        )
        assert "Nobody can dial this peer: others reach it over 198.51.100.2" in home.ready()
        assert generated(net, net.home("port", "203.0.114.20"), invited) == transformers_tokens(hops=2)


def test_a_container_whose_ports_are_mapped_to_others_serves_where_it_says(tmp_path: Path) -> None:
    require_namespaces()
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        container = net.home("port", "203.0.113.10")
        net.forward("203.0.113.10", {34001: 4001, 34002: 4002})
        founder = HomePeer(
            stack, net, container, tmp_path / "container", "--new-swarm", "--layers", "0:6", "--listen", INSIDE,
            "--port", "4001", "--grpc-port", "4002", "--announce", "203.0.113.10:34001:34002",
        )  # fmt: skip
        invited = invited_by(founder.ready())
        assert "/ip4/203.0.113.10/tcp/34001/" in invited
        volunteer = net.volunteer("192.0.2.1")
        HomePeer(
            stack, net, volunteer, tmp_path / "volunteer", "--initial-peers", invited, "--layers", "6:12",
            "--announce", "192.0.2.1",
        ).ready()  # fmt: skip
        assert generated(net, volunteer, invited) == transformers_tokens(hops=2)


def test_a_client_that_was_told_of_no_swarm_asks_the_one_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_namespaces()
    monkeypatch.setenv("MOLINK_LOCAL_NETWORK", "on")
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    (tmp_path / "config.toml").write_text("")
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        home = net.home("port", "203.0.113.10")
        HomePeer(
            stack, net, home, tmp_path / "founder", "--new-swarm", "--layers", "0:12", "--listen", INSIDE
        ).ready()
        assert generated(net, home) == transformers_tokens(hops=1)


def generated(net: Internet, name: str, *invited: str) -> str:
    """What a client in a namespace prints."""
    client = net.command(name, sys.executable, "-c", CLIENT, *invited)
    done = subprocess.run(client, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def transformers_tokens(hops: int) -> str:
    references, folder = References(), bundled_folder()
    expected = references.greedy(folder, references.ids(folder, PROMPT), TOKENS)
    return str([list(expected), hops])
