"""Whoever waits for a swarm without asyncio hears of Ctrl-C, though the system sends it to another thread."""

import subprocess
import sys

DEADLINE_S = 60.0
PROGRAM = """
import os, signal, sys, threading
import anyio
from anyio.from_thread import start_blocking_portal

from molink.client.api.blocking import _await

signal.signal(signal.SIGINT, signal.default_int_handler)
main = threading.main_thread().ident
begun = False


def interrupt():
    while not (begun and sys._current_frames()[main].f_code is threading.Condition.wait.__code__):
        pass
    os.kill(os.getpid(), signal.SIGINT)


with start_blocking_portal("asyncio") as portal:
    coming = portal.start_task_soon(anyio.sleep_forever)
    threading.Thread(target=interrupt, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the system gives it to another thread
    begun = True
    try:
        _await(coming)
    except KeyboardInterrupt:
        print("interrupted", coming.cancelled())
"""


def test_a_ctrl_c_that_another_thread_receives_ends_a_blocking_wait() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert (done.stdout, done.stderr) == ("interrupted True\n", "")
