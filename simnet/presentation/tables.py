"""A table as a description: what its columns say of rows. Pure; `terminal.py` and `report.py` show it."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PRINTED = "printed"
"""Above a value that a paper prints: `paper` is the name of a policy."""
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "TTFT": "time to first token, from a request's arrival on",
        "TPOT": "time per output token, from one to the next, the first left out",
        "TBT": "time between tokens, from one to the next, the first left out",
        "JCT": "job completion time, from a request's arrival to its last token",
        "latency": "from a request's arrival to its last token",
        "TP": "tensor parallelism, ranks that share each layer",
        "PP": "pipeline parallelism, stages that share the layers",
        PRINTED: "what the paper prints of the same setting",
        "policy paper": "MoLink as the transmission paper describes it; molink is ours",
    }
)


def explained(texts: Iterable[str]) -> list[str]:
    """A line for each of `WORDS` that is in one of the texts."""
    said = "\n".join(texts)
    return [f"{word}: {what}" for word, what in WORDS.items() if re.search(rf"\b{word}\b", said)]


Form = str | Callable[[Any], str]
NONE = "-"
_A_LITTLE = 0.02
"""Of a value: less is taken for chance."""


@dataclass(frozen=True, slots=True)
class Column:
    """What a column, or in a table on its side a line, says of a row. It is left out where it has no value."""

    name: str
    value: str | Callable[[Any], object]
    """A field of the row, or what makes the value of it."""
    unit: str = ""
    form: Form = ""
    """As `format` takes it, or a function."""
    printed: str = ""
    """The field with what a paper prints; a column of its own where any row has it."""
    printed_form: Form | None = None
    """None: as ours."""
    change: str = ""
    """The field with the part by which it is better than the baseline, which stands in brackets; `paper_` before it is
    the field of the paper's."""
    sign: int = 1
    """-1: less is better."""
    sub: bool = False
    """A part of the one before."""
    ends: bool = False
    """The last of its section."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows and what is said of them."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    by: Sequence[Column] = ()
    """Settings: those that vary are the first columns, each said once; the others are in the title."""
    notes: Sequence[str] = ()
    on_its_side: str = ""
    """The field that names a row: rows are columns then, and columns lines."""


@dataclass(frozen=True, slots=True)
class TableCell:
    text: str
    style: str = ""
    """green, red, dim or nothing."""


@dataclass(frozen=True, slots=True)
class TableLine:
    cells: tuple[TableCell, ...]
    sub: bool
    ends: bool


@dataclass(frozen=True, slots=True)
class Grid:
    """A table as it is shown anywhere."""

    title: str
    headings: tuple[str, ...]
    right: tuple[bool, ...]
    keys: int
    """So many columns say what a line is about."""
    lines: tuple[TableLine, ...]
    notes: tuple[str, ...]


def laid_out(table: Table) -> Grid:
    """The table's cells as text."""
    rows = table.rows
    varying = [one for one in table.by if len({_value(one, row) for row in rows}) > 1]
    title = ", ".join(
        (table.title, *filter(None, (_said(one, rows[0]) for one in table.by if one not in varying)))
    )
    if table.on_its_side:
        return _on_its_side(table, title)
    columns = [
        (one, printed) for one in table.columns for printed in (False, True) if _has(one, rows, printed)
    ]
    settings = [tuple(_value(one, row) for one in varying) for row in rows]
    lines = []
    for number, row in enumerate(rows):
        begins = number == 0 or settings[number - 1] != settings[number]
        ends = number + 1 == len(rows) or settings[number + 1] != settings[number]
        keys = [TableCell(_text(_value(one, row), one.form) if begins else "") for one in varying]
        cells = (*keys, *(_cell(one, row, printed) for one, printed in columns))
        lines.append(TableLine(cells, sub=False, ends=ends and bool(varying)))
    headings = [_heading(one.name, one.unit) for one in varying]
    headings += [_heading(PRINTED if printed else one.name, one.unit) for one, printed in columns]
    right = [_is_number(one, rows, printed=False) for one in varying]
    right += [_is_number(one, rows, printed) for one, printed in columns]
    notes = (*table.notes, *explained((*headings, *map(_policy, rows))))
    count = len(varying) + (not right[len(varying)])
    return Grid(title, tuple(headings), tuple(right), count, tuple(lines), notes)


def _on_its_side(table: Table, title: str) -> Grid:
    shown = [one for one in table.columns if _has(one, table.rows, printed=False)]
    lines = tuple(
        TableLine(
            (TableCell(_heading(one.name, one.unit, ", ")), *(_cell(one, row, False) for row in table.rows)),
            one.sub,
            one.ends,
        )
        for one in shown
    )
    headings = ("", *(str(getattr(row, table.on_its_side)) for row in table.rows))
    notes = (*table.notes, *explained(line.cells[0].text for line in lines))
    return Grid(title, headings, (False, *(True for _ in table.rows)), 1, lines, notes)


def _said(setting: Column, row: object) -> str:
    value = _value(setting, row)
    text = _text(value, setting.form)
    if not text:
        return ""
    return f"{setting.name} {text}" if isinstance(value, str) else f"{text} {setting.unit or setting.name}"


def three_digits(value: float) -> str:
    digits = 2 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))
    return f"{value:.{digits}f}"


def _heading(name: str, unit: str, between: str = "\n") -> str:
    return f"{name}{between}{unit}" if unit else name


def _policy(row: object) -> str:
    """Policies have a word of their own, too."""
    return f"policy {getattr(row, 'policy', '')}"


def _value(column: Column, row: object, *, printed: bool = False) -> Any:  # noqa: ANN401 - whatever rows hold
    if printed:
        return getattr(row, column.printed)
    return getattr(row, column.value) if isinstance(column.value, str) else column.value(row)


def _has(column: Column, rows: Sequence[object], printed: bool) -> bool:
    if printed and not column.printed:
        return False
    return any(_value(column, row, printed=printed) is not None for row in rows)


def _is_number(column: Column, rows: Sequence[object], printed: bool) -> bool:
    return not all(isinstance(_value(column, row, printed=printed), str | None) for row in rows) or bool(
        column.printed
    )


def _cell(column: Column, row: object, printed: bool) -> TableCell:
    """Ours in colour: green where it is better than the baseline by more than a little, red where it is worse."""
    form = column.form if column.printed_form is None or not printed else column.printed_form
    text = _text(_value(column, row, printed=printed), form)
    part = getattr(row, f"paper_{column.change}" if printed else column.change) if column.change else None
    if part and text != NONE:
        text += f" ({column.sign * part:+.0%})"
    if printed:
        return TableCell("" if text == NONE else text, "dim")
    return TableCell(text, "" if part is None or abs(part) < _A_LITTLE else "green" if part > 0 else "red")


def _text(value: object, form: Form) -> str:
    if value is None:
        return NONE
    return format(value, form) if isinstance(form, str) else form(value)
