"""Cells of a serving table as flat rows, the paper's value beside ours."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from molink.simnet.outcomes import Outcome
from molink.simnet.serving.paper import Printed
from molink.simnet.serving.presets import Preset, PresetCell
from molink.simnet.serving.simulated import SimulatedRun


@dataclass(frozen=True, slots=True)
class ServeRow:
    """One cell. Times are averages over requests; a reduction is a part of the baseline's value."""

    technique: str
    """In an ablation: what of the system is on."""
    policy: str
    rate_rps: float
    bandwidth_mbps: float
    delay_ms: float
    peers: int
    micro_batches: str
    prefill_chunk_tokens: int | None
    """Prompts are computed in steps of at most so many; None: the head computes how many."""
    requests: int
    failed: int
    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    throughput_tps: float
    ttft_reduction: float | None
    tpot_reduction: float | None
    latency_reduction: float | None
    throughput_gain: float | None
    paper_ttft_s: float | None
    paper_tpot_s: float | None
    paper_latency_s: float | None
    paper_throughput_tps: float | None
    paper_ttft_reduction: float | None
    paper_tpot_reduction: float | None
    paper_latency_reduction: float | None
    paper_throughput_gain: float | None
    decode_way_ms: float | None
    """Median over decode messages: from when a peer gave it to its link to when it had come."""
    decode_way_p99_ms: float | None
    engine_busy: float
    """The part of the time in which the busiest engine computed."""
    uplink_busy: float
    events: int
    """Of the simulation."""


@dataclass(frozen=True, slots=True)
class _Cell:
    """Averages of one cell, ours or printed."""

    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    throughput_tps: float | None


def serve_rows(preset: Preset, runs: Sequence[SimulatedRun]) -> list[ServeRow]:
    """A row for each cell of the preset that was run, in its order."""
    cells = preset.cells[: len(runs)]
    measured = [_measured(run) for run in runs]
    ours = _bases(preset, measured)
    printed = [_printed(cell.printed) for cell in cells]
    papers = _bases(preset, printed)
    compared = [_compared(preset, cell) for cell in cells]
    return [
        _row(cell, run, own, ours.get(key), paper, papers.get(key))
        for cell, key, run, own, paper in zip(cells, compared, runs, measured, printed, strict=True)
    ]


def _bases(preset: Preset, averages: Sequence[_Cell | None]) -> dict[tuple[object, ...], _Cell | None]:
    return {
        _compared(preset, cell): average
        for cell, average in zip(preset.cells, averages, strict=False)
        if preset.baseline in (cell.policy, cell.technique) and cell.technique in ("", preset.baseline)
    }


def _compared(preset: Preset, cell: PresetCell) -> tuple[object, ...]:
    """The same for cells that are compared with each other."""
    of_system = [getattr(cell.served_as, name, None) for name in preset.swept]
    return (cell.setting, cell.peers, *of_system)


def _row(
    cell: PresetCell,
    run: SimulatedRun,
    own: _Cell,
    base: _Cell | None,
    paper: _Cell | None,
    paper_base: _Cell | None,
) -> ServeRow:
    ways_ms = run.decode_ways_ms
    return ServeRow(
        technique=cell.technique,
        policy=cell.policy,
        rate_rps=cell.setting.rate_rps,
        bandwidth_mbps=cell.setting.bandwidth_mbps,
        delay_ms=cell.setting.delay_ms,
        peers=cell.peers,
        micro_batches=cell.served_as.micro_batches,
        prefill_chunk_tokens=cell.served_as.prefill_chunk_tokens,
        requests=len(run.outcomes),
        failed=sum(one.error is not None for one in run.outcomes),
        ttft_s=own.ttft_s,
        tpot_s=own.tpot_s,
        latency_s=own.latency_s,
        throughput_tps=run.throughput_tps,
        ttft_reduction=_reduction(own, base, "ttft_s"),
        tpot_reduction=_reduction(own, base, "tpot_s"),
        latency_reduction=_reduction(own, base, "latency_s"),
        throughput_gain=_gain(own, base),
        paper_ttft_s=paper.ttft_s if paper else None,
        paper_tpot_s=paper.tpot_s if paper else None,
        paper_latency_s=paper.latency_s if paper else None,
        paper_throughput_tps=paper.throughput_tps if paper else None,
        paper_ttft_reduction=_reduction(paper, paper_base, "ttft_s"),
        paper_tpot_reduction=_reduction(paper, paper_base, "tpot_s"),
        paper_latency_reduction=_reduction(paper, paper_base, "latency_s"),
        paper_throughput_gain=_gain(paper, paper_base),
        decode_way_ms=ways_ms[len(ways_ms) // 2] if ways_ms else None,
        decode_way_p99_ms=ways_ms[int(0.99 * (len(ways_ms) - 1))] if ways_ms else None,
        engine_busy=max(run.engine_busy),
        uplink_busy=max(run.uplink_busy),
        events=run.events,
    )


def _measured(run: SimulatedRun) -> _Cell:
    ended = [one for one in run.outcomes if one.error is None]
    if not ended:
        return _Cell(None, None, None, run.throughput_tps)
    longer = [one for one in ended if len(one.token_s) > 1]
    return _Cell(
        statistics.fmean(one.token_s[0] - one.request.arrival_s for one in ended),
        statistics.fmean(map(_tpot_s, longer)) if longer else None,
        statistics.fmean(one.token_s[-1] - one.request.arrival_s for one in ended),
        run.throughput_tps,
    )


def _tpot_s(outcome: Outcome) -> float:
    return (outcome.token_s[-1] - outcome.token_s[0]) / (len(outcome.token_s) - 1)


def _printed(printed: Printed | None) -> _Cell | None:
    if printed is None:
        return None
    return _Cell(printed.ttft_s, printed.tpot_s, printed.latency_s, printed.throughput_tps)


def _reduction(own: _Cell | None, base: _Cell | None, metric: str) -> float | None:
    value = getattr(own, metric, None)
    of = getattr(base, metric, None)
    return 1 - value / of if value is not None and of else None


def _gain(own: _Cell | None, base: _Cell | None) -> float | None:
    if own is None or base is None or own.throughput_tps is None or not base.throughput_tps:
        return None
    return own.throughput_tps / base.throughput_tps - 1
