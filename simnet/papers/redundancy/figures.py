"""Figures 9 to 16 of the redundancy paper with our numbers."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from molink.simnet.papers.redundancy.cluster.instances import InstanceProfile
from molink.simnet.papers.redundancy.rows import RedundancyRow
from molink.simnet.papers.redundancy.step_figures import step_figures
from molink.simnet.presentation.figures import Figure, Panel, Series, table_of

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
_TOKENS, _JCT = ("tokens_per_instance_s", "tokens a second and instance"), ("jct_s", "JCT, s")
_PANELS = (_TOKENS, ("ttft_s", "TTFT, s"), ("tbt_s", "TBT, s"), _JCT)
_MEMORY = ("peak_memory_gb", "memory of an instance, GB")
_WORST = ("tbt_max_s", "worst TBT, s")


def redundancy_figures(rows: Sequence[RedundancyRow], profile: InstanceProfile) -> list[Figure]:
    """All of them, as far as the rows are about them: Figure 10 needs several speeds of the interconnect. Rates are
    drawn at the fastest of these."""
    first = rows[0]
    fastest = max(row.interconnect_gbps for row in rows)
    drawn = [row for row in rows if row.interconnect_gbps == fastest]
    number = LATENCY_FIGURES.get((first.device, first.workload))
    paper = "" if number is None else f" (AcceLLM, Figure {number})"
    caption = f"Throughput and latency: {first.workload} workload, {first.device}{paper}"
    figures = [
        *step_figures(profile),
        _by_rate(drawn, latency_figure(first.device, first.workload), _PANELS, caption),
        _by_rate(drawn, "figure-9-memory", (_MEMORY,), "Memory (AcceLLM, Figure 9)"),
        _by_rate(
            drawn, "figure-16-worst-tbt", (_WORST,), "The worst time between tokens (AcceLLM, Figure 16)"
        ),
    ]
    if len({row.interconnect_gbps for row in rows}) > 1:
        figures.append(_by_interconnect(rows))
    return figures


def latency_figure(device: str, workload: str) -> str:
    """Its files' name: with the paper's number, if it has such a figure."""
    number = LATENCY_FIGURES.get((device, workload))
    prefix = "latency" if number is None else f"figure-{number}"
    return f"{prefix}-{workload}-{device}"


def _by_rate(
    rows: Sequence[RedundancyRow], stem: str, panels: Sequence[tuple[str, str]], caption: str
) -> Figure:
    """A row of panels for each number of instances, a line for each policy."""
    numbers = sorted({row.instances for row in rows})
    first = rows[0]
    count = f"{numbers[0]} instances" if len(numbers) == 1 else "instances"
    header, lines = table_of(rows)
    return Figure(
        stem,
        caption,
        [
            Panel(
                _policies([row for row in rows if row.instances == number], "rate_rps", metric),
                "requests/s",
                label,
                title=f"{number} instances" if len(numbers) > 1 else "",
            )
            for number in numbers
            for metric, label in panels
        ],
        header,
        lines,
        f"Llama-2-70B, {first.workload} workload on {count} of 4 x {first.device}",
        columns=len(panels),
        size=(3.6 if len(panels) > 1 else 6.4, 3.2),
    )


def _by_interconnect(rows: Sequence[RedundancyRow]) -> Figure:
    """Figure 10, at the fewest instances and the rate in the middle; vLLM sends nothing."""
    number = min(row.instances for row in rows)
    rates = sorted({row.rate_rps for row in rows if row.instances == number})
    rate_rps = rates[len(rates) // 2]
    here = [row for row in rows if row.instances == number and row.rate_rps == rate_rps]
    own = [row for row in here if row.policy != "vllm"] or here
    header, lines = table_of(rows)
    return Figure(
        "figure-10-interconnect",
        "Speeds of the interconnect (AcceLLM, Figure 10)",
        [
            Panel(
                _policies(own, "interconnect_gbps", metric),
                "from an instance to the others, Gbit/s",
                label,
                log_x=True,
            )
            for metric, label in (_TOKENS, _JCT)
        ],
        header,
        lines,
        f"{own[0].workload} workload, {number} instances, {rate_rps:g} requests/s",
    )


def _policies(rows: Sequence[RedundancyRow], place: str, metric: str) -> list[Series]:
    found = []
    for policy in dict.fromkeys(row.policy for row in rows):
        own = sorted(
            (row for row in rows if row.policy == policy), key=lambda row: float(getattr(row, place))
        )
        x, y = ([getattr(row, field) for row in own] for field in (place, metric))
        found.append(Series(policy, x, y))
    return found
