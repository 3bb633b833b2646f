"""Tables in a terminal: none of their words is cut, however narrow it is."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from molink.simnet.presentation.tables import Grid, TableCell, TableLine

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = "  "
_BETWEEN = 2
"""Blanks between columns."""


def show(grid: Grid, out: "Console") -> None:
    """Prints it; what is too wide continues below, beside the columns that say what a line is about."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out.print(Text(grid.title, "bold"))
    for columns in _parts(grid, out.width):
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for at in columns:
            table.add_column(
                Text(grid.headings[at]), justify="right" if grid.right[at] else "left", overflow="fold"
            )
        for line in grid.lines:
            cells = (_indented(line, at) for at in columns)
            table.add_row(*(Text(one.text, one.style) for one in cells), end_section=line.ends)
        out.print(table)
    for note in grid.notes:
        out.print(Text(note, "dim"))
    out.print()


def _indented(line: TableLine, at: int) -> TableCell:
    cell = line.cells[at]
    return TableCell(_INDENT + cell.text, cell.style) if line.sub and at == 0 else cell


def _parts(grid: Grid, width: int) -> Iterator[list[int]]:
    """Columns that fit beside each other, the keys before each part."""
    widths = [
        _BETWEEN
        + max(
            map(len, (*heading.splitlines(), *(_indented(line, at).text for line in grid.lines))), default=0
        )
        for at, heading in enumerate(grid.headings)
    ]
    keys = list(range(grid.keys))
    room = width - sum(widths[: grid.keys])
    part: list[int] = []
    for at in range(grid.keys, len(widths)):
        if part and sum(widths[one] for one in (*part, at)) > room:
            yield [*keys, *part]
            part = []
        part.append(at)
    yield [*keys, *part]
