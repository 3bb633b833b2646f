"""`molink-gateway services` against a gateway that runs: what it prints, and how it fails."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.gateways.gateway_keys import make_key
from support.swarms.fake_swarm import MODEL, FakeSwarm, gateway

from molink.client.errors import SwarmUnavailable
from molink.client.gateway import cli
from molink.client.gateway.accounts.api_keys import KeyScope, parse_key

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def url(swarm: FakeSwarm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    key = make_key(tmp_path, scopes=frozenset({KeyScope.OPERATE}))
    with gateway(swarm, accounts=(None, tmp_path)) as url:
        monkeypatch.setenv("MOLINK_GATEWAY", url)
        monkeypatch.setenv("MOLINK_OPERATOR_KEY", key)
        yield url


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["services", *arguments])
        out, err = capsys.readouterr()
        return int(str(ended.value.code)), out, err

    return command


def document(done: tuple[int, str, str]) -> dict[str, Any]:
    code, out, err = done
    assert (code, err) == (0, "")
    return dict(json.loads(out))


@pytest.mark.usefixtures("url")
def test_a_service_is_deployed_seen_given_a_key_and_deleted(run: Run, swarm: FakeSwarm) -> None:
    code, out, _ = run(
        "deploy", "poet", "--model", MODEL, "--minimum", "2", "--parameter", "temperature=0.5",
        "--parameter", 'stop=["."]', "--memory", "1kB",
    )  # fmt: skip
    assert (code, out, swarm.held.count) == (0, "The service runs.\n", 2)
    status = document(run("status", "poet", "--json"))
    assert (status["state"], status["parameters"]) == ("running", {"temperature": 0.5, "stop": ["."]})
    code, out, _ = run("status")
    assert code == 0
    assert out.startswith(f"poet: running, {MODEL}; up ")
    code, out, err = run("key", "poet", "--overlap", "0s")
    assert (code, parse_key(out.strip()) is not None) == (0, True)
    assert "shown this once" in err
    assert document(run("delete", "poet", "--json"))["state"] == "succeeded"
    assert run("status")[1].startswith("There are no services")


@pytest.mark.usefixtures("url")
def test_a_preview_that_does_not_fit_says_how_much_is_missing(run: Run, swarm: FakeSwarm) -> None:
    swarm.room = 1
    code, out, err = run("deploy", "poet", "--model", MODEL, "--minimum", "2", "--preview")
    assert (code, out.splitlines()[-1]) == (1, "To load: 0 bytes")
    assert "it does not fit: 4096 bytes are missing" in err
    assert document(run("deploy", "poet", "--model", MODEL, "--preview", "--json"))["routing"]["possible"]
    assert swarm.held.most == 0


@pytest.mark.usefixtures("url")
def test_a_deployment_that_fails_is_a_failure_with_its_reason(run: Run, swarm: FakeSwarm) -> None:
    swarm.held.error = SwarmUnavailable("peer 12D3 has no room")
    code, out, err = run("deploy", "poet", "--model", MODEL)
    assert (code, out) == (1, "")
    assert "failed: Not deployed: peer 12D3 has no room" in err


MISTAKES: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (
        ("deploy", "Poet", "--model", MODEL),
        2,
        "name must be of a-z, 0-9 and hyphens, 63 at most, such as poet",
    ),
    (
        ("deploy", "p" * 64, "--model", MODEL),
        2,
        "name must be of a-z, 0-9 and hyphens, 63 at most, such as poet",
    ),
    (("deploy", "poet", "--model", "nobody/nothing"), 1, "nobody/nothing"),
    (("deploy", "poet", "--model", MODEL, "--parameter", "x"), 2, "NAME=VALUE"),
    (("deploy", "poet", "--model", MODEL, "--memory", "much"), 2, "such as 10GB"),
    (("deploy", "poet", "--model", MODEL, "--key", "sk-molink-x"), 1, "not one of this gateway's"),
    (("status", "../../v1/models"), 1, "no such path"),
    (("key", "nobody"), 1, "no service"),
    (("delete", "nobody"), 1, "no service"),
    (("delete", "nobody"), 1, "`molink-gateway services status` lists what there is"),
    (("status", "--gateway", "ftp://x"), 2, "--gateway takes a URL"),
    (("status", "--gateway", "http://127.0.0.1:9"), 1, "cannot be reached"),
)


@pytest.mark.usefixtures("url")
def test_a_mistake_is_one_sentence(run: Run) -> None:
    for arguments, code, said in MISTAKES:
        status, out, err = run(*arguments)
        assert (status, out, err.count("\n")) == (code, "", 1), arguments
        assert said in err


@pytest.mark.usefixtures("url")
@pytest.mark.parametrize("arguments", [("status", "poet"), ("deploy", "poet", "--model", MODEL)])
def test_without_a_key_the_command_says_where_it_takes_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.delenv("MOLINK_OPERATOR_KEY")
    status, out, err = run(*arguments)
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "This gateway asks for a key." in err
    assert "--key KEY or from MOLINK_OPERATOR_KEY" in err
    assert "MOLINK_OPERATOR_KEY" not in run(*arguments, "--key", "sk-molink-x")[2]
