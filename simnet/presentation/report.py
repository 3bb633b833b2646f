"""A static report of a command's results: one HTML file that needs nothing else.

Its tables are those that a terminal shows; pictures are taken in.
"""

import base64
import html
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from molink.simnet.presentation.pictures import Picture

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

_STYLE = """:root{color-scheme:light dark;--line:#d8d8d8;--dim:#6a6a6a;--head:#f3f4f6;--good:#00694c;--bad:#a63d00}
@media(prefers-color-scheme:dark){:root{--line:#444;--dim:#a0a0a0;--head:#26282c;--good:#4cc9a0;--bad:#f0955a}}
body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem}h1{font-size:1.6rem}
h2{font-size:1.15rem;margin:2.5rem 0 .5rem;border-bottom:1px solid var(--line)}p{max-width:50rem}
.scroll{overflow-x:auto;margin:1.5rem 0}table{border-collapse:collapse;font-size:13px}
table{font-variant-numeric:tabular-nums}
caption{text-align:left;font-weight:600;white-space:pre-line;padding-bottom:.4rem}
th,td{padding:.2rem .7rem;text-align:left;vertical-align:bottom;white-space:pre-line}
th{background:var(--head)}tr.end td{border-bottom:1px solid var(--line)}.right{text-align:right}
.dim,footer{color:var(--dim)}.green{color:var(--good)}.red{color:var(--bad)}.note{font-size:13px;white-space:pre-line}
figure{margin:1.5rem 0}img{max-width:100%;background:#fff;border-radius:4px}figcaption{font-weight:600}
footer{margin-top:3rem;font-size:13px}"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a report says."""

    title: str
    parameters: Mapping[str, object]
    """What it takes to run the same again, seeds among it."""
    tables: Sequence["Table"]
    remarks: Sequence[str] = ()
    pictures: Sequence[Picture] = ()


def render(report: Report) -> str:
    """The file's text. Everything is escaped. OSError if a picture cannot be read."""
    title = _text(report.title)
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>",
        *(_table(table) for table in report.tables),
        *(f"<p>{_text(remark)}</p>" for remark in report.remarks),
        "<h2>Figures</h2>" if report.pictures else "",
        *(_figure(picture) for picture in report.pictures),
        "<h2>Parameters</h2>",
        _parameters(report.parameters),
        f"<footer>{_text(_machine())}</footer></body></html>\n",
    ]
    return "\n".join(part for part in parts if part)


def write_report(path: Path, report: Report) -> Path:
    """Writes it; OSError if it cannot."""
    path.write_text(render(report), encoding="utf-8")
    return path


def _table(table: "Table") -> str:
    """Styles of columns and of marked-up cells become classes."""
    sides = [_classes(column.justify, str(column.style)) for column in table.columns]
    head = "".join(
        f"<th{side}>{_cell(column.header)}</th>" for side, column in zip(sides, table.columns, strict=True)
    )
    lines = zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True)
    body = "\n".join(
        f"<tr{' class=end' * row.end_section}>"
        + "".join(f"<td{side}>{_cell(cell)}</td>" for side, cell in zip(sides, cells, strict=True))
        + "</tr>"
        for row, cells in lines
    )
    caption = f"<caption>{_cell(table.title)}</caption>" if table.title else ""
    note = f'<p class="note dim">{_cell(table.caption)}</p>' if table.caption else ""
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f"{note}</div>"
    )


def _classes(*names: str) -> str:
    """An attribute, if one of the names has a look of its own."""
    known = " ".join(name for name in names if name in ("right", "dim", "green", "red"))
    return f' class="{known}"' if known else ""


def _cell(content: "RenderableType") -> str:
    """As a terminal shows it."""
    from rich.text import Text

    text = Text.from_markup(content) if isinstance(content, str) else content
    if not isinstance(text, Text):
        raise TypeError(f"a report's cells are text, not {type(text).__name__}")
    shown = _text(text.plain)
    styles = _classes(*sorted({str(span.style) for span in text.spans} | {str(text.style)}))
    return f"<span{styles}>{shown}</span>" if styles else shown


def _figure(picture: Picture) -> str:
    encoded = base64.b64encode(picture.png.read_bytes()).decode()
    caption = _text(picture.caption)
    return (
        f'<figure><figcaption>{caption}</figcaption><img alt="{caption}" src="data:image/png;base64,{encoded}">'
        "</figure>"
    )


def _parameters(parameters: Mapping[str, object]) -> str:
    lines = "\n".join(
        f"<tr class=end><th>{_text(name)}</th><td>{_text(_value(value))}</td></tr>"
        for name, value in parameters.items()
    )
    return f'<div class="scroll"><table><tbody>{lines}</tbody></table></div>'


def _value(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {_value(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        nested = any(isinstance(one, Sequence) and not isinstance(one, str) for one in value)
        return (" | " if nested else ", ").join(_value(one) for one in value)
    return str(value)


def _machine() -> str:
    return (
        f"molink {metadata.version('molink')}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} processors"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
