"""The serving emulation as a terminal shows it."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from molink.simnet.emulate.rows import BASELINE, ServingRow
from molink.simnet.emulate.run import Emulation

if TYPE_CHECKING:
    from rich.table import Table

_METRICS = (("ttft", "TTFT", 2, 2), ("tpot", "TPOT", 3, 2), ("latency", "latency", 1, 0))
"""Names, and digits of ours and of the paper's."""


def serving_table(emulation: Emulation, rows: Sequence[ServingRow]) -> "Table":
    """A line for each row, rates apart; the paper's averages stand beside ours where it prints them, and in brackets
    by how much a value is above or below the baseline's, as in the tables of `serve`."""
    from rich.table import Table

    computing = "computed here" if emulation.device is None else f"timed as {emulation.device}"
    title = (
        f"{emulation.spec.name} on {emulation.peers} peers, {computing}; {emulation.bandwidth_mbps:g} Mbps, "
        f"{emulation.delay_ms:g} ms one way; averages over {emulation.duration_s:g} s"
    )
    with_paper = any(row.paper_ttft_s is not None for row in rows)
    caption = f"In brackets: above (+) or below (-) {BASELINE}"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("rate\n1/s", justify="right")
    table.add_column("policy")
    table.add_column("requests\n(failed)", justify="right")
    for _, name, _, _ in _METRICS:
        table.add_column(f"{name}\ns", justify="right")
        if with_paper:
            table.add_column("paper\ns", justify="right")
    for row, begins, ends in _by_rate(rows):
        cells = [row.policy, f"{row.requests} ({row.failed})", *_times(row, with_paper=with_paper)]
        table.add_row(f"{row.rate_rps:g}" if begins else "", *cells, end_section=ends)
    return table


def usage_table(rows: Sequence[ServingRow]) -> "Table":
    """How peers served, and what that took of what there is: a line for each row, rates apart."""
    from rich.table import Table

    table = Table(title="How they served, and what it took", title_justify="left")
    table.add_column("rate\n1/s", justify="right")
    table.add_column("policy")
    table.add_column("micro-\nbatches")
    table.add_column("prompts\nin steps of")
    table.add_column("tokens/s", justify="right")
    table.add_column("decode\none way, ms", justify="right")
    table.add_column("engine\nbusy", justify="right")
    table.add_column("uplink\nbusy", justify="right")
    table.add_column("CPU here,\nmost", justify="right")
    for row, begins, ends in _by_rate(rows):
        table.add_row(f"{row.rate_rps:g}" if begins else "", *_usage(row), end_section=ends)
    return table


def _by_rate(rows: Sequence[ServingRow]) -> Iterator[tuple[ServingRow, bool, bool]]:
    """Each row, and whether it is the first and the last of its rate."""
    for number, row in enumerate(rows):
        begins = number == 0 or rows[number - 1].rate_rps != row.rate_rps
        ends = number + 1 == len(rows) or rows[number + 1].rate_rps != row.rate_rps
        yield row, begins, ends


def _times(row: ServingRow, *, with_paper: bool) -> list[str]:
    cells = []
    for metric, _, digits, paper_digits in _METRICS:
        for prefix, shown in (("", digits), ("paper_", paper_digits)) if with_paper else (("", digits),):
            value = getattr(row, f"{prefix}{metric}_s")
            cells.append(_value(value, getattr(row, f"{prefix}{metric}_reduction"), shown))
    return cells


def _usage(row: ServingRow) -> list[str]:
    way_ms, late_ms = row.decode_one_way_ms, row.decode_one_way_p99_ms
    chunk = row.prefill_chunk_tokens
    return [
        row.policy,
        row.micro_batches,
        "as predicted" if chunk is None else f"{chunk}",
        f"{row.throughput_tps:.1f}",
        "" if way_ms is None or late_ms is None else f"{way_ms:.1f}, p99 {late_ms:.0f}",
        f"{100 * row.engine_busy:.0f} %",
        f"{100 * row.uplink_busy:.0f} %",
        f"{100 * max(row.peer_cpu, row.driver_cpu, row.lines_cpu):.0f} %",
    ]


def _value(value: float | None, reduction: float | None, digits: int) -> str:
    if value is None:
        return ""
    shown = f"{value:.{digits}f}"
    return shown if not reduction else f"{shown} ({-100 * reduction:+.0f}%)"
