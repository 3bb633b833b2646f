"""Figures 3 to 5 and 9 to 16 of the redundancy paper with our numbers, each as a picture and a table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from molink.simnet.papers.redundancy.cluster.instances import InstanceProfile
from molink.simnet.papers.redundancy.rows import RedundancyRow
from molink.simnet.papers.redundancy.run import POLICIES
from molink.simnet.papers.redundancy.step_figures import POLICY_COLOURS, POLICY_MARKERS, draw_steps
from molink.simnet.presentation.pictures import Picture, from_zero, legend_below, new_figure, saved
from molink.simnet.presentation.results import write_csv

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LATENCY_FIGURES: Mapping[tuple[str, str], int] = MappingProxyType(
    {
        ("h100", "mixed"): 11,
        ("910b2", "mixed"): 12,
        ("h100", "light"): 13,
        ("910b2", "light"): 14,
        ("h100", "heavy"): 15,
    }
)
"""By device and workload; the heavy workload on the 910B2 has none."""

_PANELS = (
    ("tokens_per_instance_s", "tokens a second and instance"),
    ("ttft_s", "TTFT, s"),
    ("tbt_s", "TBT, s"),
    ("jct_s", "JCT, s"),
)
_SINGLE = (
    ("figure-9-memory", ("peak_memory_gb", "memory of an instance, GB"), "Memory (AcceLLM, Figure 9)"),
    (
        "figure-16-worst-tbt",
        ("tbt_max_s", "worst TBT, s"),
        "The worst time between tokens (AcceLLM, Figure 16)",
    ),
)

Value = Callable[[RedundancyRow], float]


def draw_redundancy(rows: Sequence[RedundancyRow], profile: InstanceProfile, folder: Path) -> list[Picture]:
    """All of them, as far as the rows are about them: Figure 10 needs several speeds of the interconnect. Rates are
    drawn at the fastest of these."""
    first = rows[0]
    name = latency_figure(first.device, first.workload)
    fastest = max(row.interconnect_gbps for row in rows)
    drawn = [row for row in rows if row.interconnect_gbps == fastest]
    whose = f"{first.workload} workload, {first.device}"
    number = LATENCY_FIGURES.get((first.device, first.workload))
    paper = "" if number is None else f" (AcceLLM, Figure {number})"
    pictures = draw_steps(profile, folder)
    pictures.append(_by_rate(drawn, folder / name, _PANELS, f"Throughput and latency: {whose}{paper}"))
    for stem, panel, caption in _SINGLE:
        pictures.append(_by_rate(drawn, folder / stem, (panel,), caption))
    if len({row.interconnect_gbps for row in rows}) > 1:
        pictures.append(_by_interconnect(rows, folder / "figure-10-interconnect"))
    return pictures


def latency_figure(device: str, workload: str) -> str:
    """Its files' name: with the paper's number, if it has such a figure."""
    number = LATENCY_FIGURES.get((device, workload))
    prefix = "latency" if number is None else f"figure-{number}"
    return f"{prefix}-{workload}-{device}"


def _by_rate(
    rows: Sequence[RedundancyRow], stem: Path, panels: Sequence[tuple[str, str]], caption: str
) -> Picture:
    """A row of panels for each number of instances, a line for each policy, in all figures of the same colour."""
    write_csv(stem.with_suffix(".csv"), [field.name for field in fields(RedundancyRow)], map(astuple, rows))
    numbers = sorted({row.instances for row in rows})
    figure = new_figure(3.6 * max(2, len(panels)), 3.2 * len(numbers) + 0.8)
    grid = figure.subplots(len(numbers), len(panels), squeeze=False)
    for number, line in zip(numbers, grid, strict=True):
        own = [row for row in rows if row.instances == number]
        for axes, (metric, label) in zip(line, panels, strict=True):
            _draw_policies(axes, own, lambda row: row.rate_rps, metric)
            axes.set(xlabel="requests/s", ylabel=label)
            if len(numbers) > 1:
                axes.set_title(f"{number} instances", fontsize=11)
    first = rows[0]
    count = f"{numbers[0]} instances" if len(numbers) == 1 else "instances"
    _finish(figure, f"Llama-2-70B, {first.workload} workload on {count} of 4 x {first.device}")
    return saved(figure, stem, caption)


def _by_interconnect(rows: Sequence[RedundancyRow], stem: Path) -> Picture:
    """Figure 10, at the fewest instances and the rate in the middle; vLLM sends nothing."""
    write_csv(stem.with_suffix(".csv"), [field.name for field in fields(RedundancyRow)], map(astuple, rows))
    number = min(row.instances for row in rows)
    rates = sorted({row.rate_rps for row in rows if row.instances == number})
    rate_rps = rates[len(rates) // 2]
    own = [
        row for row in rows if row.policy != "vllm" and row.instances == number and row.rate_rps == rate_rps
    ] or [row for row in rows if row.instances == number and row.rate_rps == rate_rps]
    figure = new_figure(9.0, 4.0)
    panels = (("tokens_per_instance_s", "tokens a second and instance"), ("jct_s", "JCT, s"))
    for axes, (metric, label) in zip(figure.subplots(1, 2), panels, strict=True):
        _draw_policies(axes, own, lambda row: row.interconnect_gbps, metric)
        axes.set(xlabel="from an instance to the others, Gbit/s", ylabel=label, xscale="log")
    _finish(figure, f"{own[0].workload} workload, {number} instances, {rate_rps:g} requests/s")
    return saved(figure, stem, "Speeds of the interconnect (AcceLLM, Figure 10)")


def _draw_policies(axes: "Axes", rows: Sequence[RedundancyRow], place: Value, metric: str) -> None:
    for policy in dict.fromkeys(row.policy for row in rows):
        number = list(POLICIES).index(policy)
        own = sorted((row for row in rows if row.policy == policy), key=place)
        axes.plot(
            [place(row) for row in own],
            [getattr(row, metric) for row in own],
            color=POLICY_COLOURS[number],
            marker=POLICY_MARKERS[number],
            markersize=4,
            linewidth=1.2,
            label=policy,
        )
    from_zero(axes)
    axes.grid(visible=True, linewidth=0.4, alpha=0.5)


def _finish(figure: "Figure", title: str) -> None:
    legend_below(figure)
    figure.suptitle(title, fontsize=11)
