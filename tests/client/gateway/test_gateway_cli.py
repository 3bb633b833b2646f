"""The gateway as a command, in a process of its own, with a scripted swarm in the place of a real one.

One is started as its users do, the others are forked where they can be. What it says of mistakes before it does
anything is asked for in this process, but for one of them.
"""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
from support.gateways.eventually import eventually
from support.gateways.forked_gateway import ForkedGateway
from support.swarms.fake_swarm import CHAT, TEXT

from molink.client.gateway import cli
from molink.client.gateway.kept_identity import gateway_identity

DEADLINE_S = 120.0
PROGRAM = """
import sys, types
sys.path.insert(0, sys.argv.pop(1))
from support.swarms.fake_swarm import FakeSwarm
from molink.client.errors import SwarmUnavailable

class AsyncSwarm(FakeSwarm):
    def __init__(self, model=None, **options):
        super().__init__()
        self.hangs_at = 1 if model == "hanging" else None
        self.state = {"ready": True, "model": model, **{key: str(value) for key, value in options.items()}}

    async def __aenter__(self):
        self.state["identity"] = self.identity.peer_id
        if self.state["model"] == "nowhere":
            raise SwarmUnavailable("no peer of this swarm can be reached")
        return self

    async def __aexit__(self, *_):
        print("left", flush=True)

sys.modules["molink.client.api.swarm"] = types.SimpleNamespace(AsyncSwarm=AsyncSwarm)
from molink.client.gateway.cli import main
main()
"""


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this user's is used or made."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


Started = subprocess.Popen[str] | ForkedGateway
Start = Callable[..., Started]
Run = Callable[..., tuple[int | None, str, str]]
Running = Callable[..., AbstractContextManager[tuple[Started, str]]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Starts the gateway with such arguments; as its users do if it is to be `anew`."""

    def start_it(*arguments: str, anew: bool = False) -> Started:
        at = [str(Path(__file__).parents[2]), *arguments]
        if sys.platform == "linux" and not anew:
            program, number = tmp_path / "gateway.py", len(list(tmp_path.glob("said-*")))
            program.write_text(PROGRAM)
            log = tmp_path / f"said-{number}"
            log.touch()
            return ForkedGateway(program, at, log)
        group = subprocess.CREATE_NEW_PROCESS_GROUP if sys.platform == "win32" else 0
        command, pipe = [sys.executable, "-c", PROGRAM, *at], subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, creationflags=group)

    return start_it


@pytest.fixture
def run(start: Start) -> Run:
    """Exit status, stdout and stderr of a gateway with such arguments that ends by itself."""

    def run_it(*arguments: str) -> tuple[int | None, str, str]:
        with start(*arguments) as gateway:
            out, err = gateway.communicate(timeout=DEADLINE_S)
        return gateway.returncode, out, err

    return run_it


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(arguments))
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


@pytest.fixture
def running(start: Start) -> Running:
    """(process, what it printed first), with such arguments."""

    @contextmanager
    def running_it(*arguments: str, anew: bool = False) -> Iterator[tuple[Started, str]]:
        with start(*arguments, anew=anew) as process:
            assert process.stdout is not None
            try:
                yield process, process.stdout.readline()
            finally:
                process.kill()

    return running_it


def test_a_host_that_is_not_this_machines_is_at_fault_and_not_the_port(
    capsys: pytest.CaptureFixture[str],
) -> None:
    status, out, err = said(capsys, "--host", "203.0.113.7", "--port", "0")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "--host" in err
    assert "--port" not in err


def test_it_says_where_it_listens_serves_and_stops_on_a_signal(running: Running, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    peers = ("--initial-peers", "/ip4/192.0.2.1/tcp/1/p2p/a", "--initial-peers", "/ip4/192.0.2.2/tcp/2/p2p/b")
    options = ("--port", "0", "--model", "some/model", "--swarm-key", str(key))
    with running(*options, *peers, anew=True) as (process, line):
        assert line.startswith("Listening on http://127.0.0.1:")
        state = httpx.get(f"{line.split()[-1]}/v1/swarm", timeout=DEADLINE_S).json()
        process.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGTERM)
        out, err = process.communicate(timeout=DEADLINE_S)

    assert state["model"] == "some/model"
    assert state["initial_peers"] == str([peers[1], peers[3]])
    assert state["swarm_key"] == str(key)
    assert (process.returncode, out, err) == (0, "left\n", "")


@pytest.mark.full
def test_no_second_gateway_has_the_identity_of_the_first(running: Running, run: Run, tmp_path: Path) -> None:
    named = ("--port", "0", "--state-dir", str(tmp_path / "own"))
    with running(*named) as (_, line):
        state = httpx.get(f"{line.split()[-1]}/v1/swarm", timeout=DEADLINE_S).json()
        status, out, err = run(*named)
    with gateway_identity(tmp_path / "own") as identity:
        assert state["identity"] == identity.peer_id
    assert (status, out) == (1, "")
    assert "another gateway runs with the state directory" in err


def test_it_answers_to_the_names_that_its_operator_allows(running: Running) -> None:
    with running("--port", "0", "--allow-host", "gpu.lan", "--allow-host", "ml.example") as (_, line):
        url = f"{line.split()[-1]}/healthz"
        asked = ("GPU.lan:8000", "ml.example", "localhost", "10.0.0.7:80", "evil.example")
        answers = [httpx.get(url, headers={"Host": host}, timeout=DEADLINE_S) for host in asked]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 421]


@pytest.mark.full
def test_who_says_public_serves_other_machines_without_keys_and_is_told_so(running: Running) -> None:
    with running("--host", "0.0.0.0", "--port", "0", "--public") as (process, line):  # noqa: S104
        assert httpx.get(
            f"http://127.0.0.1:{line.split(':')[-1].strip()}/v1/models", timeout=DEADLINE_S
        ).is_success
        process.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT)
        _, err = process.communicate(timeout=DEADLINE_S)
    assert err == "There are no keys: whoever reaches 0.0.0.0 may use this gateway.\n"


def test_ctrl_c_is_no_failure(running: Running) -> None:
    with running("--port", "0") as (process, line):
        assert line.startswith("Listening on")
        process.send_signal(signal.CTRL_BREAK_EVENT if sys.platform == "win32" else signal.SIGINT)
        assert process.communicate(timeout=DEADLINE_S) == ("left\n", "")
    assert process.returncode == 0


STOPS = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "CTRL_BREAK_EVENT") if hasattr(signal, name)]
if sys.platform == "win32":
    STOPS = ["CTRL_BREAK_EVENT"]


@pytest.mark.full
@pytest.mark.parametrize("stop", STOPS)
def test_a_second_signal_ends_what_runs_and_everybody_is_told(running: Running, stop: str) -> None:
    with (
        running("--port", "0", "--model", "hanging", "--max-requests", "2") as (process, line),
        httpx.Client(base_url=line.split()[-1], timeout=DEADLINE_S) as http,
        ThreadPoolExecutor() as others,
    ):
        with http.stream("POST", "/v1/completions", json=TEXT | {"stream": True}) as streamed:
            events = streamed.iter_lines()
            assert next(events).startswith("data: ")
            whole = others.submit(http.post, "/v1/completions", json=TEXT)
            eventually(lambda: "active_requests 2.0" in http.get("/metrics").text)
            waiting = others.submit(http.post, "/v1/chat/completions", json=CHAT)
            eventually(lambda: "waiting_requests 1.0" in http.get("/metrics").text)
            process.send_signal(getattr(signal, stop))
            refused = waiting.result(DEADLINE_S)
            assert not whole.done()
            process.send_signal(getattr(signal, stop))
            ended = whole.result(DEADLINE_S)
            last = [event for event in events if event][-1]
        out, err = process.communicate(timeout=DEADLINE_S)

    for answer in (refused, ended):
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stopping")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
    assert (process.returncode, out, err) == (0, "left\n", "")


def test_a_port_in_use_is_one_sentence(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, out, err = run("--port", port)

    assert (status, out) == (1, "")
    assert err.startswith(f"molink-gateway: cannot listen on 127.0.0.1:{port}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.99"])
def test_an_address_that_is_not_ours_is_one_sentence(capsys: pytest.CaptureFixture[str], host: str) -> None:
    code, _, err = said(capsys, "--host", host)

    assert code == 1
    assert err.startswith(f"molink-gateway: cannot listen on {host}:8000: ")
    assert err.count("\n") == 1


def test_a_swarm_that_cannot_be_joined_is_one_sentence(run: Run) -> None:
    status, out, err = run("--port", "0", "--model", "nowhere")

    assert (status, out) == (1, "")
    assert err == "molink-gateway: the swarm cannot be joined: no peer of this swarm can be reached\n"


@pytest.mark.parametrize(
    "arguments",
    [("--port", "x"), ("--port", "65536"), ("--nonsense",), ("--swarm-key", "/gone"), ("--database", "x")],
)
def test_wrong_arguments_exit_with_2(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, out, err = said(capsys, *arguments)

    assert (code, out) == (2, "")
    assert arguments[0] in err
    assert "Traceback" not in err


def test_several_addresses_may_follow_one_option(running: Running) -> None:
    peers = ("/ip4/192.0.2.1/tcp/1/p2p/a", "/ip4/192.0.2.2/tcp/2/p2p/b")
    with running("--port", "0", "--initial-peers", *peers) as (process, line):
        state = httpx.get(f"{line.split()[-1]}/v1/swarm", timeout=DEADLINE_S).json()
        process.kill()
    assert state["initial_peers"] == str(list(peers))


def test_help_says_that_all_models_are_served_unless_one_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    out = " ".join(said(capsys, "--help")[1].split())
    assert "The one model to serve; without it, each that peers of the swarm serve." in out


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, err = said(capsys, "--help")

    assert (code, err) == (0, "")
    assert "Example:\n    molink-gateway" in out
