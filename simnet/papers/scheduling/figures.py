"""Figures 5, 6 and 7 of the decentralized-scheduling paper with our numbers, each as a picture and a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from molink.routing.arrays import FloatArray
from molink.simnet.core.matrices import RttMatrix
from molink.simnet.papers.scheduling.comparison import Row, Setting
from molink.simnet.papers.scheduling.testbeds import Placement
from molink.simnet.papers.scheduling.variants import in_paper_order
from molink.simnet.presentation.pictures import COLOURS, MARKERS, Picture, legend_below, new_figure, saved
from molink.simnet.presentation.results import write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_DRAWN = 100
"""Machines whose latencies are drawn: beyond that the picture shows nothing more and the table has millions
of lines."""

_FIGURE_7 = (
    *("testbed", "machines", "algorithm", "family", "execution_s", "tpot_ms", "tpot_low_ms", "tpot_high_ms"),
    *("paper_execution_s", "paper_tpot_ms"),
)
_MOST_NAMED = 45
_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


def draw_regions(matrix: RttMatrix, folder: Path) -> Picture:
    """Figure 5: round trips between all regions. The table has the format of `--latency-matrix`."""
    stem = folder / "figure-5-region-latencies"
    cells = [[float(value) for value in row] for row in matrix.rtt_ms]
    rows = [[region, *values] for region, values in zip(matrix.regions, cells, strict=True)]
    write_csv(stem.with_suffix(".csv"), ["region", *matrix.regions], rows)
    figure = new_figure(9.5, 8.5)
    axes = figure.subplots()
    _heat_map(figure, axes, matrix.rtt_ms, "round trip, ms", numbers=len(matrix.regions) <= 24)
    places = range(len(matrix.regions))
    axes.set_xticks(places, matrix.regions, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_yticks(places, matrix.regions, fontsize=8)
    axes.set(title="Round trips between regions", xlabel="to", ylabel="from")
    return saved(figure, stem, "Round trips between regions (scheduling paper, Figure 5)")


def draw_machines(placements: Sequence[tuple[Setting, Placement]], folder: Path) -> Picture:
    """Figure 6: one-way latencies between the machines of one example of each setting, ordered by region."""
    stem = folder / "figure-6-machine-latencies"
    figure = new_figure(7.4 * min(2, len(placements)), 6.0 * -(-len(placements) // 2))
    grid = figure.subplots(-(-len(placements) // 2), min(2, len(placements)), squeeze=False).ravel()
    lines: list[tuple[object, ...]] = []
    for axes, (setting, placement) in zip(grid, placements, strict=False):
        machines = len(placement.gpus)
        spread = np.linspace(0, machines - 1, min(machines, MOST_DRAWN)).astype(np.int64)
        chosen = spread[np.argsort(np.array(placement.regions)[spread], kind="stable")]
        latency_ms = placement.problem.links.block(chosen, chosen)
        names = [f"{placement.regions[machine]} {placement.gpus[machine]}" for machine in chosen]
        names = names if len(names) <= _MOST_NAMED else []
        _heat_map(figure, axes, latency_ms, "one way, ms", numbers=False)
        axes.set_xticks([])
        axes.set_yticks(range(len(names)), names, fontsize=7 if len(names) <= 21 else 5.5)
        axes.set(xlabel="to, in the same order", ylabel="from")
        shown = f", {MOST_DRAWN} of them" if machines > MOST_DRAWN else ""
        axes.set_title(f"{setting.name.capitalize()}{shown}")
        lines += [
            (setting.testbed, *_end(placement, start), *_end(placement, stop), float(latency_ms[row, column]))
            for row, start in enumerate(chosen.tolist())
            for column, stop in enumerate(chosen.tolist())
        ]
    for axes in grid[len(placements) :]:
        axes.set_axis_off()
    ends = ("from_machine", "from_region", "from_gpu", "to_machine", "to_region", "to_gpu")
    write_csv(stem.with_suffix(".csv"), ("testbed", *ends, "one_way_ms"), lines)
    return saved(figure, stem, "One-way latencies between the machines of one problem (Figure 6)")


def draw_algorithms(rows: Sequence[Row], settings: Sequence[Setting], folder: Path) -> Picture:
    """Figure 7: mean TPOT against execution time, with 95 % confidence intervals.

    Each point is a run of its own with its own limit or number of samples; points of one algorithm are joined in
    the order of the rows.
    What the paper prints is drawn hollow.
    """
    stem = folder / "figure-7-algorithms"
    lines = [[getattr(row, field) for field in _FIGURE_7] for row in rows]
    write_csv(stem.with_suffix(".csv"), _FIGURE_7, lines)
    columns = min(2, len(settings))
    figure = new_figure(6.2 * columns, 4.4 * -(-len(settings) // columns))
    grid = figure.subplots(-(-len(settings) // columns), columns, squeeze=False).ravel()
    families = in_paper_order({row.family for row in rows})
    for axes, setting in zip(grid, settings, strict=False):
        own = [row for row in rows if row.testbed == setting.testbed]
        for number, family in enumerate(families):
            _draw_family(axes, [row for row in own if row.family == family], family, number)
        axes.set(xlabel="execution time, s", ylabel="TPOT, ms", title=setting.name.capitalize())
        _scale(axes)
    for axes in grid[len(settings) :]:
        axes.set_axis_off()
    legend_below(figure, families)
    averaged = (
        "One problem" if rows[0].seeds == 1 else f"Means over {rows[0].seeds} problems, with 95 % intervals"
    )
    hollow = "; hollow: the paper's averages" if any(row.paper_tpot_ms for row in rows) else ""
    figure.suptitle(f"{averaged}{hollow}", fontsize=11)
    return saved(figure, stem, "What a search takes and what it finds (Figure 7)")


def _draw_family(axes: "Axes", rows: Sequence[Row], family: str, number: int) -> None:
    style: dict[str, Any] = {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
    }
    points = [
        (row.execution_s, row.tpot_ms, row.tpot_ms - row.tpot_low_ms, row.tpot_high_ms - row.tpot_ms)
        for row in rows
        if row.execution_s is not None
        and row.tpot_ms is not None
        and row.tpot_low_ms is not None
        and row.tpot_high_ms is not None
    ]
    if points:
        times_s, tpots_ms, below_ms, above_ms = zip(*points, strict=True)
        errors_ms = (below_ms, above_ms)
        axes.errorbar(
            times_s, tpots_ms, errors_ms, **style, markersize=5, linewidth=1.2, capsize=2, label=family
        )
    printed = [
        (row.paper_execution_s, row.paper_tpot_ms)
        for row in rows
        if row.paper_execution_s is not None and row.paper_tpot_ms is not None
    ]
    if printed:
        axes.plot(
            *zip(*printed, strict=True), **style, linestyle=":", linewidth=1.0, markersize=6, mfc="none"
        )


def _scale(axes: "Axes") -> None:
    """Whole decades of time; 200, 250, 300 ms instead of powers of ten, since TPOT spans less than two."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    def plain(value: float, _place: int | None) -> str:
        return f"{value:g}"

    axes.set(xscale="log", yscale="log")
    first, last = np.floor(np.log10(axes.get_xlim()[0])), np.ceil(np.log10(axes.get_xlim()[1]))
    axes.set_xlim(10**first, 10**last)
    axes.xaxis.set_major_locator(FixedLocator((10.0 ** np.arange(first, last + 1)).tolist()))
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.1, high * 1.1)
    axes.yaxis.set_major_locator(FixedLocator(np.outer(10.0 ** np.arange(-2, 6), _STEPS).ravel().tolist()))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(plain))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", linewidth=0.4, alpha=0.5)


def _heat_map(figure: "Figure", axes: "Axes", values_ms: FloatArray, label: str, *, numbers: bool) -> None:
    image = axes.imshow(values_ms, cmap="viridis", vmin=0)
    figure.colorbar(image, ax=axes, label=label, shrink=0.85)
    if not numbers:
        return
    middle = float(values_ms.max()) * 0.6
    for (row, column), value in np.ndenumerate(values_ms):
        colour = "black" if value > middle else "white"
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=6)


def _end(placement: Placement, machine: int) -> tuple[int, str, str]:
    return machine, placement.regions[machine], placement.gpus[machine]
