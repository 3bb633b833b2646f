"""Cells of a serving table as flat rows, the paper's value beside ours."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from molink.simnet.core.request_load import RequestOutcome
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
    speculation: str
    """Guessed tokens of a trip: auto, off, or a number."""
    temperature: float
    """Of the recorded generations that are guessed."""
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
    outcomes = [run.outcomes for run in runs]
    shared = shared_fields(cells, outcomes, measured, preset.baseline, preset.swept)
    return [_row(cell, run, *fields) for cell, run, fields in zip(cells, runs, shared, strict=True)]


def shared_fields(
    cells: Sequence[PresetCell],
    outcomes: Sequence[Sequence[RequestOutcome]],
    measured: Sequence[ServingTimes],
    baseline: str,
    swept: Sequence[str] = (),
) -> Iterator[tuple[dict[str, Any], ServingTimes, ServingTimes]]:
    """The fields that rows of `serve` and of `emulate` share, and what ours and the paper's gain on the baseline, which
    is a policy or a technique; of each cell."""

    def compared(cell: PresetCell) -> tuple[object, ...]:
        """The same for cells that are compared with each other."""
        return (cell.setting, cell.peers, *(getattr(cell.served_as, name, None) for name in swept))

    def bases(averages: Sequence[ServingTimes]) -> dict[tuple[object, ...], ServingTimes]:
        return {
            compared(cell): average
            for cell, average in zip(cells, averages, strict=True)
            if baseline in (cell.policy, cell.technique) and cell.technique in ("", baseline)
        }

    printed = [cell.printed or NOTHING for cell in cells]
    base, paper_base = bases(measured), bases(printed)
    for cell, ended, own, paper in zip(cells, outcomes, measured, printed, strict=True):
        key = compared(cell)
        ours, papers = reduced(own, base.get(key, NOTHING)), reduced(paper, paper_base.get(key, NOTHING))
        fields: dict[str, Any] = {
            "policy": cell.policy,
            "rate_rps": cell.setting.rate_rps,
            "bandwidth_mbps": cell.setting.bandwidth_mbps,
            "delay_ms": cell.setting.delay_ms,
            "peers": cell.peers,
            "micro_batches": cell.served_as.micro_batches,
            "prefill_chunk_tokens": cell.served_as.prefill_chunk_tokens,
            "speculation": cell.served_as.speculation,
            "temperature": cell.served_as.temperature,
            "requests": len(ended),
            "failed": sum(one.error is not None for one in ended),
            "throughput_tps": own.throughput_tps,
        }
        for name in ("ttft", "tpot", "latency"):
            fields[f"{name}_s"], fields[f"paper_{name}_s"] = (
                getattr(own, f"{name}_s"),
                getattr(paper, f"{name}_s"),
            )
            fields[f"{name}_reduction"] = getattr(ours, f"{name}_s")
            fields[f"paper_{name}_reduction"] = getattr(papers, f"{name}_s")
        yield fields, ours, papers


def _row(
    cell: PresetCell, run: SimulatedRun, shared: dict[str, Any], ours: ServingTimes, papers: ServingTimes
) -> ServeRow:
    ways_ms = run.decode_ways_ms
    return ServeRow(
        **shared,
        technique=cell.technique,
        throughput_gain=ours.throughput_tps,
        paper_throughput_tps=None if cell.printed is None else cell.printed.throughput_tps,
        paper_throughput_gain=papers.throughput_tps,
        decode_way_ms=ways_ms[len(ways_ms) // 2] if ways_ms else None,
        decode_way_p99_ms=ways_ms[int(0.99 * (len(ways_ms) - 1))] if ways_ms else None,
        engine_busy=max(run.engine_busy),
        uplink_busy=max(run.uplink_busy),
        events=run.events,
    )
