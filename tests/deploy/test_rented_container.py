"""The script for rented containers: it begins again after failures, ends with what ends for good, lets a peer drain."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs/deploy/rented/join.sh"
DEADLINE_S = 120.0
PEER = """#!/bin/sh
echo "$@" >> "$MOLINK_HOME/calls"
echo "$MOLINK_STATE_DIR $MOLINK_STORE_DIR $MOLINK_INITIAL_PEERS" > "$MOLINK_HOME/environment"
set -- $(cat "$MOLINK_HOME/statuses")
[ $# -gt 0 ] || exec sleep 1000
status=$1; shift; echo "$@" > "$MOLINK_HOME/statuses"
if [ "$status" = drains ]; then
    trap 'echo drained >> "$MOLINK_HOME/calls"; exit 0' TERM
    echo ready
    while :; do sleep 0.05; done
fi
exit "$status"
"""


@contextmanager
def begun(home: Path, *statuses: str) -> Iterator["subprocess.Popen[str]"]:
    """The script with a peer that ends with one status after the other."""
    program = home / "venv/bin/molink-peer"
    program.parent.mkdir(parents=True)
    program.write_text(PEER, "utf-8")
    program.chmod(0o700)
    (home / "statuses").write_text(" ".join(statuses), "utf-8")
    environment = {"MOLINK_INITIAL_PEERS": "/ip4/x", "MOLINK_HOME": str(home), "MOLINK_RETRY_S": "0"}
    with subprocess.Popen(
        ["sh", SCRIPT],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        try:
            yield script
        finally:
            script.kill()


@pytest.fixture(autouse=True)
def _shell() -> None:
    if sys.platform == "win32":
        raise AssertionError("this test needs a POSIX shell")


def test_it_begins_again_after_failures_and_ends_when_its_peer_was_told_to_leave(tmp_path: Path) -> None:
    with begun(tmp_path, "1", "137", "0") as script:
        _, errors = script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0
    assert [line.split(";")[0] for line in errors.splitlines()] == [
        "The peer ended with status 1", "The peer ended with status 137",
    ]  # fmt: skip
    assert len((tmp_path / "calls").read_text("utf-8").splitlines()) == 3
    kept = (tmp_path / "environment").read_text("utf-8").split()
    assert kept == [f"{tmp_path}/state", f"{tmp_path}/weights", "/ip4/x"]


def test_settings_that_are_wrong_are_not_tried_again(tmp_path: Path) -> None:
    with begun(tmp_path, "2", "0") as script:
        script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 2
    assert (tmp_path / "statuses").read_text("utf-8").split() == ["0"]


def test_a_container_that_is_stopped_lets_its_peer_drain(tmp_path: Path) -> None:
    with begun(tmp_path, "drains") as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "ready\n"
        script.send_signal(signal.SIGTERM)
        script.communicate(timeout=DEADLINE_S)
    assert script.returncode == 0
    assert (tmp_path / "calls").read_text("utf-8").splitlines()[-1] == "drained"


def test_without_an_address_it_says_what_it_needs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "MOLINK_INITIAL_PEERS"}
    done = subprocess.run(
        ["sh", SCRIPT], env=environment | {"MOLINK_HOME": str(tmp_path)}, capture_output=True, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "give the address of a living peer" in done.stderr
    assert list(tmp_path.iterdir()) == []
