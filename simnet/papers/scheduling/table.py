"""The comparison of circuit searches as a terminal shows it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.papers.scheduling.comparison import Row

if TYPE_CHECKING:
    from rich.table import Table


def schedule_table(rows: Sequence[Row]) -> "Table":
    """A line for each row, settings apart; the paper's averages stand beside ours where it prints them."""
    from rich.table import Table

    seeds = rows[0].seeds
    problems = "one problem" if seeds == 1 else f"{seeds} problems"
    table = Table(title=f"Circuit search: means over {problems} a setting", title_justify="left")
    with_paper = any(row.paper_tpot_ms is not None for row in rows)
    table.add_column("setting")
    table.add_column("algorithm")
    table.add_column("TPOT\nms", justify="right")
    if seeds > 1:
        table.add_column("95 % interval\nms", justify="right")
    if with_paper:
        table.add_column("TPOT, paper\nms", justify="right")
    table.add_column("machines\nused", justify="right")
    table.add_column("execution\ns", justify="right")
    if with_paper:
        table.add_column("execution, paper\ns", justify="right")
    if any(row.solved < row.seeds for row in rows):
        table.add_column("solved\nproblems", justify="right")
    before: str | None = None
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        setting = f"{row.machines:,} machines" if row.testbed is None else f"testbed {row.testbed}"
        last = following is None or following.testbed != row.testbed
        shown = "" if setting == before else setting
        table.add_row(
            shown, *_cells(row, with_paper=with_paper, columns=len(table.columns)), end_section=last
        )
        before = setting
    return table


def _cells(row: Row, *, with_paper: bool, columns: int) -> list[str]:
    cells = [row.algorithm, _number(row.tpot_ms, 2)]
    if row.seeds > 1:
        cells.append("" if row.tpot_low_ms is None else f"{row.tpot_low_ms:.0f} to {row.tpot_high_ms:.0f}")
    cells += [_number(row.paper_tpot_ms, 2)] if with_paper else []
    cells += [_number(row.hops, 1), _number(row.execution_s, 4)]
    cells += [_number(row.paper_execution_s, 3)] if with_paper else []
    return [*cells, f"{row.solved} of {row.seeds}"][: columns - 1]


def _number(value: float | None, digits: int) -> str:
    """Empty if there is none."""
    return "" if value is None else f"{value:.{digits}f}"
