"""`molink-peer join` at a terminal: its contract's lines stay whole, and below them is a view, until it leaves."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.swarms.live_swarms import BUNDLED

pytestmark = [pytest.mark.real, pytest.mark.full]

DEADLINE_S = 120.0
COLUMNS = 60
"""Fewer than a line that invites others has."""


class PseudoTerminal:
    """What a program has written to a terminal that is COLUMNS wide, as it comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._changed = threading.Condition()
        self.text = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def wait_for(self, condition: Callable[[str], object]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self.text), DEADLINE_S), self.text

    def _read(self) -> None:
        while True:
            try:
                read = os.read(self._descriptor, 65536).decode(errors="replace")
            except OSError:  # the program has ended
                return
            with self._changed:
                self.text += read
                self._changed.notify_all()


def test_the_lines_that_others_rely_on_stay_whole_above_a_view_that_goes_away(tmp_path: Path) -> None:
    if sys.platform == "win32":
        raise AssertionError("this test needs a pseudo-terminal")
    end, programs = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "molink.peer", "join", "--new-swarm", "--model", BUNDLED, "--state-dir", tmp_path],
        stdin=programs, stdout=programs, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "OMP_NUM_THREADS": "1"},
    ) as peer:  # fmt: skip
        os.close(programs)
        terminal = PseudoTerminal(end)
        try:
            terminal.wait_for(lambda text: text.count("tokens served") >= 2)
            lines = terminal.text.replace("\r", "").split("\n")
            (invitation,) = [line for line in lines if line.startswith("Invite others: ")]
            assert re.fullmatch(
                r"Invite others: molink-peer join --initial-peers /ip4/\S+/p2p/\w{52}", invitation
            )
            assert lines.count("ready") == 1
            assert lines.index("ready") < next(at for at, line in enumerate(lines) if "tokens served" in line)
            peer.send_signal(signal.SIGINT)
            assert peer.wait(DEADLINE_S) == 0
            terminal.wait_for(lambda text: "Left the swarm" in text)
        finally:
            peer.kill()
        assert peer.stderr is not None
        assert peer.stderr.read() == ""
    assert terminal.text.count("\x1b[?25h") == terminal.text.count("\x1b[?25l")  # the cursor is there again
    os.close(end)
