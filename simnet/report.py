"""A static report of a command's results: one HTML file that needs nothing else."""

import base64
import html
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px}td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}img{max-width:100%;margin:.5rem 0 1.5rem}dt{font-weight:600;float:left;
clear:left;margin-right:.5rem}dd{margin:0}.scroll{overflow-x:auto}footer{color:#666;margin-top:2rem}"""


@dataclass(frozen=True, slots=True)
class Report:
    """What a report says."""

    title: str
    parameters: Mapping[str, object]
    """What it takes to run the same again."""
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Of the table, as text."""
    remarks: Sequence[str] = ()
    figures: Sequence[tuple[str, Path]] = ()
    """Captions and PNG files, which are taken in."""


def render(report: Report) -> str:
    """The file's text. Everything is escaped. OSError if a figure cannot be read."""
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{_text(report.title)}</title>",
        f"<style>{_STYLE}</style><h1>{_text(report.title)}</h1>",
        _table(report.header, report.rows),
        *(f"<p>{_text(remark)}</p>" for remark in report.remarks),
        *(_figure(caption, path) for caption, path in report.figures),
        "<h2>Parameters</h2><dl>",
        *(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in report.parameters.items()),
        f"</dl><footer>{_text(_machine())}</footer></html>\n",
    ]
    return "\n".join(parts)


def write_report(path: Path, report: Report) -> Path:
    """Writes it; OSError if it cannot."""
    path.write_text(render(report), encoding="utf-8")
    return path


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in header)
    body = "\n".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _figure(caption: str, path: Path) -> str:
    encoded = base64.b64encode(path.read_bytes()).decode()
    return f'<h2>{_text(caption)}</h2><img alt="{_text(caption)}" src="data:image/png;base64,{encoded}">'


def _machine() -> str:
    return (
        f"molink {metadata.version('molink')}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}, {os.cpu_count()} processors"
    )


def _text(value: object) -> str:
    return html.escape(str(value))
