"""Running a coroutine so that no signal is lost."""

import asyncio
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run_loop(main: Coroutine[object, object, T]) -> T:
    """Runs `main` as `asyncio.run` does, except that a signal always ends the loop's wait.

    Python runs a signal's handler in the main thread, between two instructions. A signal that comes after the
    interpreter last looked and before the loop's wait begins, or that another thread receives, does not end that wait:
    its handler would run at the next event, if there is any. So each signal also writes to a socket that the loop
    reads, which an asyncio loop has once it handles one signal itself. SIGURG is one that nothing here uses and that
    does nothing by default. The loop of Windows has such a socket from the start.
    """
    with asyncio.Runner() as runner:
        if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
            runner.get_loop().add_signal_handler(signal.SIGURG, _nothing)
        return runner.run(main)


def _nothing() -> None: ...
