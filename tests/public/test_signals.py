"""A signal that comes when the loop has looked for signals and its wait begins is handled all the same."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_S = 60.0
PROGRAM = '''
import asyncio, ctypes, operator, select, selectors, signal, sys
from functools import partial

from molink.signals import run_loop

number = getattr(signal, sys.argv[1])


class Interrupted(selectors.SelectSelector):
    """The next wait begins with a signal: C calls C, and no bytecode runs before the wait."""

    armed = False

    def select(self, timeout=None):
        readers = [file for file, key in self.get_map().items() if key.events & selectors.EVENT_READ]
        calls = [partial(select.select, readers, [], [], timeout)]
        if self.armed and timeout != 0:
            self.armed = False
            calls.insert(0, partial(ctypes.CDLL(None)["raise"], int(number)))
        readable = list(map(operator.call, calls))[-1][0]
        return [(self.get_key(file), selectors.EVENT_READ) for file in readable]


selectors.DefaultSelector = Interrupted


async def for_ever():
    try:
        Interrupted.armed = True
        await asyncio.Event().wait()
    finally:
        print("goodbye", flush=True)


def end(*_):
    raise KeyboardInterrupt


signal.signal(number, signal.default_int_handler if sys.argv[1] == "SIGINT" else end)
try:
    run_loop(for_ever())
except KeyboardInterrupt:
    print("interrupted")
'''


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_just_before_the_loop_waits_ends_the_wait(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["goodbye", "interrupted"], "")


def test_every_loop_of_a_program_hears_signals() -> None:
    """`asyncio.run` stands nowhere in the product: `run_loop` takes its place."""
    rooms = ("public", "shards", "dht", "routing", "peer", "client", "simnet")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 100
    assert [str(file) for file in files if "asyncio.run(" in file.read_text(encoding="utf-8")] == []


def test_handlers_are_as_before_once_the_loop_has_ended() -> None:
    from molink.signals import run_loop

    async def nothing() -> str:
        return "done"

    names = [name for name in ("SIGINT", "SIGTERM", "SIGURG") if hasattr(signal, name)]
    before = [signal.getsignal(getattr(signal, name)) for name in names]
    assert run_loop(nothing()) == "done"
    assert [signal.getsignal(getattr(signal, name)) for name in names] == before
