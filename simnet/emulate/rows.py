"""What runs of an emulation amount to, beside the transmission paper's numbers, as rows and as tables."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from molink.simnet.core.serving_times import NOTHING, serving_times
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.emulate.run import Emulation, EmulationCell, EmulationRun
from molink.simnet.presentation.tables import Column, Table
from molink.simnet.serve.output.table import METRICS, SETTINGS, failures, in_brackets
from molink.simnet.serve.paper import SYSTEM_OF, TABLE_2, LineSetting
from molink.simnet.serve.presets import PresetCell
from molink.simnet.serve.rows import shared_fields

BASELINE = "concurrent"
"""Reductions are against this policy at the same rate."""
PAPER_DEVICE, PAPER_PEERS = "rtx-4090", 3
"""Of Table 2 of the transmission paper (section 5.1): Qwen2-7B on three RTX 4090."""
_RATE = (SETTINGS["rate_rps"],)
_TIMES = (Column("policy", "policy"), *METRICS[:3])
_USAGE = (
    Column("policy", "policy"),
    SETTINGS["micro_batches"],
    SETTINGS["prefill_chunk_tokens"],
    SETTINGS["speculation"],
    Column("throughput", "throughput_tps", "tokens/s", ".1f"),
    Column("decode\none way", "decode_one_way_ms", "ms", ".1f"),
    Column("99 % of\nthem", "decode_one_way_p99_ms", "ms", ".0f"),
    Column("engine\nbusy", "engine_busy", form=".0%"),
    Column("uplink\nbusy", "uplink_busy", form=".0%"),
    Column("CPU here,\nmost", lambda row: max(row.peer_cpu, row.driver_cpu, row.lines_cpu), form=".0%"),
)


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
    speculation: str
    """Guessed tokens of a trip: auto, draft, off, or a number."""
    temperature: float
    """Of the recorded generations that are guessed."""
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
    count, cells = len(runs), [_cell(emulation, run.cell) for run in runs]
    # what the paper's systems gain is on its own baseline, whether ours ran or not
    baselines = [_cell(emulation, replace(run.cell, policy=BASELINE)) for run in runs]
    shared = shared_fields(
        [*baselines, *cells],
        [*[()] * count, *(run.outcomes for run in runs)],
        [*[NOTHING] * count, *(serving_times(run.outcomes, run.usage.tokens_per_s) for run in runs)],
        BASELINE,
    )
    return [_row(run, fields) for run, (fields, _, _) in zip(runs, islice(shared, count, None), strict=True)]


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


def _row(run: EmulationRun, shared: dict[str, Any]) -> ServingRow:
    usage = run.usage
    ways_ms = sorted(1000 * way for one in run.outcomes for way in one.one_way_s)
    return ServingRow(
        **shared,
        decode_one_way_ms=statistics.median(ways_ms) if ways_ms else None,
        decode_one_way_p99_ms=ways_ms[int(0.99 * (len(ways_ms) - 1))] if ways_ms else None,
        engine_busy=max(usage.engines),
        uplink_busy=max(usage.uplinks),
        peer_cpu=max(usage.processes),
        driver_cpu=usage.driver,
        lines_cpu=usage.lines,
    )


def _cell(emulation: Emulation, cell: EmulationCell) -> PresetCell:
    """With what the paper prints of this setting, if it does."""
    setting = LineSetting(cell.rate_rps, emulation.bandwidth_mbps, emulation.delay_ms)
    machines = (emulation.spec.name, emulation.device, emulation.peers)
    is_paper = machines == (QWEN2_7B.name, PAPER_DEVICE, PAPER_PEERS) and emulation.latency_ms is None
    printed = TABLE_2.get((setting, SYSTEM_OF.get(cell.policy, ""))) if is_paper else None
    return PresetCell(setting, cell.policy, cell.served_as, emulation.peers, printed=printed)


def whose(emulation: Emulation) -> str:
    """Model and machines."""
    computing = "computed here" if emulation.device is None else f"timed as {emulation.device}"
    return f"{emulation.spec.name} on {emulation.peers} peers, {computing}"


def serving_table(emulation: Emulation, rows: Sequence[ServingRow]) -> Table:
    """A line for each row, rates apart; the paper's averages stand beside ours where it prints them."""
    title = (
        f"{whose(emulation)}; {emulation.bandwidth_mbps:g} Mbps, {emulation.delay_ms:g} ms one way; "
        f"averages over {emulation.duration_s:g} s"
    )
    return Table(title, _TIMES, rows, _RATE, (in_brackets(BASELINE), failures(rows)))


def usage_table(rows: Sequence[ServingRow]) -> Table:
    """How peers served, and what that took of what there is: a line for each row, rates apart."""
    return Table("How they served, and what it took", _USAGE, rows, _RATE)
