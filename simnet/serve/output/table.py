"""A serving table, what it comes to, and the columns that `emulate` has, too."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from molink.simnet.presentation.tables import Column, Table, three_digits
from molink.simnet.serve.output.order import orders
from molink.simnet.serve.output.verdicts import verdicts
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow

COMPUTED = "computed"
"""In place of a number of tokens: the head computes them."""


def shown_chunk(tokens: int | None) -> str:
    return COMPUTED if tokens is None else f"{tokens}"


def _metric(name: str, field: str, change: str, unit: str, sign: int = -1) -> Column:
    return Column(name, field, unit, three_digits, printed=f"paper_{field}", change=change, sign=sign)


METRICS = (
    _metric("TTFT", "ttft_s", "ttft_reduction", "s"),
    _metric("TPOT", "tpot_s", "tpot_reduction", "s"),
    _metric("latency", "latency_s", "latency_reduction", "s"),
    _metric("throughput", "throughput_tps", "throughput_gain", "tokens/s", 1),
)
SETTINGS: Mapping[str, Column] = MappingProxyType(
    {
        "rate_rps": Column("rate", "rate_rps", "req/s", "g"),
        "bandwidth_mbps": Column("uplink", "bandwidth_mbps", "Mbps", "g"),
        "delay_ms": Column("delay", "delay_ms", "ms", "g"),
        "peers": Column("peers", "peers"),
        "micro_batches": Column("micro-batches", "micro_batches"),
        "prefill_chunk_tokens": Column("chunk", lambda row: shown_chunk(row.prefill_chunk_tokens)),
        "speculation": Column("guesses", "speculation"),
        "temperature": Column("temperature", "temperature", form="g"),
    }
)
"""By the fields of a row that say in what setting it is."""


def serve_table(preset: Preset, rows: Sequence[ServeRow]) -> Table:
    """A line for each row, settings apart; the paper's value beside ours."""
    name = "technique" if any(row.technique for row in rows) else "policy"
    title = f"{preset.title}\n{preset.model} on {preset.device}, {preset.tensors_per_boundary} tensors at each boundary"
    return Table(
        title,
        (Column(name, name), *METRICS),
        rows,
        by=tuple(SETTINGS[setting] for setting in preset.settings),
        notes=(in_brackets(preset.baseline), failures(rows)),
    )


def in_brackets(baseline: str) -> str:
    return f"In brackets: above (+) or below (-) {baseline}"


def failures(rows: Sequence[Any]) -> str:
    """Of rows of `serve` or `emulate`."""
    requests, failed = sum(row.requests for row in rows), sum(row.failed for row in rows)
    return f"{requests} requests in all, {failed or 'none'} failed"


def verdict_lines(preset: Preset, rows: Sequence[ServeRow]) -> list[str]:
    """One for each baseline that the paper compares with."""
    lines = []
    for one in verdicts(preset, rows):
        counts = ", ".join(f"{metric} {count.reached}/{count.cells}" for metric, count in one.counts)
        lines.append(
            f"{one.subject} against {one.baseline} ({one.system}): as good as the paper's or better: {counts}"
        )
    return lines


def order_lines(preset: Preset, rows: Sequence[ServeRow]) -> list[str]:
    """One for each metric: in how many pairs the better policy is that of the paper, and which came the other way."""
    lines = []
    for one in orders(preset, rows):
        swapped = ", ".join(
            f"{second} {times}x before {first}" for (first, second), times in one.swapped.items()
        )
        kept = f"{one.metric} in the paper's order: {one.kept} of {one.pairs} pairs of policies"
        lines.append(f"{kept}; {swapped}" if swapped else kept)
    return lines
