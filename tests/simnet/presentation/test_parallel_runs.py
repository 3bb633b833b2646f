"""Cells in processes of their own: in order, seen to go on, and gone when they are not wanted any more."""

import math
import signal
import subprocess
import sys
import time
from _thread import interrupt_main
from collections.abc import Iterator
from multiprocessing import active_children
from threading import Thread

import psutil
import pytest

from molink.simnet.presentation.parallel_runs import run_all

DEADLINE_S = 120.0
LONG_S = 3600.0
PROGRAM = f"""
import time
from molink.commands import start_logging
from molink.simnet.presentation.parallel_runs import run_all

if __name__ == "__main__":
    start_logging(verbose=True, debug=False)
    run_all(time.sleep, [{LONG_S}, {LONG_S}], 2, weight=float, name="sleepers")
"""


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_are_in_the_order_of_the_cells(jobs: int) -> None:
    before = set(active_children())
    assert run_all(math.sqrt, [4.0, 1.0, 9.0], jobs, weight=float, name="roots") == [2.0, 1.0, 3.0]
    assert set(active_children()) <= before


def test_an_error_of_one_cell_ends_the_others() -> None:
    before = set(active_children())
    with pytest.raises(ValueError, match="non-negative"):
        run_all(time.sleep, [LONG_S, -1.0], 2, weight=float, name="sleepers")
    assert set(active_children()) <= before


@pytest.fixture
def heard_interrupts() -> Iterator[None]:
    """Shells ignore SIGINT for their background jobs, tests among them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard_interrupts")
def test_ctrl_c_ends_cells_in_the_middle_of_their_work() -> None:
    begun = set(active_children())

    def interrupt() -> None:
        while set(active_children()) == begun:
            time.sleep(0.01)
        interrupt_main()

    interrupter = Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        run_all(time.sleep, [LONG_S, LONG_S], 2, weight=float, name="sleepers")
    interrupter.join()
    assert set(active_children()) == begun


@pytest.mark.full
def test_progress_is_told_before_the_first_cell_ends_and_cells_end_with_whoever_wanted_them() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], stderr=subprocess.PIPE, text=True)
    try:
        assert program.stderr is not None
        assert program.stderr.readline() == "sleepers: 0 of 2 cells\n"
        workers = psutil.Process(program.pid).children(recursive=True)
    finally:
        program.kill()
        program.communicate(timeout=DEADLINE_S)
    assert len(workers) >= 2
    assert psutil.wait_procs(workers, DEADLINE_S)[1] == []
