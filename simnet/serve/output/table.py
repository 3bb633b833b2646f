"""A serving table as a terminal shows it, and what it comes to."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from molink.simnet.serve.output.order import orders
from molink.simnet.serve.output.verdicts import verdicts
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_A_LITTLE = 0.02
"""Of a value: less is taken for chance."""
METRICS = (
    ("ttft_s", "TTFT, s", "ttft_reduction", -1),
    ("tpot_s", "TPOT, s", "tpot_reduction", -1),
    ("latency_s", "latency, s", "latency_reduction", -1),
    ("throughput_tps", "tokens/s", "throughput_gain", 1),
)
"""Of a row: the field, its name, the field of its change, and which way that counts."""
SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        "rate_rps": "req/s",
        "bandwidth_mbps": "Mbps",
        "delay_ms": "ms",
        "peers": "peers",
        "micro_batches": "micro-batches",
        "prefill_chunk_tokens": "chunk",
    }
)
"""Fields of a row that say in what setting it is, and how they are called."""
COMPUTED = "computed"
"""In place of a number of tokens: the head computes them."""


def serve_table(preset: Preset, rows: Sequence[ServeRow]) -> "Table":
    """A line for each row, settings apart; the paper's value beside ours. 120 columns hold it."""
    from rich import box
    from rich.table import Table

    names = preset.settings
    varying = [name for name in names if len({getattr(row, name) for row in rows}) > 1]
    same = ", ".join(
        f"{shown_setting(rows[0], name)} {SETTINGS[name]}"
        for name in names
        if name not in (*varying, "peers")
    )
    machines = "" if "peers" in varying else f"{rows[0].peers} x "
    title = (
        f"{preset.title}\n{preset.model} on {machines}{preset.device}, {preset.tensors_per_boundary} tensors at "
        f"each boundary{', ' + same if same else ''}"
    )
    caption = f"In brackets: above (+) or below (-) {preset.baseline}. {_failures(rows)}"
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    if varying:
        table.add_column(", ".join(SETTINGS[name] for name in varying))
    techniques = any(row.technique for row in rows)
    table.add_column("technique" if techniques else "policy", no_wrap=True)
    shown = [metric for metric in METRICS if any(getattr(row, metric[0]) is not None for row in rows)]
    for field, name, _, _ in shown:
        table.add_column(name, justify="right", no_wrap=True)
        if _is_printed(field, rows):
            table.add_column("paper", justify="right", no_wrap=True, style="dim")
    settings = [tuple(shown_setting(row, name) for name in varying) for row in rows]
    for number, row in enumerate(rows):
        begins = number == 0 or settings[number - 1] != settings[number]
        ends = number + 1 == len(rows) or settings[number + 1] != settings[number]
        cells: list[str | Text] = [", ".join(settings[number]) if begins else ""] if varying else []
        cells.append(row.technique if techniques else row.policy)
        table.add_row(*cells, *_values(row, shown, rows), end_section=ends)
    return table


def shown_setting(row: ServeRow, name: str) -> str:
    """A value of one of the fields in `SETTINGS`."""
    value = getattr(row, name)
    if name == "prefill_chunk_tokens" and value is None:
        return COMPUTED
    return value if isinstance(value, str) else f"{value:g}"


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


def shown_value(value: float | None, change: float | None) -> str:
    """Three digits, and by how many percent it is above or below the baseline's."""
    if value is None:
        return ""
    digits = 2 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))
    text = f"{value:.{digits}f}"
    return text if change is None or change == 0 else f"{text} ({100 * change:+.0f}%)"


def _values(
    row: ServeRow, shown: Sequence[tuple[str, str, str, int]], rows: Sequence[ServeRow]
) -> "list[str | Text]":
    """Ours in colour: green where it is better than the baseline by more than a little, red where it is worse."""
    from rich.text import Text

    cells: list[str | Text] = []
    for field, _, change, sign in shown:
        part = getattr(row, change)
        style = "" if part is None or abs(part) < _A_LITTLE else "green" if part > 0 else "red"
        cells.append(Text(shown_value(getattr(row, field), None if part is None else sign * part), style))
        if _is_printed(field, rows):
            printed = getattr(row, f"paper_{change}")
            value = getattr(row, f"paper_{field}")
            cells.append(shown_value(value, None if printed is None else sign * printed))
    return cells


def _is_printed(field: str, rows: Sequence[ServeRow]) -> bool:
    return any(getattr(row, f"paper_{field}") is not None for row in rows)


def _failures(rows: Sequence[ServeRow]) -> str:
    requests, failed = sum(row.requests for row in rows), sum(row.failed for row in rows)
    return (
        f"{requests} requests in all, {failed} failed"
        if failed
        else f"{requests} requests in all, none failed"
    )
