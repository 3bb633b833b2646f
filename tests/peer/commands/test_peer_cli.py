"""`molink-peer` as its users meet it: lines to rely on, exit statuses, Ctrl-C, and one line for each mistake.

The life of a peer is tested in processes of its own, with a peer that only lives and leaves. Torch and libp2p, which it
does not use, are loaded before it in one of them; the others do without.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.deadline import DEADLINE_S
from support.devices.brief_profile import measure_briefly
from support.pairwise import usually

from molink import commands
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.commands import cli
from molink.peer.daemon import running
from molink.peer.daemon.running import invitation
from molink.simnet.devices.named_devices import device_named

PEER_ID = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
LOCAL = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID}"
REMOTE = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER_ID}"

PROGRAM = '''
import asyncio, sys, threading, types

mode, *arguments = sys.argv[1:]


class PeerError(Exception):
    """What a user can mend."""


class Peer:
    addresses = ("/ip4/127.0.0.1/tcp/4001/p2p/ID",)

    def __init__(self, settings, state, report, past, faults):
        faults.use({"int8"} - past.left_out)
        self.settings = settings
        self.loads = mode.startswith("loading")
        self.report = report
        self.gone, self.serves = asyncio.Event(), False

    async def run(self, on_ready):
        if mode == "failing":
            raise PeerError("the model does not fit: give it\\nmore memory")
        if mode == "crashing":
            raise RuntimeError("a fault of ours")
        self.report("Loading layers")
        await asyncio.sleep(1.0 if mode == "slow" else 0.0)
        self.serves = True
        on_ready(self)
        if mode.endswith("thread"):
            asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        await self.gone.wait()
        while mode.startswith("deaf"):
            try:
                await asyncio.Event().wait()
            finally:
                if mode == "deaf twice":
                    continue

    def leave(self, *, at_once=False):
        if at_once or not mode.startswith("busy"):
            self.gone.set()

    def status(self):
        return {"name": "test", "spans": [[0, 4]], "model": "m"}

    own_status = status


module = types.ModuleType("molink.peer.daemon.peer")
module.Peer, module.PeerError = Peer, PeerError
sys.modules["molink.peer.daemon.peer"] = sys.modules["molink.peer.daemon.bootstrap"] = module
if not mode.startswith("loaded"):
    nothing = types.ModuleType("nothing")
    nothing.load_lean_libp2p = nothing.load_lean_transformers = lambda: None
    sys.modules["molink.dht.host.lean_libp2p"] = nothing
    sys.modules["molink.shards.loading.lean_transformers"] = nothing
from molink.peer.commands import cli
from molink.peer.daemon import running

running.QUIET_S = 0.05 if mode == "slow" else 60.0
running.AT_ONCE_S = 0.2
if mode != "deaf twice":
    running.ENDS_AFTER_S = 30.0
cli.main(arguments)
'''


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's configuration nor the user's folders are touched."""
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    for name in [name for name in os.environ if name.startswith("MOLINK_") and name != "MOLINK_CONFIG"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOLINK_LOCAL_NETWORK", "off")


class Terminal:
    """A `molink-peer` in a process of its own."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def wait_for(self, expected: str) -> list[str]:
        """The lines up to the expected one."""
        lines: list[str] = []
        while expected not in lines:
            line = self.line()
            assert line, f"ended after {lines}"
            lines.append(line)
        return lines

    def end(self) -> tuple[int, str, str]:
        """Exit status, and what was printed since the last line read."""
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@contextmanager
def peer(mode: str, *arguments: object) -> Iterator[Terminal]:
    command = [sys.executable, "-c", PROGRAM, mode, *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield Terminal(process)
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


# -- help and mistakes


@pytest.mark.parametrize("command", ["join", "profile", "status", "doctor", "leave", "service", "swarm-key"])
def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, err = run(capsys, command, "--help")
    assert (code, err) == (0, "")
    assert f"Example:\n    molink-peer {command}" in out


def test_help_lists_the_commands_and_is_what_no_arguments_show(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(
        f"  {command} " in out
        for command in ("join", "profile", "status", "doctor", "leave", "service", "swarm-key")
    )
    code, shown, _ = run(capsys)
    assert (code, shown) == (2, out)


def test_join_offers_what_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "join", "--help")
    names = "model initial-peers new-swarm swarm-key memory device dtype quantization listen announce"
    names += " port grpc-port name layers partner state-dir relay activation-codec micro-batches"
    names += " relay-port offer-relay sessions-per-client"
    names += " http-proxy transmission-policy metrics-port pause-when-busy quiet-hours on-battery priority swap-space"
    for name in names.split():
        assert f"--{name} " in out


def test_help_loads_neither_torch_nor_libp2p() -> None:
    program = (
        "import sys\nfrom molink.peer.commands import cli\n"
        "try:\n    cli.main(['join', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'transformers', 'libp2p', 'trio', 'grpc') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dance"], "No such command 'dance'"),
        (["join", "--dance"], "No such option"),
        (["join", "--port", "many"], "--port"),
        (["join", "--port", "70000"], "--port"),
        (["join", "--memory", "lots"], "--memory: 'lots' is not a size"),
        (["join", "--layers", "4:4"], "--layers '4:4' is not a span"),
        (["join", "--dtype", "int3"], "--dtype: input should be 'auto', 'float32'"),
        (["join", "--initial-peers", "here"], "'here' is not a peer's multiaddress"),
        (["join", "--initial-peers", LOCAL, "--new-swarm"], "give one of the two"),
        (["join", "--offer-relay", "none"], "--offer-relay none: use auto, off"),
        (["join", "--swarm-key", "/no/such.key"], "--swarm-key"),
        (["status", "--initial-peers", "here"], "'here' is not a peer's multiaddress"),
        (["join", "--model-name", "two words"], "--model-name: string should match"),
        (["profile", "--device", "cuda:99"], "--device cuda:99 is not there: this machine has cpu"),
    ],
)
def test_bad_arguments_give_one_line_and_exit_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("molink-peer: ")
    assert message in err


def test_a_wrong_configuration_file_is_a_bad_argument(capsys: pytest.CaptureFixture[str]) -> None:
    Path(os.environ["MOLINK_CONFIG"]).write_text("memroy = 3\n")
    code, _, err = run(capsys, "join")
    assert code == 2
    assert "`memroy` is not a known key (did you mean `memory`?)" in err


@pytest.mark.parametrize("command", ["leave", "status"])
def test_without_a_peer_there_is_nothing_to_ask(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    code, out, err = run(capsys, command, "--state-dir", tmp_path)
    assert (code, out) == (1, "")
    assert err == (
        f"molink-peer: no peer is running with the state directory {tmp_path}: "
        "start one with `molink-peer join`, or name the right folder with --state-dir\n"
    )


def test_an_error_of_ours_gives_one_line_and_the_traceback_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("by\nzero")

    monkeypatch.setattr(cli, "_call", fail)
    monkeypatch.setattr(commands, "user_log_dir", lambda *_, **__: str(tmp_path / "logs"))
    code, _, err = run(capsys, "leave")
    log = tmp_path / "logs" / "molink-peer-error.log"
    assert code == 1
    assert (
        err
        == f"molink-peer: unexpected error: ZeroDivisionError: by zero; {log} says where: please report it\n"
    )
    assert "Traceback" in log.read_text()
    code, _, err = run(capsys, "leave", "--debug")
    assert code == 1
    assert "Traceback" in err
    monkeypatch.setattr(commands, "user_log_dir", lambda *_, **__: os.devnull)
    assert "run it again with --debug" in run(capsys, "leave")[2]


# -- keys


def test_a_key_file_is_made_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "friends.key"
    code, out, err = run(capsys, "swarm-key", file)
    assert (code, err) == (0, "")
    assert str(file) in out
    key = SwarmKey.load(file)
    assert key.secret.hex() not in out
    code, _, err = run(capsys, "swarm-key", file)
    assert code == 1
    assert "exists already and was left as it is" in err
    assert SwarmKey.load(file) == key


def test_a_key_file_that_cannot_be_written_is_a_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run(capsys, "swarm-key", tmp_path / "file" / "x.key")
    assert code == 1
    assert "cannot be written" in err


# -- the invitation


@pytest.mark.parametrize(
    ("addresses", "private", "expected"),
    [
        ([LOCAL], False, f"molink-peer join --initial-peers {LOCAL}"),
        ([LOCAL, REMOTE], False, f"molink-peer join --initial-peers {REMOTE}"),
        ([REMOTE], True, f"molink-peer join --initial-peers {REMOTE} --swarm-key YOUR_COPY_OF_THE_KEY_FILE"),
    ],
)
def test_the_invitation_names_an_address_that_others_reach(
    addresses: list[str], private: bool, expected: str
) -> None:
    assert invitation(addresses, private=private) == expected


# -- the life of a peer


def test_join_says_where_it_goes_how_to_invite_others_and_that_it_is_ready(tmp_path: Path) -> None:
    with peer("loaded", "join", "--state-dir", tmp_path / "p") as terminal:
        first, invite, ask, ready = terminal.wait_for("ready")
        assert first.startswith("Founding a new swarm, because no initial peers are configured")
        assert invite == "Invite others: molink-peer join --initial-peers /ip4/127.0.0.1/tcp/4001/p2p/ID"
        assert ask == "Ask it: molink chat --initial-peers /ip4/127.0.0.1/tcp/4001/p2p/ID"
        assert ready == "ready"
        terminal.process.send_signal(signal.SIGINT)
        code, out, err = terminal.end()
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == "Left the swarm"
    assert not (tmp_path / "p" / "control.json").exists()


def test_several_addresses_may_follow_one_option_and_other_machines_are_let_in_loudly(tmp_path: Path) -> None:
    with peer("plain", "join", "--initial-peers", LOCAL, REMOTE, "--state-dir", tmp_path) as terminal:
        first, listening, *_ = terminal.wait_for("ready")
        assert first == f"Joining the swarm of {LOCAL} and 1 more"
        assert listening == "Listening on 0.0.0.0: other machines can reach this peer"


def test_a_private_swarm_invites_with_the_key(tmp_path: Path) -> None:
    SwarmKey.write_new(tmp_path / "k")
    with peer("plain", "join", "--swarm-key", tmp_path / "k", "--state-dir", tmp_path / "p") as terminal:
        for line in terminal.wait_for("ready")[-3:-1]:
            assert line.endswith(" --swarm-key YOUR_COPY_OF_THE_KEY_FILE")


@pytest.mark.full
def test_progress_is_shown_when_it_takes_long(tmp_path: Path) -> None:
    with peer("slow", "join", "--new-swarm", "--state-dir", tmp_path) as terminal:
        lines = terminal.wait_for("ready")
    assert lines[0] == "Founding a new swarm"
    assert lines.count("Loading layers") == 1


@pytest.mark.full
def test_sigterm_drains_like_the_first_ctrl_c(tmp_path: Path) -> None:
    with peer("plain", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end()[0] == 0


@pytest.mark.full
@pytest.mark.parametrize("mode", usually(["busy thread", "deaf twice"], ["busy", "deaf"]))
def test_a_second_ctrl_c_leaves_at_once_whatever_still_runs(tmp_path: Path, mode: str) -> None:
    with peer(mode, "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("Leaving when running sessions have ended; Ctrl-C again leaves at once")
        terminal.process.send_signal(signal.SIGINT)
        code, out, _ = terminal.end()
    assert code == (commands.EXIT_INTERRUPTED if mode.startswith("deaf") else 0)
    assert "Leaving at once" in out
    assert (tmp_path / "control.json").exists() == (
        mode == "deaf twice"
    )  # nobody is left who could remove it


@pytest.mark.full
def test_a_second_ctrl_c_ends_a_peer_that_has_left_but_for_a_thread(tmp_path: Path) -> None:
    with peer("thread", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        terminal.process.send_signal(signal.SIGINT)
        terminal.wait_for("Left the swarm")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end()[0] == commands.EXIT_INTERRUPTED


@pytest.mark.full
def test_a_peer_that_has_left_does_not_wait_for_a_thread_that_loads(tmp_path: Path) -> None:
    with peer("loading thread", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        terminal.process.send_signal(signal.SIGINT)
        code, out, err = terminal.end()
    assert (code, out.splitlines()[-1], err) == (0, "Left the swarm", "")


def test_status_and_leave_reach_the_peer_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer("plain", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        code, out, err = run(capsys, "status", "--state-dir", tmp_path, "--json")
        assert (code, err) == (0, "")
        assert json.loads(out) == {"name": "test", "spans": [[0, 4]], "model": "m"}
        assert "name: test\n" in run(capsys, "status", "--state-dir", tmp_path)[1]
        code, out, err = run(capsys, "leave", "--state-dir", tmp_path)
        assert (code, out, err) == (0, "The peer has left\n", "")
        assert terminal.end()[0] == 0


@pytest.mark.full
def test_leave_now_ends_a_peer_that_would_drain_for_ever(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with peer("busy", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        code, out, err = run(capsys, "leave", "--now", "--state-dir", tmp_path)
        assert (code, out, err) == (0, "The peer has left\n", "")
        assert terminal.end()[0] == 0


def test_a_second_after_it_is_told_to_leave_at_once_a_peer_is_gone_whatever_it_does() -> None:
    assert running.ENDS_AFTER_S < 1.0
    assert running.AT_ONCE_S < running.ENDS_AFTER_S


@pytest.mark.parametrize(("option", "lowered"), [((), True), (("--priority", "normal"), False)])
def test_a_peer_lets_other_programs_go_first_unless_told_otherwise(
    tmp_path: Path, option: tuple[str, ...], lowered: bool
) -> None:
    with peer("plain", "join", *option, "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        low = psutil.BELOW_NORMAL_PRIORITY_CLASS if sys.platform == "win32" else 10
        own = psutil.Process().nice()
        expected = low if lowered and (sys.platform == "win32" or own < low) else own
        assert psutil.Process(terminal.process.pid).nice() == expected


def test_a_state_directory_holds_one_peer(tmp_path: Path) -> None:
    with peer("plain", "join", "--state-dir", tmp_path) as first:
        first.wait_for("ready")
        with peer("plain", "join", "--state-dir", tmp_path) as second:
            code, out, err = second.end()
        assert (code, out) == (1, "")
        assert "a peer is already running with the state directory" in err
        assert "--state-dir" in err
        assert err.count("\n") == 1
        assert first.process.poll() is None


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("failing", "molink-peer: the model does not fit: give it more memory\n"),
        (
            "crashing",
            "molink-peer: unexpected error: RuntimeError: a fault of ours; run it again with --debug",
        ),
    ],
)
def test_a_peer_that_cannot_serve_fails_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, message: str
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", os.devnull)  # where logs go: nothing can be written there
    with peer(mode, "join", "--state-dir", tmp_path) as terminal:
        code, _, err = terminal.end()
    assert code == 1
    assert err.startswith(message)
    assert err.count("\n") == 1
    assert not (tmp_path / "control.json").exists()


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
def test_a_start_tells_the_last_death_and_leaves_out_what_died_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    died = f"The last start was ended by SIGSEGV at .*: {tmp_path / 'last-fault.log'} has the stacks"
    for start in range(3):
        with peer("plain", "join", "--state-dir", tmp_path) as terminal:
            lines = terminal.wait_for("ready")
            assert bool(re.fullmatch(died, lines[0])) == (start > 0)
            assert any("without the native ways int8" in line for line in lines) == (start == 2)
            terminal.process.send_signal(signal.SIGSEGV)
            assert terminal.end()[0] == -signal.SIGSEGV
        code, _, err = run(capsys, "status", "--state-dir", tmp_path)
        assert code == 1
        assert "was ended by SIGSEGV at " in err
    with peer("plain", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        terminal.process.kill()
        terminal.end()
    assert "seems to have been killed" in run(capsys, "status", "--state-dir", tmp_path)[2]


@pytest.mark.full
def test_a_fault_file_that_cannot_be_written_does_not_stop_a_peer(tmp_path: Path) -> None:
    (tmp_path / "faults.log" / "folder").mkdir(parents=True)
    with peer("plain", "join", "--state-dir", tmp_path) as terminal:
        terminal.wait_for("ready")
        terminal.process.send_signal(signal.SIGTERM)
        code, _, err = terminal.end()
    assert code == 0
    assert "a crash would leave no trace" in err


@pytest.mark.full
def test_a_reader_that_goes_away_does_not_stop_the_peer(tmp_path: Path) -> None:
    with peer("plain", "join", "--state-dir", tmp_path) as terminal:
        assert terminal.process.stdout is not None
        terminal.wait_for("ready")
        terminal.process.stdout.close()
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(DEADLINE_S) == 0


# -- profile


@pytest.mark.full
def test_profile_measures_this_machine_as_json_and_as_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_briefly(monkeypatch, "TOTAL_BUDGET_S", "PREFILL_BUDGET_S")
    monkeypatch.setattr("molink.progress.QUIET_S", 3600.0)
    code, out, err = run(capsys, "profile", "--device", "cpu", "--state-dir", tmp_path / "p", "--json")
    assert (code, err) == (0, "")  # work that is soon done is not told
    machine = json.loads(out)
    assert machine["device"]["kind"] == "cpu"
    assert 0 < machine["memory"]["default_bytes"] < machine["memory"]["free_bytes"]
    assert machine["layer_ms"]["1"] > 0
    assert min(machine["embed_ms"], machine["head_ms"], machine["load_bytes_per_s"]) > 0
    assert machine["disk"]["read_bytes_per_s"] > 0
    assert any(address["loopback"] for address in machine["network"])
    assert list((tmp_path / "p").iterdir()) == []
    (tmp_path / "machine.json").write_text(out, encoding="utf-8")
    simulated = device_named(f"profile:{tmp_path / 'machine.json'}")
    assert simulated.name == machine["device"]["name"]


def test_profile_of_a_model_that_is_not_there_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "profile", "--model", tmp_path, "--json")
    assert (code, out) == (1, "")
    assert "has no config.json" in err
