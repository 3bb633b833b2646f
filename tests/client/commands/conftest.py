"""What all tests of `molink` share: a scripted swarm in the place of a real one, and folders of their own."""

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.swarms.scripted_swarm import FIRST, ScriptedSwarm

import molink.client.api.swarm
from molink.client.commands import cli


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> ScriptedSwarm:
    """What the commands get when they open a swarm."""
    scripted = ScriptedSwarm()

    def open_it(model: str | None, **options: object) -> ScriptedSwarm:
        scripted.opened_with = {"model": model, **options}
        return scripted

    monkeypatch.setattr(molink.client.api.swarm, "AsyncSwarm", open_it)
    monkeypatch.setenv("MOLINK_INITIAL_PEERS", FIRST)
    return scripted


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's configuration nor the user's folders are touched."""
    (tmp_path / "config.toml").write_text("")
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "states"))
    monkeypatch.delenv("MOLINK_INITIAL_PEERS", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs `molink`: exit status, stdout, stderr."""

    def run_it(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        out, err = capsys.readouterr()
        return int(str(ended.value.code)), out, err

    return run_it


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda lines: monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
