"""A serving table as a terminal shows it, and what it comes to."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.serve_presets import Preset
from molink.simnet.serve_rows import ServeRow
from molink.simnet.serve_verdicts import verdicts

if TYPE_CHECKING:
    from rich.table import Table

METRICS = (
    ("ttft_s", "TTFT, s", "ttft_reduction", -1),
    ("tpot_s", "TPOT, s", "tpot_reduction", -1),
    ("latency_s", "latency, s", "latency_reduction", -1),
    ("throughput_tps", "tokens/s", "throughput_gain", 1),
)
"""Of a row: the field, its name, the field of its change, and which way that counts."""
_SETTINGS = (("rate_rps", "req/s"), ("bandwidth_mbps", "Mbps"), ("delay_ms", "ms"))


def serve_table(preset: Preset, rows: Sequence[ServeRow]) -> "Table":
    """A line for each row, settings apart; the paper's value beside ours. 120 columns hold it."""
    from rich import box
    from rich.table import Table

    varying = [one for one in _SETTINGS if len({getattr(row, one[0]) for row in rows}) > 1]
    same = ", ".join(
        f"{getattr(rows[0], field):g} {name}" for field, name in _SETTINGS if (field, name) not in varying
    )
    title = (
        f"{preset.title}\n{preset.model} on {preset.peers} x {preset.device}, {preset.tensors_per_boundary} tensors at "
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
        table.add_column(
            "\n".join(name for _, name in varying) if len(varying) < 2 else ", ".join(n for _, n in varying)
        )
    techniques = any(row.technique for row in rows)
    table.add_column("technique" if techniques else "policy", no_wrap=True)
    shown = [metric for metric in METRICS if any(getattr(row, metric[0]) is not None for row in rows)]
    for field, name, _, _ in shown:
        table.add_column(name, justify="right", no_wrap=True)
        if _is_printed(field, rows):
            table.add_column("paper", justify="right", no_wrap=True, style="dim")
    for number, row in enumerate(rows):
        begins = number == 0 or _setting(rows[number - 1]) != _setting(row)
        ends = number + 1 == len(rows) or _setting(rows[number + 1]) != _setting(row)
        cells = (
            [", ".join(f"{getattr(row, field):g}" for field, _ in varying) if begins else ""]
            if varying
            else []
        )
        cells.append(row.technique if techniques else row.policy)
        table.add_row(*cells, *_values(row, shown, rows), end_section=ends)
    return table


def verdict_lines(preset: Preset, rows: Sequence[ServeRow]) -> list[str]:
    """One for each baseline that the paper compares with."""
    lines = []
    for one in verdicts(preset, rows):
        counts = ", ".join(f"{metric} {count.reached}/{count.cells}" for metric, count in one.counts)
        lines.append(
            f"{one.subject} against {one.baseline} ({one.system}): as good as the paper's or better: {counts}"
        )
    return lines


def shown_value(value: float | None, change: float | None) -> str:
    """Three digits, and by how many percent it is above or below the baseline's."""
    if value is None:
        return ""
    digits = 2 if value <= 0 else min(3, max(0, 2 - math.floor(math.log10(value))))
    text = f"{value:.{digits}f}"
    return text if change is None or change == 0 else f"{text} ({100 * change:+.0f}%)"


def _values(row: ServeRow, shown: Sequence[tuple[str, str, str, int]], rows: Sequence[ServeRow]) -> list[str]:
    cells = []
    for field, _, change, sign in shown:
        for prefix in ("", "paper_") if _is_printed(field, rows) else ("",):
            part = getattr(row, prefix + change)
            cells.append(shown_value(getattr(row, prefix + field), None if part is None else sign * part))
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


def _setting(row: ServeRow) -> tuple[float, float, float]:
    return row.rate_rps, row.bandwidth_mbps, row.delay_ms
