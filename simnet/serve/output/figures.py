"""A serving table as grouped bars, and a sweep as lines."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, fields
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molink.simnet.presentation.pictures import MARKERS, Picture, from_zero, legend_below, new_figure, saved
from molink.simnet.presentation.results import write_csv
from molink.simnet.serve.output.table import METRICS, SETTINGS, shown_setting
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#000000")
_PAINTED = ("concurrent", "zeromq", "paper", "molink", "fixed-chunk", "petals")
"""Policies whose colours are the first ones, whatever else is in a table."""
_GROUP = 0.8
"""Of the distance between two settings, what their bars take."""
_FEW_TICKS = 9
_DECADES = 20
"""A logarithmic axis for values so many times apart."""
_UNITS = {"delay_ms": "delay, ms one way", "bandwidth_mbps": "uplink, Mbps", "rate_rps": "requests/s"}


def draw_table(table: Preset, rows: Sequence[ServeRow], folder: Path) -> Picture:
    """A panel for each metric, a group of bars for each setting; what the paper prints is drawn dashed over them."""
    stem = folder / "serving"
    _write_rows(stem, rows)
    settings = list(dict.fromkeys(_setting(row) for row in rows))
    names = list(dict.fromkeys(map(_system, rows)))
    figure = new_figure(12.0, 8.0)
    for axes, (metric, label, _, _) in zip(figure.subplots(2, 2).flat, METRICS, strict=True):
        for number, name in enumerate(names):
            own = {_setting(row): row for row in rows if _system(row) == name}
            _bars(axes, [own.get(one) for one in settings], metric, name, (number, len(names)))
        axes.set_xticks(range(len(settings)), [_label(one) for one in settings], fontsize=7)
        axes.set(ylabel=label)
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.5)
    legend_below(figure)
    printed = "; dashed: the paper's" if any(row.paper_tpot_s is not None for row in rows) else ""
    figure.suptitle(f"{_whose(table, rows)}: averages over requests{printed}", fontsize=11)
    return saved(figure, stem, "The table as bars")


def draw_sweep(table: Preset, rows: Sequence[ServeRow], folder: Path) -> list[Picture]:
    """A picture for each metric: a line for each system over what is swept first, a panel for each combination of what
    else is swept; what the paper prints is hollow."""
    return [
        _draw_metric(table, rows, metric, label, folder)
        for metric, label, _, _ in METRICS
        if any(getattr(row, metric) is not None for row in rows)
    ]


def _whose(table: Preset, rows: Sequence[ServeRow]) -> str:
    counts = sorted({row.peers for row in rows})
    return f"{table.model} on {f'{counts[0]} x ' if len(counts) == 1 else ''}{table.device}"


def _draw_metric(table: Preset, rows: Sequence[ServeRow], metric: str, label: str, folder: Path) -> Picture:
    over, others = table.swept[0], table.swept[1:]
    values = [list(dict.fromkeys(shown_setting(row, name) for row in rows)) for name in others]
    panels = list(product(*values))
    systems = list(dict.fromkeys(map(_system, rows)))
    places = _places(rows, over)
    columns = min(3, len(panels))
    figure = new_figure(max(6.4, 4.4 * columns), 0.9 + 3.6 * -(-len(panels) // columns))
    grid = figure.subplots(-(-len(panels) // columns), columns, squeeze=False, sharey=True).ravel()
    for axes, panel in zip(grid, panels, strict=False):
        own = [row for row in rows if tuple(shown_setting(row, name) for name in others) == panel]
        for number, system in enumerate(systems):
            mine = [row for row in own if _system(row) == system]
            at = [places[shown_setting(row, over)] for row in mine]
            _line(axes, mine, at, metric, (system, number))
        _ticks(axes, places)
        axes.set(xlabel=_UNITS.get(over, SETTINGS[over]), ylabel=label)
        axes.set_title(_panel_title(others, panel), fontsize=9)
        axes.grid(visible=True, linewidth=0.4, alpha=0.5)
    from_zero(grid[0])
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    legend_below(figure)
    printed = any(getattr(row, f"paper_{metric}") is not None for row in rows)
    hollow = "; hollow: printed in the paper" if printed else ""
    figure.suptitle(f"{_whose(table, rows)}\naverages over requests{hollow}", fontsize=11)
    name = metric.rsplit("_", 1)[0]
    stem = folder / f"sweep-{name}"
    _write_rows(stem, rows)
    return saved(figure, stem, f"{label} by {_UNITS.get(over, SETTINGS[over])}")


def _line(
    axes: "Axes", rows: Sequence[ServeRow], places: Sequence[float], metric: str, system: tuple[str, int]
) -> None:
    """Of one system, in the order of places."""
    name, number = system
    style: dict[str, Any] = {
        "color": _colour(name, number),
        "marker": MARKERS[number % len(MARKERS)],
        "markersize": 5,
    }
    looks: tuple[tuple[str, dict[str, Any]], ...] = (
        (metric, {"linewidth": 1.3, "label": name}),
        (f"paper_{metric}", {"linewidth": 0.8, "linestyle": ":", "mfc": "none"}),
    )
    for values_of, look in looks:
        points = [
            (place, value)
            for place, row in sorted(zip(places, rows, strict=True), key=lambda one: one[0])
            if (value := getattr(row, values_of)) is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), **style, **look)


def _places(rows: Sequence[ServeRow], over: str) -> dict[str, float]:
    """Where each value is on the axis: at itself if all are numbers, else one after the other."""
    shown = list(dict.fromkeys(shown_setting(row, over) for row in rows))
    try:
        return {one: float(one) for one in shown}
    except ValueError:
        return {one: float(place) for place, one in enumerate(shown)}


def _ticks(axes: "Axes", places: Mapping[str, float]) -> None:
    """At the values, if there are few."""
    from matplotlib.ticker import NullFormatter, NullLocator

    least, most = min(places.values()), max(places.values())
    if least > 0 and most >= _DECADES * least:
        axes.set_xscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    if len(places) <= _FEW_TICKS:
        axes.set_xticks(list(places.values()), list(places))


def _panel_title(names: Sequence[str], panel: Sequence[str]) -> str:
    return ", ".join(f"{value} {SETTINGS[name]}" for name, value in zip(names, panel, strict=True))


def _write_rows(stem: Path, rows: Sequence[ServeRow]) -> None:
    write_csv(stem.with_suffix(".csv"), [field.name for field in fields(ServeRow)], map(astuple, rows))


def _bars(
    axes: "Axes", rows: Sequence[ServeRow | None], metric: str, name: str, place: tuple[int, int]
) -> None:
    number, count = place
    width = _GROUP / count
    places = np.arange(len(rows)) + (number - (count - 1) / 2) * width
    colour = _colour(name, number)
    axes.bar(
        places, [getattr(row, metric, None) or 0.0 for row in rows], 0.9 * width, color=colour, label=name
    )
    printed = [getattr(row, f"paper_{metric}", None) or 0.0 for row in rows]
    axes.bar(places, printed, 0.9 * width, fill=False, edgecolor="black", linestyle="--", linewidth=0.8)


def _colour(name: str, number: int) -> str:
    """Of a policy its own; of a technique that of its place among the others."""
    return _COLOURS[_PAINTED.index(name) if name in _PAINTED else number % len(_COLOURS)]


def _setting(row: ServeRow) -> tuple[float, float, float]:
    return row.rate_rps, row.bandwidth_mbps, row.delay_ms


def _label(setting: tuple[float, float, float]) -> str:
    rate_rps, bandwidth_mbps, delay_ms = setting
    return f"{rate_rps:g}/s\n{bandwidth_mbps:g} Mbps\n{delay_ms:g} ms"


def _system(row: ServeRow) -> str:
    return row.technique or row.policy
