"""A machine behind a NAT, which nobody can dial, registers, serves, is commanded over a relay, and exits."""

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.gateways.gateway_keys import make_key
from support.links.home_peers import HomePeer, invited_by
from support.links.namespaces import Internet, require_namespaces
from support.swarms.live_swarms import BUNDLED, References, bundled_folder

from molink.client.gateway.accounts.api_keys import KeyScope

pytestmark = [pytest.mark.real, pytest.mark.full]

RELAY, GATEWAY, HOME = "192.0.2.1", "198.51.100.2", "203.0.113.10"
URL = f"http://{GATEWAY}:8000"
PROMPT = "To be, or not to be"
TOKENS = 16
ASK = """
import httpx, json, sys
url, key, model, prompt, tokens = sys.argv[1:]
body = {"model": model, "prompt": prompt, "max_tokens": int(tokens), "temperature": 0}
headers = {"Authorization": f"Bearer {key}"}
answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=300)
print(json.dumps(answer.json()))
"""


def told(net: Internet, place: str, *command: str) -> dict[str, Any]:
    """The JSON document that a program prints in a namespace."""
    done = subprocess.run(
        net.command(place, sys.executable, *command), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return dict(json.loads(done.stdout))


def test_a_machine_without_incoming_connections_registers_serves_and_exits(tmp_path: Path) -> None:
    require_namespaces()
    state = tmp_path / "gateway"
    operator, user, token = (
        make_key(state, scopes=frozenset({scope}))
        for scope in (KeyScope.OPERATE, KeyScope.USE, KeyScope.ACCESS)
    )
    with ExitStack() as stack:
        net = stack.enter_context(Internet())
        volunteer = HomePeer(
            stack, net, net.volunteer(RELAY), tmp_path / "volunteer", "--new-swarm", "--layers", "0:6",
            "--listen", RELAY, "--announce", RELAY, "--relay-port", "443",
        )  # fmt: skip
        invited = invited_by(volunteer.ready())
        place = net.host(GATEWAY)
        gateway = subprocess.Popen(
            net.command(
                place, sys.executable, "-m", "molink.client.gateway", "--host", GATEWAY, "--port", "8000",
                "--initial-peers", invited, "--state-dir", str(state),
            ),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        stack.callback(gateway.communicate)
        stack.callback(gateway.kill)
        assert gateway.stdout is not None
        assert gateway.stdout.readline().startswith(f"Listening on {URL}")

        home = HomePeer(
            stack, net, net.home("symmetric", HOME), tmp_path / "home", "--gateway", URL, "--token", token,
            "--layers", "6:12", command="access",
        )  # fmt: skip
        said = home.ready()
        assert said[0].startswith(f"Registered with {URL}: ")
        assert f"Nobody can dial this peer: others reach it over {RELAY}" in said

        nodes = ("-m", "molink.client.gateway", "nodes")
        spoken = ("--gateway", URL, "--key", operator, "--json")
        [node] = told(net, place, *nodes, "list", *spoken)["data"]
        references, folder = References(), bundled_folder()
        expected = references.greedy(folder, references.ids(folder, PROMPT), TOKENS)
        answer = told(net, place, "-c", ASK, URL, user, BUNDLED, PROMPT, str(TOKENS))
        assert answer["choices"][0]["text"] == references.text(folder, expected)
        status = told(net, place, *nodes, "status", node["peer_id"], *spoken)
        assert (status["reachable"], status["status"]["spans"]) == (True, [[6, 12]])
        outcome = told(net, place, *nodes, "exit", node["peer_id"], *spoken)
        assert (outcome["state"], outcome["kind"]) == ("succeeded", "exit")
        assert home.left() == 0
        assert "Leaving, as its operator orders" in home.said
        assert told(net, place, *nodes, "list", *spoken)["data"] == []
