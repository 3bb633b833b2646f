"""A serving table as a terminal shows it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.serve_presets import Preset
from molink.simnet.serve_rows import ServeRow

if TYPE_CHECKING:
    from rich.table import Table

_METRICS = (
    ("ttft_s", "TTFT\ns", 2, "ttft_reduction"),
    ("tpot_s", "TPOT\ns", 3, "tpot_reduction"),
    ("latency_s", "latency\ns", 1, "latency_reduction"),
)


def serve_table(preset: Preset, rows: Sequence[ServeRow]) -> "Table":
    """A line for each row, settings apart. The paper's value stands beside ours, and in brackets by how much a value is
    below the baseline's."""
    from rich.table import Table

    title = (
        f"{preset.title}\n{preset.model} on {preset.peers} x {preset.device}, "
        f"{preset.tensors_per_boundary} tensors at each boundary"
    )
    caption = f"In brackets: how much less than {preset.baseline} (tokens/s: how much more)"
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    table.add_column("rate, Mbps,\nms one way")
    if any(row.technique for row in rows):
        table.add_column("technique")
    table.add_column("policy")
    table.add_column("requests\n(failed)", justify="right")
    for _, name, _, _ in _METRICS:
        table.add_column(name, justify="right")
        table.add_column("paper", justify="right")
    table.add_column("tokens\na second", justify="right")
    if any(row.paper_throughput_tps is not None for row in rows):
        table.add_column("paper", justify="right")
    for number, row in enumerate(rows):
        begins = number == 0 or _setting(rows[number - 1]) != _setting(row)
        ends = number + 1 == len(rows) or _setting(rows[number + 1]) != _setting(row)
        table.add_row(_setting(row) if begins else "", *_cells(row, rows), end_section=ends)
    return table


def _setting(row: ServeRow) -> str:
    return f"{row.rate_rps:g}/s, {row.bandwidth_mbps:g}, {row.delay_ms:g}"


def _cells(row: ServeRow, rows: Sequence[ServeRow]) -> list[str]:
    cells = [row.technique] if any(one.technique for one in rows) else []
    cells += [row.policy, f"{row.requests} ({row.failed})"]
    for metric, _, digits, reduction in _METRICS:
        cells.append(_value(getattr(row, metric), getattr(row, reduction), digits))
        cells.append(_value(getattr(row, f"paper_{metric}"), getattr(row, f"paper_{reduction}"), digits))
    cells.append(_value(row.throughput_tps, row.throughput_gain, 1))
    if any(one.paper_throughput_tps is not None for one in rows):
        cells.append(_value(row.paper_throughput_tps, row.paper_throughput_gain, 1))
    return cells


def _value(value: float | None, part: float | None, digits: int) -> str:
    if value is None:
        return ""
    shown = f"{value:.{digits}f}"
    return shown if not part else f"{shown} ({100 * part:.0f} %)"
