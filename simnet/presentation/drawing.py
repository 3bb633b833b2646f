"""Figures drawn with Matplotlib: the same name has the same colour and marker in all of them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from molink.simnet.presentation.figures import Figure, HeatMap, Lanes, Panel, Series

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure as Picture

_DPI = 150
_LOOKS = tuple(
    zip(
        ("#0072b2", "#999999", "#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#000000"),
        ("o", "s", "D", "^", "v", "P", "X", "*"),
        strict=True,
    )
)
"""Colours of Okabe and Ito, which colour-blind readers tell apart."""
_OWN: Mapping[str, int] = MappingProxyType(
    {
        "molink": 0,
        "concurrent": 1,
        "vllm": 1,
        "zeromq": 2,
        "splitwise": 2,
        "paper": 3,
        "accellm": 3,
        "fixed-chunk": 4,
        "petals": 5,
        "decode": 0,
        "prefill": 3,
    }
)
"""Whose looks are taken, whatever else is in a figure."""
_GROUP = 0.8
"""Of the distance between two groups of bars, what the bars take."""
_FEW_TICKS = 9
_MOST_NAMED = 45
_FEW_NUMBERS = 24
_ROOM = 1.04
_DECADES = 20
"""A logarithmic axis for values so many times apart."""
_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_THIN: Mapping[str, Any] = MappingProxyType({"linewidth": 0.4, "alpha": 0.5})


def draw(figure: Figure, path: Path) -> None:
    """Writes the picture; OSError if it cannot. Without pyplot: no window system, nothing global."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    panels: Sequence[Panel | HeatMap | Lanes] = figure.panels
    columns = min(figure.columns, len(panels))
    lines = -(-len(panels) // columns)
    width, height = figure.size
    picture = Canvas(figsize=(width * columns, height * lines + 0.8), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(picture)
    grid = picture.subplots(lines, columns, squeeze=False).ravel()
    looks = _looks(panels)
    for axes, panel in zip(grid, panels, strict=False):
        if isinstance(panel, HeatMap):
            _heat_map(picture, axes, panel)
        elif isinstance(panel, Lanes):
            _lanes(axes, panel, looks)
        else:
            _panel(axes, panel, looks)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    if figure.title:
        picture.suptitle(figure.title, fontsize=11)
    _legend(picture)
    picture.savefig(path)


def _looks(panels: Iterable[Panel | HeatMap | Lanes]) -> dict[str, tuple[str, str]]:
    """Of each name its own, of the others those that are left, in their order."""
    names: dict[str, None] = {}
    for panel in panels:
        if isinstance(panel, Panel):
            names |= dict.fromkeys(one.name for one in panel.series)
        elif isinstance(panel, Lanes):
            names |= dict.fromkeys(part.kind for parts in panel.lanes.values() for part in parts)
    taken = {_OWN[name] for name in names if name in _OWN}
    left = [at for at in range(len(_LOOKS)) if at not in taken] or list(range(len(_LOOKS)))
    others = [name for name in names if name not in _OWN]
    places = {**_OWN, **{name: left[at % len(left)] for at, name in enumerate(others)}}
    return {name: _LOOKS[places[name]] for name in names}


def _legend(picture: "Picture") -> None:
    """One for all panels below them, in as many lines as it takes not to be cut."""
    shown: dict[str, Artist] = {}
    for axes in picture.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    if len(shown) < 2:
        return
    for columns in range(len(shown), 0, -1):
        legend = picture.legend(
            shown.values(), shown.keys(), loc="outside lower center", ncols=columns, frameon=False
        )
        if columns == 1 or legend.get_window_extent().width <= picture.bbox.width:
            return
        legend.remove()


def _panel(axes: "Axes", panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    if panel.kind in ("bars", "stacked"):
        _bars(axes, panel, looks)
    else:
        for one in panel.series:
            _line(axes, one, *looks[one.name])
    if panel.limit is not None:
        axes.axhline(panel.limit, color="black", linestyle=":", linewidth=1.0, label=panel.limit_name)
    axes.set(xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize=10)
    axes.grid(visible=True, axis="both" if panel.kind in ("lines", "points") else "y", **_THIN)
    _scale(axes, panel)


def _line(axes: "Axes", series: Series, colour: str, marker: str) -> None:
    """What a paper prints is hollow."""
    style: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5}
    known = [at for at, value in enumerate(series.y) if value is not None]
    if not known:
        return
    x, y = [series.x[at] for at in known], [value for value in series.y if value is not None]
    if series.printed:
        axes.plot(x, y, **style, linestyle=":", linewidth=0.9, mfc="none")
    elif series.low is not None and series.high is not None:
        low, high = np.array([series.low[at] for at in known]), np.array([series.high[at] for at in known])
        axes.errorbar(
            x,
            y,
            (np.array(y) - low, high - np.array(y)),
            **style,
            linewidth=1.2,
            capsize=2,
            label=series.name,
        )
    else:
        few = len(x) <= 2 * _FEW_TICKS
        axes.plot(x, y, **(style if few else {"color": colour}), linewidth=1.3, label=series.name)


def _bars(axes: "Axes", panel: Panel, looks: Mapping[str, tuple[str, str]]) -> None:
    """What a paper prints is dashed over the bars of its name, or, where there are none, beside the others."""
    groups = list(dict.fromkeys(str(at) for one in panel.series for at in one.x))
    own = list(dict.fromkeys(one.name for one in panel.series))
    beside = 1 if panel.kind == "stacked" else len(own)
    width = _GROUP / beside
    bottom = np.zeros(len(groups))
    filled = {one.name for one in panel.series if not one.printed}
    for one in panel.series:
        by_group = dict(zip(map(str, one.x), one.y, strict=True))
        heights = np.array([by_group.get(group) or 0.0 for group in groups])
        places = np.arange(len(groups)) + (own.index(one.name) % beside - (beside - 1) / 2) * width
        if one.printed and one.name in filled:
            axes.bar(
                places, heights, 0.9 * width, fill=False, edgecolor="black", linestyle="--", linewidth=0.8
            )
            continue
        hatch = "//" if one.printed else None
        if heights.any():
            colour = looks[one.name][0]
            axes.bar(places, heights, 0.9 * width, bottom, color=colour, hatch=hatch, label=one.name)
        if panel.kind == "stacked":
            bottom = bottom + heights
    axes.set_xticks(range(len(groups)), groups, fontsize=8)


def _scale(axes: "Axes", panel: Panel) -> None:
    """Lines begin at zero unless an axis is logarithmic; counts have whole ticks."""
    from matplotlib.ticker import MaxNLocator

    x = [value for one in panel.series for value in one.x]
    y = [value for one in panel.series for value in one.y if value is not None]
    if not y:
        return
    if panel.log_y:
        _logarithmic(axes.yaxis, y, decades=panel.kind in ("bars", "stacked"))
    else:
        top = max(axes.get_ylim()[1], axes.dataLim.y1)
        axes.set_ylim(0.0, _ROOM * top if top > 0 else 1.0)
        if all(isinstance(value, int) for value in y):
            axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if panel.kind not in ("lines", "points") or any(isinstance(value, str) for value in x):
        return
    places = sorted({float(value) for value in x})
    if panel.kind == "points":
        _logarithmic(axes.xaxis, places, decades=True)
    else:
        log = panel.log_x or (places[0] > 0 and places[-1] >= _DECADES * places[0])
        if log:
            _logarithmic(axes.xaxis, places, decades=False)
        if len(places) <= _FEW_TICKS:
            axes.set_xticks(places, [f"{place:g}" for place in places])
        elif not log and all(place.is_integer() for place in places):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _logarithmic(axis: "Axis", values: Sequence[float], *, decades: bool) -> None:
    """Whole decades, or, where values span less than two, 200, 250, 300 instead of powers of ten."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    known = [value for value in values if value > 0]
    if not known:
        return
    axes: Any = axis.axes
    across = axis is axes.xaxis
    set_scale = axes.set_xscale if across else axes.set_yscale
    set_limits = axes.set_xlim if across else axes.set_ylim
    set_scale("log")
    first, last = np.floor(np.log10(min(known))), np.ceil(np.log10(max(known)))
    if decades:
        first -= min(known) < _ROOM * 10**first  # a bar from the axis up, however short
        last = max(last, first + 1)
        set_limits(10**first, 10**last * (2.0 if max(known) >= 0.9 * 10**last else 1.0))
        axis.set_major_locator(FixedLocator((10.0 ** np.arange(first, last + 1)).tolist()))
    else:
        set_limits(min(known) / 1.15, max(known) * 1.15)
        close = last - first <= 2
        steps = np.outer(10.0 ** np.arange(first - 1, last + 1), _STEPS if close else (1.0,)).ravel()
        axis.set_major_locator(FixedLocator(steps.tolist()))
    axis.set_major_formatter(FuncFormatter(_plain))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float, _place: int | None) -> str:
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:g}"


def _heat_map(picture: "Picture", axes: "Axes", panel: HeatMap) -> None:
    image = axes.imshow(panel.values, cmap="viridis", vmin=0)
    picture.colorbar(image, ax=axes, label=panel.label, shrink=0.85)
    size = 8 if len(panel.names) <= _FEW_NUMBERS else 5.5
    names = panel.names if len(panel.names) <= _MOST_NAMED else ()
    axes.set_yticks(range(len(names)), names, fontsize=size)
    across = names if panel.numbers else ()
    axes.set_xticks(
        range(len(across)), across, rotation=60, ha="right", rotation_mode="anchor", fontsize=size
    )
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel="from")
    if panel.numbers and len(panel.names) <= _FEW_NUMBERS:
        middle = float(panel.values.max()) * 0.6
        write = partial(axes.text, ha="center", va="center", fontsize=6)
        for (row, column), value in np.ndenumerate(panel.values):
            write(column, row, f"{value:.0f}", color="black" if value > middle else "white")


def _lanes(axes: "Axes", panel: Lanes, looks: Mapping[str, tuple[str, str]]) -> None:
    names = list(panel.lanes)[::-1]
    for number, name in enumerate(names):
        for kind in looks:
            spans = [(one.start_s, one.taken_s) for one in panel.lanes[name] if one.kind == kind]
            colour = looks[kind][0]
            edge = "white" if name in panel.outlined else colour
            where = (number + (1 - _GROUP) / 2, _GROUP)
            axes.broken_barh(spans, where, facecolor=colour, edgecolor=edge, linewidth=0.4, label=kind)
    axes.set(xlim=panel.window_s, ylim=(0, len(names)), xlabel="s")
    axes.label_outer()
    axes.set_yticks([number + 0.5 for number in range(len(names))], names, fontsize=8)
    axes.set_title(panel.title, fontsize=8, loc="left")
