"""Cells of a serving table as flat rows, the paper's value beside ours."""

from collections.abc import Sequence
from dataclasses import dataclass

from molink.simnet.core.serving_times import NOTHING, ServingTimes, reduced, serving_times
from molink.simnet.serve.presets import Preset, PresetCell
from molink.simnet.serve.simulated import SimulatedRun


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

    @property
    def system(self) -> str:
        """What is compared: in an ablation the technique, else the policy."""
        return self.technique or self.policy


def by_setting(preset: Preset, rows: Sequence[ServeRow]) -> list[list[ServeRow]]:
    """Rows that are compared with each other."""
    found: dict[tuple[object, ...], list[ServeRow]] = {}
    for row in rows:
        found.setdefault(tuple(getattr(row, name) for name in preset.settings), []).append(row)
    return list(found.values())


def serve_rows(preset: Preset, runs: Sequence[SimulatedRun]) -> list[ServeRow]:
    """A row for each cell of the preset that was run, in its order."""
    cells = preset.cells[: len(runs)]
    measured = [serving_times(run.outcomes, run.throughput_tps) for run in runs]
    ours = _bases(preset, measured)
    printed = [cell.printed or NOTHING for cell in cells]
    papers = _bases(preset, printed)
    compared = [_compared(preset, cell) for cell in cells]
    return [
        _row(cell, run, own, ours.get(key, NOTHING), paper, papers.get(key, NOTHING))
        for cell, key, run, own, paper in zip(cells, compared, runs, measured, printed, strict=True)
    ]


def _bases(preset: Preset, averages: Sequence[ServingTimes]) -> dict[tuple[object, ...], ServingTimes]:
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
    own: ServingTimes,
    base: ServingTimes,
    paper: ServingTimes,
    paper_base: ServingTimes,
) -> ServeRow:
    ways_ms = run.decode_ways_ms
    ours, papers = reduced(own, base), reduced(paper, paper_base)
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
        ttft_reduction=ours.ttft_s,
        tpot_reduction=ours.tpot_s,
        latency_reduction=ours.latency_s,
        throughput_gain=ours.throughput_tps,
        paper_ttft_s=paper.ttft_s,
        paper_tpot_s=paper.tpot_s,
        paper_latency_s=paper.latency_s,
        paper_throughput_tps=paper.throughput_tps,
        paper_ttft_reduction=papers.ttft_s,
        paper_tpot_reduction=papers.tpot_s,
        paper_latency_reduction=papers.latency_s,
        paper_throughput_gain=papers.throughput_tps,
        decode_way_ms=ways_ms[len(ways_ms) // 2] if ways_ms else None,
        decode_way_p99_ms=ways_ms[int(0.99 * (len(ways_ms) - 1))] if ways_ms else None,
        engine_busy=max(run.engine_busy),
        uplink_busy=max(run.uplink_busy),
        events=run.events,
    )
