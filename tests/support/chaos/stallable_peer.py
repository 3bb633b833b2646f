"""A peer whose engine stands still from SIGUSR1 to SIGUSR2, though all else goes on: a device that hangs."""

import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from molink.peer.commands import cli
from molink.peer.engine.engine_thread import EngineThread, ExpectedMs
from molink.peer.serving import data_plane

REPLACED = data_plane.EngineThread
"""Has to be there: a name that is only assigned to would be made."""


class Stall:
    """A stall of the engine's thread."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()
        self._goes_on.set()

    def begin(self, *_: object) -> None:
        self._goes_on.clear()

    def end(self, *_: object) -> None:
        self._goes_on.set()

    def wait(self) -> None:
        self._goes_on.wait()


class StallableThread(EngineThread):
    """An engine's thread that waits for the stall to be over before each piece of work."""

    stall = Stall()

    def begin(
        self, function: Callable[[], Any], done: Callable[[Any], None], *expected_ms: ExpectedMs
    ) -> None:
        def computed() -> object:
            self.stall.wait()
            return function()

        super().begin(computed, done, *expected_ms)


if __name__ == "__main__":
    data_plane.EngineThread = StallableThread  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, StallableThread.stall.begin)
    signal.signal(signal.SIGUSR2, StallableThread.stall.end)
    cli.main(sys.argv[1:])
