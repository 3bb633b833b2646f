"""Figures 5, 6 and 7 of the decentralized-scheduling paper with our numbers."""

from collections.abc import Iterator, Sequence

import numpy as np

from molink.simnet.core.matrices import RttMatrix
from molink.simnet.papers.scheduling.comparison import Comparison, Row, SearchSetting
from molink.simnet.papers.scheduling.testbeds import Deployment
from molink.simnet.papers.scheduling.variants import in_paper_order
from molink.simnet.presentation.figures import Figure, HeatMap, Panel, Series

MOST_DRAWN = 100
"""Machines whose latencies are drawn: beyond that the picture shows nothing more and the table has millions
of lines."""
_FIGURE_7 = (
    *("testbed", "machines", "algorithm", "family", "execution_s", "tpot_ms", "tpot_low_ms", "tpot_high_ms"),
    *("paper_execution_s", "paper_tpot_ms"),
)
_ENDS = ("from_machine", "from_region", "from_gpu", "to_machine", "to_region", "to_gpu")


def schedule_figures(comparison: Comparison, rows: Sequence[Row]) -> list[Figure]:
    """All three."""
    settings, world = comparison.settings, comparison.world
    examples = [(setting, setting.deployment(comparison.seeds[0], world)) for setting in settings]
    return [_regions(world.matrix), _machines(examples), _algorithms(rows, settings)]


def _regions(matrix: RttMatrix) -> Figure:
    """Figure 5: round trips between all regions. The table has the format of `--latency-matrix`."""
    title = "Round trips between regions"
    return Figure(
        "figure-5-region-latencies",
        f"{title} (scheduling paper, Figure 5)",
        [HeatMap(matrix.rtt_ms, matrix.regions, "round trip, ms", title, numbers=True)],
        ["region", *matrix.regions],
        [[region, *map(float, row)] for region, row in zip(matrix.regions, matrix.rtt_ms, strict=True)],
        size=(9.5, 7.7),
    )


def _machines(deployments: Sequence[tuple[SearchSetting, Deployment]]) -> Figure:
    """Figure 6: one-way latencies between the machines of one example of each setting, ordered by region."""
    panels: list[HeatMap] = []
    lines: list[tuple[object, ...]] = []
    for setting, deployment in deployments:
        machines = len(deployment.gpus)
        spread = np.linspace(0, machines - 1, min(machines, MOST_DRAWN)).astype(np.int64)
        chosen = spread[np.argsort(np.array(deployment.regions)[spread], kind="stable")]
        latency_ms = deployment.problem.links.block(chosen, chosen)
        names = [f"{deployment.regions[machine]} {deployment.gpus[machine]}" for machine in chosen]
        shown = f", {MOST_DRAWN} of them" if machines > MOST_DRAWN else ""
        title = f"{setting.name.capitalize()}{shown}"
        panels.append(HeatMap(latency_ms, names, "one way, ms", title, "to, in the same order"))
        lines += [
            (
                setting.testbed,
                *_end(deployment, start),
                *_end(deployment, stop),
                float(latency_ms[row, column]),
            )
            for row, start in enumerate(chosen.tolist())
            for column, stop in enumerate(chosen.tolist())
        ]
    return Figure(
        "figure-6-machine-latencies",
        "One-way latencies between the machines of one problem (Figure 6)",
        panels,
        ("testbed", *_ENDS, "one_way_ms"),
        lines,
        columns=2,
        size=(7.4, 6.0),
    )


def _algorithms(rows: Sequence[Row], settings: Sequence[SearchSetting]) -> Figure:
    """Figure 7: mean TPOT against execution time, with 95 % confidence intervals.

    Each point is a run of its own with its own limit or number of samples; points of one algorithm are joined in
    the order of the rows.
    """
    families = in_paper_order({row.family for row in rows})
    panels = [
        Panel(
            [
                one
                for family in families
                for one in _family(
                    family, [row for row in rows if (row.testbed, row.family) == (setting.testbed, family)]
                )
            ],
            "execution time, s",
            "TPOT, ms",
            "points",
            title=setting.name.capitalize(),
            log_x=True,
            log_y=True,
        )
        for setting in settings
    ]
    averaged = (
        "One problem" if rows[0].seeds == 1 else f"Means over {rows[0].seeds} problems, with 95 % intervals"
    )
    hollow = "; hollow: the paper's averages" if any(row.paper_tpot_ms for row in rows) else ""
    return Figure(
        "figure-7-algorithms",
        "What a search takes and what it finds (Figure 7)",
        panels,
        _FIGURE_7,
        [[getattr(row, field) for field in _FIGURE_7] for row in rows],
        title=f"{averaged}{hollow}",
        columns=2,
        size=(6.2, 4.2),
    )


def _family(name: str, rows: Sequence[Row]) -> Iterator[Series]:
    solved = [row for row in rows if row.execution_s is not None]
    yield Series(
        name,
        [row.execution_s or 0.0 for row in solved],
        [row.tpot_ms for row in solved],
        [row.tpot_low_ms for row in solved],
        [row.tpot_high_ms for row in solved],
    )
    printed = [row for row in rows if row.paper_execution_s is not None]
    yield Series(
        name,
        [row.paper_execution_s or 0.0 for row in printed],
        [row.paper_tpot_ms for row in printed],
        printed=True,
    )


def _end(deployment: Deployment, machine: int) -> tuple[int, str, str]:
    return machine, deployment.regions[machine], deployment.gpus[machine]
