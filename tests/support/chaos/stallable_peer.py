"""A peer whose engine stands still for STALL_S when it gets SIGUSR1, though all else goes on: a device that hangs."""

import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from molink.peer.commands import cli
from molink.peer.engine.engine_thread import EngineThread, ExpectedMs
from molink.peer.serving import data_plane

STALL_S = 6.0
REPLACED = data_plane.EngineThread
"""Has to be there: a name that is only assigned to would be made."""


class Stall:
    """A stall of the engine's thread."""

    def __init__(self) -> None:
        self._until_s = 0.0

    def begin(self, *_: object) -> None:
        self._until_s = time.monotonic() + STALL_S

    def wait(self) -> None:
        while (left_s := self._until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))


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
    cli.main(sys.argv[1:])
