"""Serving times by policy and rate as bars, ours beside the paper's, as a picture and a table."""

from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np

from molink.simnet.emulate.rows import ServingRow
from molink.simnet.presentation.pictures import Picture, legend_below, new_figure, saved
from molink.simnet.presentation.results import write_csv

_METRICS = (("ttft_s", "TTFT, s"), ("tpot_s", "TPOT, s"), ("latency_s", "latency, s"))
_COLOURS = ("#999999", "#56b4e9", "#e69f00", "#0072b2", "#009e73", "#cc79a7")
_GROUP = 0.8
"""Of the distance between two rates, what their bars take."""


def draw_serving(rows: Sequence[ServingRow], folder: Path) -> Picture:
    """A panel for each metric, a group of bars for each rate; what the paper prints is drawn hollow over them."""
    stem = folder / "serving"
    write_csv(stem.with_suffix(".csv"), [field.name for field in fields(ServingRow)], map(astuple, rows))
    rates = list(dict.fromkeys(row.rate_rps for row in rows))
    policies = list(dict.fromkeys(row.policy for row in rows))
    figure = new_figure(11.0, 4.0)
    width = _GROUP / len(policies)
    for axes, (metric, label) in zip(figure.subplots(1, len(_METRICS)), _METRICS, strict=True):
        for number, policy in enumerate(policies):
            own = {row.rate_rps: row for row in rows if row.policy == policy}
            places = np.array([place for place, rate in enumerate(rates) if rate in own], dtype=float)
            places += (number - (len(policies) - 1) / 2) * width
            ours = [getattr(row, metric) or 0.0 for row in own.values()]
            printed = [getattr(row, f"paper_{metric}") or 0.0 for row in own.values()]
            colour = _COLOURS[number % len(_COLOURS)]
            axes.bar(places, ours, 0.9 * width, color=colour, label=policy)
            axes.bar(places, printed, 0.9 * width, fill=False, edgecolor=colour, linestyle="--")
        axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set(xlabel="requests/s", ylabel=label)
        axes.grid(visible=True, axis="y", linewidth=0.4, alpha=0.5)
    legend_below(figure)
    hollow = "; dashed: the paper's" if any(row.paper_ttft_s for row in rows) else ""
    figure.suptitle(f"Averages over requests{hollow}", fontsize=11)
    return saved(figure, stem, "Averages over requests, by rate and policy")
