"""What runs of an emulation amount to, beside the transmission paper's numbers."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from molink.simnet.core.serving_times import NOTHING, ServingTimes, reduced, serving_times
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.emulate.run import Emulation, EmulationRun
from molink.simnet.serve.paper import SYSTEM_OF, TABLE_2, LineSetting

BASELINE = "concurrent"
"""Reductions are against this policy at the same rate."""
PAPER_DEVICE, PAPER_PEERS = "rtx-4090", 3
"""Of Table 2 of the transmission paper (section 5.1): Qwen2-7B on three RTX 4090."""


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


def serving_rows(emulation: Emulation, runs: Sequence[EmulationRun]) -> list[ServingRow]:
    """A row for each run, in order."""
    times = [serving_times(run.outcomes, run.usage.tokens_per_s) for run in runs]
    bases = {
        run.cell.rate_rps: base for run, base in zip(runs, times, strict=True) if run.cell.policy == BASELINE
    }
    return [_row(emulation, run, own, bases) for run, own in zip(runs, times, strict=True)]


def differing(runs: Sequence[EmulationRun]) -> list[tuple[EmulationRun, int]]:
    """Runs in which requests got other tokens than in the first run at the same rate, and how many requests did."""
    firsts: dict[float, Mapping[int, tuple[int, ...]]] = {}
    found: list[tuple[EmulationRun, int]] = []
    for run in runs:
        tokens = {one.request.number: one.token_ids for one in run.outcomes if one.error is None}
        first = firsts.setdefault(run.cell.rate_rps, tokens)
        other = sum(first[number] != ids for number, ids in tokens.items() if number in first)
        if other:
            found.append((run, other))
    return found


def _row(
    emulation: Emulation, run: EmulationRun, times: ServingTimes, bases: Mapping[float, ServingTimes]
) -> ServingRow:
    cell, usage = run.cell, run.usage
    ours = reduced(times, bases.get(cell.rate_rps, NOTHING))
    paper = _printed(emulation, cell.rate_rps, cell.policy)
    papers = reduced(paper, _printed(emulation, cell.rate_rps, BASELINE))
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
        ttft_s=times.ttft_s,
        tpot_s=times.tpot_s,
        latency_s=times.latency_s,
        throughput_tps=usage.tokens_per_s,
        ttft_reduction=ours.ttft_s,
        tpot_reduction=ours.tpot_s,
        latency_reduction=ours.latency_s,
        paper_ttft_s=paper.ttft_s,
        paper_tpot_s=paper.tpot_s,
        paper_latency_s=paper.latency_s,
        paper_ttft_reduction=papers.ttft_s,
        paper_tpot_reduction=papers.tpot_s,
        paper_latency_reduction=papers.latency_s,
        decode_one_way_ms=statistics.median(ways_ms) if ways_ms else None,
        decode_one_way_p99_ms=ways_ms[int(0.99 * (len(ways_ms) - 1))] if ways_ms else None,
        engine_busy=max(usage.engines),
        uplink_busy=max(usage.uplinks),
        peer_cpu=max(usage.processes),
        driver_cpu=usage.driver,
        lines_cpu=usage.lines,
    )


def _printed(emulation: Emulation, rate_rps: float, policy: str) -> ServingTimes:
    """What the paper prints of this setting, if it does."""
    machines = (emulation.spec.name, emulation.device, emulation.peers)
    if machines != (QWEN2_7B.name, PAPER_DEVICE, PAPER_PEERS):
        return NOTHING
    setting = LineSetting(rate_rps, emulation.bandwidth_mbps, emulation.delay_ms)
    return TABLE_2.get((setting, SYSTEM_OF.get(policy, "")), NOTHING)
