"""How a swarm did over time, as pictures and tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from molink.simnet.presentation.pictures import Picture, from_zero, new_figure, saved
from molink.simnet.presentation.results import write_csv
from molink.simnet.swarm.members.traffic import BUDGET_KBIT_S, KINDS
from molink.simnet.swarm.report import SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = Sequence[Mapping[str, float | int | None]]
_FIGURES = {
    "tpot": ("TPOT of sessions that ended, ms", ("tpot_ms",)),
    "success-rate": ("sessions that were completed, of those that ended", ("success_rate",)),
    "traffic": ("control plane, kbit/s that a peer sends", KINDS),
}


def draw_swarm(runs: Mapping[str, Series], folder: Path) -> list[Picture]:
    """TPOT, success rate and traffic over time, each as a table and a picture with a line for each run, or for each
    kind of traffic; `swarm-minutes.csv` has the whole series."""
    drawn = []
    for name, (label, columns) in _FIGURES.items():
        stem = folder / f"swarm-{name}"
        header = ("run", "minute", *columns)
        rows = [
            [run, *(line[column] for column in ("minute", *columns))]
            for run, series in runs.items()
            for line in series
        ]
        write_csv(stem.with_suffix(".csv"), header, rows)
        figure = new_figure(7.5, 4.2)
        axes = figure.subplots()
        for run, series in runs.items():
            for column in columns:
                _draw(
                    axes,
                    series,
                    column,
                    ", ".join(part for part in (run, column) if len(columns) > 1 or part == run),
                )
        if name == "traffic":
            axes.axhline(BUDGET_KBIT_S, color="black", linestyle=":", label="budget")
        axes.set(xlabel="minutes", ylabel=label)
        from_zero(axes)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.grid(visible=True, linewidth=0.4, alpha=0.5)
        drawn.append(saved(figure, stem, f"{label[0].upper()}{label[1:]}"))
    lines = [[run, *(line[column] for column in SERIES)] for run, series in runs.items() for line in series]
    write_csv(folder / "swarm-minutes.csv", ("run", *SERIES), lines)
    return drawn


def _draw(axes: "Axes", series: Series, column: str, label: str) -> None:
    points = [(line["minute"], line[column]) for line in series if line[column] is not None]
    if points:
        axes.plot(*zip(*points, strict=True), linewidth=1.3, label=label)
