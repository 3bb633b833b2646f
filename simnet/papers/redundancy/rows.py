"""Cells as flat rows, what the paper's text prints beside ours. Its figures have no numbers in the text. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from molink.simnet.papers.redundancy.run import RedundancyCell, RedundancyRun

PAPER_EXTRA_GB: Mapping[float, float] = MappingProxyType({4.0: 1.0, 8.0: 3.5, 12.0: 5.0})
"""By rate: what AcceLLM needs beyond the others on the mixed workload with four instances, which device is not said."""
PAIR_POLICIES = ("accellm", "molink", "molink-pairs", "molink-auto")
"""The paper's, and ours, which the others are compared with."""
PAPER_MIXED_PART = 0.30
""" "Up to 30 %" less JCT and "nearly 30 %" more tokens on the mixed workload, over all rates and instances."""


@dataclass(frozen=True, slots=True)
class RedundancyRow:
    """One cell. Times are averages over requests; reductions and gains are parts of the other policy's value."""

    policy: str
    device: str
    workload: str
    instances: int
    rate_rps: float
    interconnect_gbps: float
    requests: int
    ttft_s: float
    ttft_max_s: float
    tbt_s: float
    tbt_max_s: float
    jct_s: float
    tokens_per_instance_s: float
    peak_memory_gb: float
    """Of one instance: weights, keys and values."""
    peak_kv_gb: float
    extra_memory_gb: float | None
    """Of a policy with pairs: beyond the larger of the others."""
    jct_reduction_splitwise: float | None
    jct_reduction_vllm: float | None
    tokens_gain_splitwise: float | None
    tokens_gain_vllm: float | None
    ttft_of_splitwise: float | None
    """A part of its TTFT."""
    ttft_of_vllm: float | None
    paper_extra_memory_gb: float | None
    paper_jct_reduction_up_to: float | None
    paper_tokens_gain_up_to: float | None
    instance_busy: float
    link_busy: float
    sent_gb: float
    lost_gb: float
    short_requests: int
    events: int


def redundancy_rows(runs: Sequence[RedundancyRun]) -> list[RedundancyRow]:
    """A row for each run, in their order."""
    by_setting: dict[tuple[int, float, float], dict[str, RedundancyRun]] = {}
    for run in runs:
        by_setting.setdefault(_setting(run.cell), {})[run.cell.policy] = run
    return [_row(run, by_setting[_setting(run.cell)]) for run in runs]


def _setting(cell: RedundancyCell) -> tuple[int, float, float]:
    return cell.instances, cell.rate_rps, cell.interconnect_gbps


def _row(run: RedundancyRun, beside: Mapping[str, RedundancyRun]) -> RedundancyRow:
    cell = run.cell
    ours = cell.policy in PAIR_POLICIES
    others = {name: one for name, one in beside.items() if ours and name not in PAIR_POLICIES}
    splitwise, vllm = others.get("splitwise"), others.get("vllm")
    of_paper = PAPER_MIXED_PART if cell.workload == "mixed" and ours else None
    return RedundancyRow(
        policy=cell.policy,
        device=cell.device,
        workload=cell.workload,
        instances=cell.instances,
        rate_rps=cell.rate_rps,
        interconnect_gbps=cell.interconnect_gbps,
        requests=run.requests,
        ttft_s=run.ttft_s,
        ttft_max_s=run.ttft_max_s,
        tbt_s=run.tbt_s,
        tbt_max_s=run.tbt_max_s,
        jct_s=run.jct_s,
        tokens_per_instance_s=run.tokens_per_instance_s,
        peak_memory_gb=run.peak_memory_gb,
        peak_kv_gb=run.peak_kv_gb,
        extra_memory_gb=(
            run.peak_memory_gb - max(one.peak_memory_gb for one in others.values()) if others else None
        ),
        jct_reduction_splitwise=1 - run.jct_s / splitwise.jct_s if splitwise else None,
        jct_reduction_vllm=1 - run.jct_s / vllm.jct_s if vllm else None,
        tokens_gain_splitwise=_gain(run, splitwise),
        tokens_gain_vllm=_gain(run, vllm),
        ttft_of_splitwise=run.ttft_s / splitwise.ttft_s if splitwise else None,
        ttft_of_vllm=run.ttft_s / vllm.ttft_s if vllm else None,
        paper_extra_memory_gb=(
            PAPER_EXTRA_GB.get(cell.rate_rps) if of_paper is not None and cell.instances == 4 else None
        ),
        paper_jct_reduction_up_to=of_paper,
        paper_tokens_gain_up_to=of_paper,
        instance_busy=run.instance_busy,
        link_busy=run.link_busy,
        sent_gb=run.sent_gb,
        lost_gb=run.lost_gb,
        short_requests=run.short_requests,
        events=run.events,
    )


def _gain(run: RedundancyRun, other: RedundancyRun | None) -> float | None:
    if other is None or not other.tokens_per_instance_s:
        return None
    return run.tokens_per_instance_s / other.tokens_per_instance_s - 1
