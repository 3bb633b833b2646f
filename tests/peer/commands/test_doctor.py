"""The doctor before anything is set up: what it looks at, and how it ends."""

import json
import os
from pathlib import Path

import pytest

from molink.peer.commands import cli


@pytest.fixture(autouse=True)
def _own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the user's configuration nor the user's folders are touched."""
    (tmp_path / "config.toml").write_text("")
    for name in [name for name in os.environ if name.startswith("MOLINK_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MOLINK_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.setenv("MOLINK_STORE_DIR", str(tmp_path / "store"))


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return int(str(ended.value.code)), out, err


def test_the_doctor_looks_at_this_machine_where_no_swarm_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, "doctor", "--json", "--state-dir", tmp_path)
    findings = json.loads(out)
    assert (code, err) == (0, "")
    assert {check["name"] for check in findings["checks"]} == {"swarm", "disk", "device", "versions"}
    assert (findings["healthy"], findings["peer_id"]) == (True, None)
    code, out, _ = run(capsys, "doctor", "--state-dir", tmp_path)
    assert code == 0
    assert "-> name a peer of the swarm with --initial-peers" in out


def test_the_doctor_tells_of_deaths_and_how_to_report_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "faults.log").write_text("Fatal Python error: Illegal instruction\n")
    code, out, _ = run(capsys, "doctor", "--state-dir", tmp_path)
    assert code == 0
    assert "note    last death: SIGILL at " in out
    assert "doctor --report" in out
    assert (tmp_path / "faults.log").exists()  # the next start is to know of it


def test_the_doctor_says_what_has_to_be_mended_and_exits_with_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = run(capsys, "doctor", "--state-dir", tmp_path / "file" / "state")
    assert code == 1
    assert "PROBLEM disk" in out
    assert "-> name another folder with --state-dir" in out
