"""What runs of an emulation amount to, beside the transmission paper's numbers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.simnet.emulation.run import Emulation, Run
from molink.simnet.model_shapes import QWEN2_7B
from molink.simnet.outcomes import Outcome
from molink.simnet.paper_tables import (
    SERVING,
    SERVING_BANDWIDTH_MBPS,
    SERVING_DELAY_MS,
    SERVING_PEERS,
    SYSTEM_OF_POLICY,
    ServingTimes,
)

BASELINE = "concurrent"
"""Reductions are against this policy at the same rate."""
PAPER_DEVICE = "rtx-4090"


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One policy at one rate. Times are averages over the requests that were measured and got all their tokens, and
    None if there is none; reductions are parts of the baseline's value, and None without it."""

    policy: str
    rate_rps: float
    micro_batches: str
    """The rule of circulation, or a number."""
    prefill_chunk_tokens: int | None
    """Prompts were computed in equal chunks of at most so many tokens; None: as the head chose."""
    bandwidth_mbps: float
    delay_ms: float
    """One way."""
    peers: int
    requests: int
    """Measured: those that came after the warm-up."""
    failed: int
    """Of these, how many did not get all their tokens."""
    ttft_s: float | None
    """From a request's arrival to its first token."""
    tpot_s: float | None
    """The average over requests of their mean time from token to token after the first."""
    latency_s: float | None
    """From a request's arrival to its last token."""
    throughput_tps: float
    """Tokens a second while requests were measured, those of all requests."""
    ttft_reduction: float | None
    tpot_reduction: float | None
    latency_reduction: float | None
    paper_ttft_s: float | None
    paper_tpot_s: float | None
    paper_latency_s: float | None
    paper_ttft_reduction: float | None
    paper_tpot_reduction: float | None
    paper_latency_reduction: float | None
    decode_one_way_ms: float | None
    """Median over decode steps of the mean way from hop to hop, of requests that were traced."""
    decode_one_way_p99_ms: float | None
    engine_busy: float
    """The part of the time in which the busiest peer's engine computed."""
    uplink_busy: float
    """The part of the time in which bytes left the busiest uplink."""
    peer_cpu: float
    """Processor time of the peer process that took most, of one core."""
    driver_cpu: float
    """Processor time of the client's process, of one core."""
    lines_cpu: float
    """Processor time of the process that moves bytes along the lines, of one core."""


@dataclass(frozen=True, slots=True)
class _Reductions:
    """Parts of the baseline's values."""

    ttft: float
    tpot: float
    latency: float


def serving_rows(emulation: Emulation, runs: Sequence[Run]) -> list[ServingRow]:
    """A row for each run, in order."""
    times = [_times(run.outcomes) for run in runs]
    bases = {
        run.cell.rate_rps: base for run, base in zip(runs, times, strict=True) if run.cell.policy == BASELINE
    }
    return [_row(emulation, run, own, bases) for run, own in zip(runs, times, strict=True)]


def differing(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Runs in which requests got other tokens than in the first run at the same rate, and how many requests did."""
    firsts: dict[float, Mapping[int, tuple[int, ...]]] = {}
    found: list[tuple[Run, int]] = []
    for run in runs:
        tokens = {one.request.number: one.token_ids for one in run.outcomes if one.error is None}
        first = firsts.setdefault(run.cell.rate_rps, tokens)
        other = sum(first[number] != ids for number, ids in tokens.items() if number in first)
        if other:
            found.append((run, other))
    return found


def _row(
    emulation: Emulation, run: Run, times: ServingTimes | None, bases: Mapping[float, ServingTimes | None]
) -> ServingRow:
    cell, usage = run.cell, run.usage
    reduced = _reductions(times, bases.get(cell.rate_rps))
    paper = _printed(emulation, cell.rate_rps, cell.policy)
    paper_reduced = _reductions(paper, _printed(emulation, cell.rate_rps, BASELINE))
    ways_ms = sorted(1000 * way for one in run.outcomes for way in one.one_way_s)
    return ServingRow(
        policy=cell.policy,
        rate_rps=cell.rate_rps,
        micro_batches=cell.served_as.micro_batches,
        prefill_chunk_tokens=cell.served_as.prefill_chunk_tokens,
        bandwidth_mbps=emulation.bandwidth_mbps,
        delay_ms=emulation.delay_ms,
        peers=emulation.peers,
        requests=len(run.outcomes),
        failed=sum(one.error is not None for one in run.outcomes),
        ttft_s=times.ttft_s if times else None,
        tpot_s=times.tpot_s if times else None,
        latency_s=times.latency_s if times else None,
        throughput_tps=usage.tokens_per_s,
        ttft_reduction=reduced.ttft if reduced else None,
        tpot_reduction=reduced.tpot if reduced else None,
        latency_reduction=reduced.latency if reduced else None,
        paper_ttft_s=paper.ttft_s if paper else None,
        paper_tpot_s=paper.tpot_s if paper else None,
        paper_latency_s=paper.latency_s if paper else None,
        paper_ttft_reduction=paper_reduced.ttft if paper_reduced else None,
        paper_tpot_reduction=paper_reduced.tpot if paper_reduced else None,
        paper_latency_reduction=paper_reduced.latency if paper_reduced else None,
        decode_one_way_ms=statistics.median(ways_ms) if ways_ms else None,
        decode_one_way_p99_ms=ways_ms[int(0.99 * (len(ways_ms) - 1))] if ways_ms else None,
        engine_busy=max(usage.engines),
        uplink_busy=max(usage.uplinks),
        peer_cpu=max(usage.processes),
        driver_cpu=usage.driver,
        lines_cpu=usage.lines,
    )


def _times(outcomes: Sequence[Outcome]) -> ServingTimes | None:
    """None if no request got all its tokens."""
    ended = [one for one in outcomes if one.error is None]
    if not ended:
        return None
    longer = [one for one in ended if len(one.token_s) > 1]
    return ServingTimes(
        ttft_s=statistics.fmean(one.token_s[0] - one.request.arrival_s for one in ended),
        tpot_s=statistics.fmean((one.token_s[-1] - one.token_s[0]) / (len(one.token_s) - 1) for one in longer)
        if longer
        else 0.0,
        latency_s=statistics.fmean(one.token_s[-1] - one.request.arrival_s for one in ended),
    )


def _printed(emulation: Emulation, rate_rps: float, policy: str) -> ServingTimes | None:
    """What the paper prints of this setting, if it does."""
    setting = (emulation.bandwidth_mbps, emulation.delay_ms, emulation.peers)
    if setting != (SERVING_BANDWIDTH_MBPS, SERVING_DELAY_MS, SERVING_PEERS):
        return None
    if (emulation.spec.name, emulation.device) != (QWEN2_7B.name, PAPER_DEVICE):
        return None
    return SERVING.get((rate_rps, SYSTEM_OF_POLICY.get(policy, "")))


def _reductions(times: ServingTimes | None, base: ServingTimes | None) -> _Reductions | None:
    """None where one of them is missing or there is nothing to reduce."""
    if times is None or base is None or not min(base.ttft_s, base.tpot_s, base.latency_s) > 0:
        return None
    return _Reductions(
        1 - times.ttft_s / base.ttft_s, 1 - times.tpot_s / base.tpot_s, 1 - times.latency_s / base.latency_s
    )
