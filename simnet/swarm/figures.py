"""How a swarm did over time."""

from collections.abc import Mapping, Sequence

from molink.simnet.presentation.figures import Figure, Panel, Series
from molink.simnet.swarm.members.traffic import BUDGET_KBIT_S, KINDS
from molink.simnet.swarm.report import SERIES

Minutes = Sequence[Mapping[str, float | int | None]]
_FIGURES = {
    "tpot": ("TPOT of sessions that ended, ms", ("tpot_ms",)),
    "success-rate": ("sessions that were completed, of those that ended", ("success_rate",)),
    "traffic": ("control plane, kbit/s that a peer sends", KINDS),
}


def swarm_figures(runs: Mapping[str, Minutes]) -> list[Figure]:
    """TPOT, success rate and traffic over time, with a line for each run, or for each kind of traffic;
    `swarm-minutes.csv` has the whole series."""
    drawn = [Figure("swarm-minutes", "", [], ("run", *SERIES), _lines(runs, SERIES))]
    for name, (label, columns) in _FIGURES.items():
        series = [
            Series(
                ", ".join(part for part in (run, column) if len(columns) > 1 or part == run),
                [line["minute"] or 0 for line in minutes],
                [line[column] for line in minutes],
            )
            for run, minutes in runs.items()
            for column in columns
        ]
        limit = BUDGET_KBIT_S if name == "traffic" else None
        panel = Panel(series, "minutes", label, limit=limit, limit_name="budget")
        header = ("run", "minute", *columns)
        caption = f"{label[0].upper()}{label[1:]}"
        drawn.append(
            Figure(f"swarm-{name}", caption, [panel], header, _lines(runs, header[1:]), size=(7.5, 3.8))
        )
    return drawn


def _lines(runs: Mapping[str, Minutes], columns: Sequence[str]) -> list[list[object]]:
    return [[run, *(line[column] for column in columns)] for run, minutes in runs.items() for line in minutes]
