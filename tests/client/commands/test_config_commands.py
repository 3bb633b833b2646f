"""`molink config` on a command line."""

import json
import sys
from pathlib import Path

import pytest
from support.swarms.scripted_swarm import FIRST, Run


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "none yet" / "config.toml"
    monkeypatch.setenv("MOLINK_CONFIG", str(path))
    monkeypatch.delenv("MOLINK_LOCAL_NETWORK", raising=False)
    return path


def test_what_is_set_is_shown_got_and_unset(run: Run, file: Path) -> None:
    assert run("config", "path") == (0, f"{file}\n", "")
    assert run("config", "set", "memory", "10GB")[:2] == (0, "")
    assert run("config", "set", "--", "--quiet-hours", "22:00-07:00")[:2] == (0, "")
    assert run("config", "get", "memory") == (0, "10GB\n", "")
    shown = run("config")[1].splitlines()
    assert shown == [f"# {file}", "memory       10GB  (file)", "quiet_hours  22:00-07:00  (file)"]
    told = json.loads(run("config", "--json")[1])
    assert told["options"]["quiet_hours"] == {"value": ["22:00-07:00"], "source": "file"}
    assert run("config", "unset", "memory")[0] == 0
    assert run("config", "unset", "memory")[0] == 1
    assert run("config", "get", "memory")[0] == 1


def test_defaults_are_shown_if_they_are_asked_for(run: Run, file: Path) -> None:
    del file
    assert "priority" in run("config", "--all")[1]
    code, out, _ = run("config")
    assert code == 0
    assert "(not there yet)" in out


@pytest.mark.parametrize(
    "words",
    [
        ("set", "threads", "many"),
        ("set", "memory", "lots"),
        ("set", "no_such_option", "1"),
        ("set", "threads"),
        ("get", "nothing"),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, file: Path, words: tuple[str, ...]) -> None:
    code, out, err = run("config", *words)
    assert (code, out) == (2, "")
    assert err.startswith("molink: ")
    assert len(err.splitlines()) == 1
    assert not file.exists()


def test_at_a_terminal_the_first_run_asks_two_questions(
    run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["nowhere", FIRST, "4GB"])
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    code, _, err = run("config")
    assert code == 0
    assert "'nowhere' is not a peer's multiaddress" in err
    assert file.read_text("utf-8") == f'initial_peers = ["{FIRST}"]\nmemory = "4GB"\n'
