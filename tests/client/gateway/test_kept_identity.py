"""A gateway is the same to peers after each restart, and one process at a time is it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from molink.client.gateway.kept_identity import IdentityUnusable, default_folder, gateway_identity

DEADLINE_S = 120.0
PROGRAM = """
import pathlib, sys
from molink.client.gateway.kept_identity import gateway_identity
with gateway_identity(pathlib.Path(sys.argv[1])) as identity:
    print(identity.peer_id, flush=True)
    sys.stdin.read()
"""


def peer_id(folder: Path | None) -> str:
    with gateway_identity(folder) as identity:
        return identity.peer_id


@contextmanager
def other_process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One that has the identity in that folder, and who it is."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def test_who_is_killed_is_the_same_afterwards_and_one_process_at_a_time_is_it(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with other_process(folder) as (process, name):
        assert name.startswith("12D3Koo")
        with pytest.raises(IdentityUnusable, match=r"another gateway runs with .* another with --state-dir"):
            peer_id(folder)
        assert (folder / "gateway.key").stat().st_mode & 0o777 == 0o600 or sys.platform == "win32"
        assert folder.stat().st_mode & 0o777 == 0o700 or sys.platform == "win32"
        process.kill()
        process.wait(DEADLINE_S)
        assert [peer_id(folder), peer_id(folder)] == [name, name]
    assert peer_id(tmp_path / "elsewhere") != name


def test_who_was_told_of_no_folder_goes_without_one_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "molink.client.gateway.kept_identity.user_state_dir", lambda *_, **__: str(tmp_path / "me")
    )
    name = peer_id(None)
    assert not caplog.records
    assert peer_id(None) == peer_id(default_folder()) == name
    with other_process(default_folder()):
        assert peer_id(None) != name
    assert "this run's identity is not kept: another gateway runs with" in caplog.text
    (default_folder() / "gateway.key").write_text("no key")
    assert peer_id(None) != peer_id(None)
    with pytest.raises(IdentityUnusable, match=r"gateway\.key"):
        peer_id(default_folder())


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityUnusable, match=r"file/state cannot be used \(.*\): choose another one"):
        peer_id(tmp_path / "file" / "state")
