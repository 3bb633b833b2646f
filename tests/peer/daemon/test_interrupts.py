"""Ctrl-C at the worst moment: when the interpreter has looked for signals and the event loop's wait begins.

Such a signal does not end the wait, nor does its handler run before the end.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.deadline import DEADLINE_S

from molink.commands import EXIT_INTERRUPTED

LEAVING = "Leaving when running sessions have ended; Ctrl-C again leaves at once"

PROGRAM = '''
import asyncio, ctypes, operator, select, selectors, signal, sys, threading
from functools import partial
from pathlib import Path

from molink.peer.daemon import running
from molink.signals import run_loop

mode, signals, folder = sys.argv[1:]


class Interrupted(selectors.SelectSelector):
    """The next `signals` waits begin with a Ctrl-C: C calls C, and no bytecode runs before the wait."""

    signals = 0

    def select(self, timeout=None):
        readers = [file for file, key in self.get_map().items() if key.events & selectors.EVENT_READ]
        calls = [partial(select.select, readers, [], [], timeout)]
        if self.signals and timeout != 0:
            self.signals -= 1
            calls.insert(0, partial(ctypes.CDLL(None)["raise"], int(signal.SIGINT)))
        readable = list(map(operator.call, calls))[-1][0]
        return [(self.get_key(file), selectors.EVENT_READ) for file in readable]


class Peer:
    addresses = ()
    loads = mode.startswith("loading")

    def __init__(self):
        self.serves = False
        self.gone = asyncio.Event()

    async def run(self, on_ready):
        if mode != "opening":
            self.serves = True
            on_ready(self)
        if mode.endswith("thread"):
            asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        selector.signals = int(signals)
        await self.gone.wait()
        if mode in ("deaf", "opening"):
            await asyncio.Event().wait()

    def leave(self, *, at_once=False):
        if at_once or mode != "busy":
            self.gone.set()

    def status(self):
        return {}

    own_status = status


selector = Interrupted()
running.AT_ONCE_S, running.ENDS_AFTER_S = 0.2, 30.0
selectors.DefaultSelector = lambda: selector
progress = running.ProgressLines(running.say)
run_loop(running.run_until_left(Peer(), Path(folder), progress, private=False))
'''


@pytest.mark.parametrize(
    ("mode", "signals", "status", "last"),
    [
        ("plain", 1, 0, [LEAVING, "Left the swarm"]),
        ("busy", 2, 0, [LEAVING, "Leaving at once"]),
        ("deaf", 2, EXIT_INTERRUPTED, [LEAVING, "Leaving at once"]),
        ("deaf", 3, EXIT_INTERRUPTED, [LEAVING, "Leaving at once"]),
        ("loading thread", 1, 0, [LEAVING, "Left the swarm"]),
        ("opening", 1, EXIT_INTERRUPTED, ["Leaving before anything was served"]),
        ("thread", 2, EXIT_INTERRUPTED, [LEAVING, "Left the swarm"]),
    ],
)
def test_a_ctrl_c_just_before_a_wait_is_heeded_all_the_same(
    tmp_path: Path, mode: str, signals: int, status: int, last: list[str]
) -> None:
    command = [sys.executable, "-c", PROGRAM, mode, str(signals), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    begun = [] if mode == "opening" else ["ready"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (status, [*begun, *last], "")


HANGUP = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
from molink.peer.daemon.running import _ending_signals
print(signal.SIGHUP in _ending_signals(), signal.SIGTERM in _ending_signals())
"""


@pytest.mark.parametrize(("started", "ends"), [("plain", True), ("nohup", False)])
@pytest.mark.parametrize("name", [name for name in ("SIGHUP",) if hasattr(signal, name)])
def test_a_terminal_that_is_closed_ends_a_peer_unless_it_was_started_to_outlive_it(
    name: str, started: str, ends: bool
) -> None:
    command = [sys.executable, "-c", HANGUP.replace("SIGHUP", name), started]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert done.stdout.split() == [str(ends), "True"]
