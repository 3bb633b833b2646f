"""Cells of a table, computed in processes of their own."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

from molink.client.progress import Progress

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

    Args:
        jobs: so many at a time; 1: in this process.
        weight: how long a cell takes, beside the others. The longest begin.
    """
    found: dict[int, RunT] = {}
    with Progress() as progress:
        progress.begin(f"{name}: 0 of {len(cells)} cells")
        for number, result in _finished(run, cells, jobs, weight):
            found[number] = result
            progress.report(f"{name}: {len(found)} of {len(cells)} cells")
    return [found[number] for number in range(len(cells))]


def _finished(
    run: Callable[[CellT], RunT], cells: Sequence[CellT], jobs: int, weight: Callable[[CellT], float]
) -> Iterator[tuple[int, RunT]]:
    if jobs == 1 or len(cells) == 1:
        for number, cell in enumerate(cells):
            yield number, run(cell)
        return
    with ProcessPoolExecutor(min(jobs, len(cells)), mp_context=get_context("spawn")) as pool:
        heaviest_first = sorted(range(len(cells)), key=lambda at: -weight(cells[at]))
        running = {pool.submit(run, cells[at]): at for at in heaviest_first}
        for done in as_completed(running):
            yield running[done], done.result()
