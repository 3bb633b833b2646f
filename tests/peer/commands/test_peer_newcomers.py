"""What a newcomer mistypes or tries first: one line each, before anything heavy is loaded."""

import os
import queue
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S

import molink
from molink.dht.identity.key_file import KeyFileError
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.commands import cli
from molink.peer.daemon import running


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's configuration nor the user's folders are touched."""
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    for name in [name for name in os.environ if name.startswith("MOLINK_") and name != "MOLINK_CONFIG"]:
        monkeypatch.delenv(name)


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


@pytest.mark.parametrize("model", ["/no/such/model", "./nowhere", "a/b/c"])
def test_a_model_that_cannot_be_one_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    code, out, err = run(capsys, "join", "--model", model, "--state-dir", tmp_path / "p")
    assert (code, out) == (1, "")
    assert f"model {model!r} was not found: there is no such directory" in err
    assert not (tmp_path / "p").exists()


def test_settings_may_come_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MOLINK_MEMORY", "much")
    assert "--memory: " in run(capsys, "join")[2]
    monkeypatch.delenv("MOLINK_MEMORY")
    monkeypatch.setenv("MOLINK_PORT", "many")
    code, _, err = run(capsys, "join")
    assert code == 2
    assert "the environment's MOLINK_ variables: `port`: " in err
    monkeypatch.delenv("MOLINK_PORT")
    monkeypatch.setenv("MOLINK_STATE_DIR", str(tmp_path / "mine"))
    assert f"no peer is running with the state directory {tmp_path / 'mine'}: " in run(capsys, "leave")[2]


def test_a_file_that_is_no_key_is_not_to_be_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = tmp_path / "passwords"
    other.write_text("root:x:0:0")
    other.chmod(0o644)
    with pytest.raises(KeyFileError) as refused:
        SwarmKey.load(other)
    assert str(refused.value).startswith(f"{other} is not a ")
    assert "chmod" not in str(refused.value)


def test_every_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"molink-peer {molink.__version__}\n", "")


def test_a_key_file_is_made_in_a_folder_that_is_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, _, err = run(capsys, "swarm-key", tmp_path / "no" / "x.key")
    assert code == 1
    assert f"there is no folder {tmp_path / 'no'}; make it" in err
    assert not (tmp_path / "no").exists()


def test_progress_is_shown_while_nothing_else_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are loaded before there is an event loop, and hold it up later."""
    shown: queue.Queue[str] = queue.Queue()

    def show(line: str) -> None:
        if line == "Measuring layer 6":
            monkeypatch.setattr(running, "QUIET_S", DEADLINE_S)  # until the next one
        shown.put(line)

    monkeypatch.setattr(running, "QUIET_S", 0.01)
    progress = running.ProgressLines(show)
    progress.report("Loading torch")
    assert shown.get(timeout=DEADLINE_S) == "Loading torch"
    progress.report("Measuring layer 6")
    assert shown.get(timeout=DEADLINE_S) == "Measuring layer 6"
    progress.report("nobody sees it")
    progress.stop()
    progress.report("nor this")
    assert shown.empty()
