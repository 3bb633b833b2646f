"""A figure as a description: panels, what they show, and its table. Pure; `drawing.py` draws it."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, Literal

from molink.routing.arrays import FloatArray


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one name, which has the same colour in all figures."""

    name: str
    x: Sequence[float] | Sequence[str]
    y: Sequence[float | None]
    """None leaves a gap."""
    low: Sequence[float | None] | None = None
    """With `high`: intervals about the values."""
    high: Sequence[float | None] | None = None
    printed: bool = False
    """By the paper: hollow, beside those of the same name or, where there are none, hatched."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines, or bars in groups or on each other."""

    series: Sequence[Series]
    x_label: str
    y_label: str
    kind: Literal["lines", "bars", "stacked", "points"] = "lines"
    """points: at places that were measured, not chosen."""
    title: str = ""
    log_x: bool = False
    log_y: bool = False
    limit: float | None = None
    """A dotted line at that height,"""
    limit_name: str = ""
    """which is called so."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Values from each to each."""

    values: FloatArray
    names: Sequence[str]
    """Of both sides; none if they are too many."""
    label: str
    title: str
    x_label: str = "to"
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """Of a lane: from then on so long."""

    start_s: float
    taken_s: float
    kind: str


@dataclass(frozen=True, slots=True)
class Lanes:
    """What each of some things did when."""

    lanes: Mapping[str, Sequence[Part]]
    window_s: tuple[float, float]
    title: str
    outlined: Sequence[str] = ()
    """Lanes whose parts are drawn apart."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A picture, and a table of what it shows; without panels a table only."""

    stem: str
    """Of its files: .png and .csv."""
    caption: str
    panels: Sequence[Panel] | Sequence[HeatMap] | Sequence[Lanes]
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    title: str = ""
    columns: int = 3
    """Panels side by side."""
    size: tuple[float, float] = (4.2, 3.4)
    """Of a panel, in inches."""


def table_of(rows: Sequence[Any]) -> tuple[list[str], list[tuple[object, ...]]]:
    """The header and lines of flat rows, at least one."""
    return [field.name for field in fields(rows[0])], [astuple(row) for row in rows]
