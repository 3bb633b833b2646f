"""A static report of a command's results: one HTML file that needs nothing else, made with Jinja.

Its tables are those that a terminal shows; pictures are taken in.
"""

import base64
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.resources import files
from pathlib import Path

from molink.simnet.presentation.figures import Figure, Panel
from molink.simnet.presentation.tables import Grid, explained


@dataclass(frozen=True, slots=True)
class Report:
    """What a report says."""

    title: str
    date: str
    command_line: str
    """That does the same again."""
    parameters: Mapping[str, object]
    tables: Sequence[Grid]
    remarks: Sequence[str] = ()
    pictures: Sequence[tuple[Figure, Path]] = ()
    """And where they are."""


def render(report: Report) -> str:
    """The file's text. Everything is escaped. OSError if a picture cannot be read."""
    from jinja2 import Environment, StrictUndefined

    template = files("molink.simnet").joinpath("data", "report.html.jinja").read_text(encoding="utf-8")
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(template)
    figures = [figure for figure, _ in report.pictures]
    return page.render(
        title=report.title,
        date=report.date,
        command_line=report.command_line,
        tables=report.tables,
        remarks=report.remarks,
        pictures=[
            {"caption": figure.caption, "base64": base64.b64encode(path.read_bytes()).decode()}
            for figure, path in report.pictures
        ],
        words=explained(said for figure in figures for said in _said(figure)),
        parameters=list(_parameters(report.parameters)),
        machine=(
            f"molink {metadata.version('molink')}, Python {platform.python_version()}, {platform.system()} "
            f"{platform.machine()}, {os.cpu_count()} processors"
        ),
    )


def _said(figure: Figure) -> Iterator[str]:
    yield figure.caption
    for panel in figure.panels:
        if isinstance(panel, Panel):
            yield from (panel.x_label, panel.y_label, *(f"policy {one.name}" for one in panel.series))


def _parameters(parameters: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    """A line for each; of those that have parts, one for each part."""
    for name, value in parameters.items():
        parts = value if isinstance(value, Mapping) else {}
        yield {"name": name, "value": "" if parts else _value(value), "sub": False}
        for part, its in parts.items():
            yield {"name": part, "value": _value(its), "sub": True}


def _value(value: object) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_value(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        nested = any(isinstance(one, Sequence) and not isinstance(one, str) for one in value)
        return (" | " if nested else ", ").join(_value(one) for one in value)
    return str(value)
