"""Cells of a table, computed in processes of their own."""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import active_children, connection, get_context, parent_process
from threading import Thread, current_thread, main_thread
from typing import TypeVar

from molink.progress import QUIET_S, Progress

CellT = TypeVar("CellT")
RunT = TypeVar("RunT")


def run_all(
    run: Callable[[CellT], RunT],
    cells: Sequence[CellT],
    jobs: int,
    *,
    weight: Callable[[CellT], float],
    name: str,
) -> list[RunT]:
    """What `run`, which can be pickled, makes of each cell, in their order; progress is on the terminal.

    An error of one cell and Ctrl-C, which only the main thread gets, end all of them at once.

    Args:
        jobs: so many at a time; 1: in this process.
        weight: how long a cell takes, beside the others. The longest begin.
    """
    found: dict[int, RunT] = {}

    def report() -> None:
        progress.report(f"{name}: {len(found)} of {len(cells)} cells")

    with Progress() as progress:
        progress.begin(f"{name}: 0 of {len(cells)} cells")
        if jobs == 1 or len(cells) == 1:
            for number, cell in enumerate(cells):
                found[number] = run(cell)
                report()
        else:
            with _workers(min(jobs, len(cells))) as pool:
                heaviest_first = sorted(range(len(cells)), key=lambda at: -weight(cells[at]))
                with _interrupts_held():  # the first submission starts the processes
                    running = {pool.submit(run, cells[at]): at for at in heaviest_first}
                for done in _finished(running, report):
                    found[running[done]] = done.result()
                    report()
    return [found[number] for number in range(len(cells))]


def _finished(running: "dict[Future[RunT], int]", report: Callable[[], None]) -> "Iterator[Future[RunT]]":
    """One after the other as they end. `report` is called meanwhile, and the main thread hears of Ctrl-C."""
    left = set(running)
    while left:
        done, left = wait(left, QUIET_S, FIRST_COMPLETED)
        yield from done
        report()


@contextmanager
def _workers(count: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end when the block does, in the middle of their work if it fails."""
    others = set(active_children())
    with ProcessPoolExecutor(count, get_context("spawn"), _prepare) as pool:
        try:
            yield pool
        except BaseException:
            for worker in set(active_children()) - others:
                worker.terminate()
            pool.shutdown(cancel_futures=True)  # waits for the thread that sees to their end
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, whichever thread it reaches: an executor that is interrupted while it
    starts its processes waits for them for ever. Those that are started in it never hear of one, not even while they
    are loading; not so on Windows."""
    if current_thread() is not main_thread():
        yield
        return
    heard: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    before = None if sys.platform == "win32" else signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if sys.platform != "win32" and before is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        signal.signal(signal.SIGINT, handler)
    if heard:
        raise KeyboardInterrupt


def _prepare() -> None:
    """In a worker: Ctrl-C is its parent's, with whom it ends, however that does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
