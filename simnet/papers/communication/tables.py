"""What `molink-simnet communication` prints."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.papers.communication.advice import AdviceRow
from molink.simnet.papers.communication.rows import OperationRow, TimeRow, VolumeRow

if TYPE_CHECKING:
    from rich.table import Table


def operations_table(title: str, rows: Sequence[OperationRow]) -> "Table":
    """Counts, shapes and bytes by the equations, as counted of messages, and as the paper prints them."""
    counted = any(row.counted is not None for row in rows)
    printed = any(row.paper_count is not None for row in rows)
    headings = ["count", *["counted"] * counted, *["paper"] * printed, "shape", *["paper's"] * printed]
    headings += ["bytes of one", "MB sent", *["MB counted"] * counted]
    table = _table(title, ("stage", "operation"), headings)
    for number, row in enumerate(rows):
        said = row.paper_shape if row.paper_shape is not None else row.paper_message_bytes
        cells = [row.stage, row.operation, str(row.count)]
        cells += [_or_dash(row.counted)] * counted + [_or_dash(row.paper_count)] * printed
        cells.append(_shape(row.shape))
        cells += [_shape(said) if isinstance(said, tuple) else _or_dash(said)] * printed
        cells += [str(row.message_bytes), _megabytes(row.corrected_bytes)]
        cells += [_megabytes(row.counted_bytes)] * counted
        ends = number + 1 < len(rows) and rows[number + 1].stage != row.stage
        table.add_row(*cells, end_section=ends)
    scopes = {row.operation: row.scope for row in rows}
    table.caption = "\n".join(f"{operation}: {scope}" for operation, scope in scopes.items())
    table.caption_justify = "left"
    return table


def volumes_table(rows: Sequence[VolumeRow]) -> "Table":
    table = _table("Volumes of the request, MB", ("volume", "equation"), ("as printed",))
    table.add_column("of", justify="left")
    for heading in ("all ranks", "counted of all ranks"):
        table.add_column(heading, justify="right")
    for row in rows:
        kind = "corrected" if row.corrected else "payload"
        equation = "" if row.equation is None else f"({row.equation})"
        cells = [row.volume, equation, _megabytes(row.bytes), f"{row.scope}; {kind}"]
        counted = row.counted_bytes if row.all_ranks_bytes is not None else None
        table.add_row(*cells, _megabytes(row.all_ranks_bytes), _megabytes(counted))
    return table


def times_table(rows: Sequence[TimeRow]) -> "Table":
    headings = ("TTFT, ms", "TPOT, ms", "latency, s", "communication")
    table = _table("A lone request", ("from",), headings)
    for row in rows:
        numbers = [_or_dash(row.ttft_ms, ".2f"), _or_dash(row.tpot_ms, ".2f"), _or_dash(row.latency_s, ".3f")]
        table.add_row(row.source, *numbers, _or_dash(row.communication_share, ".0%"))
    return table


def advice_table(title: str, rows: Sequence[AdviceRow]) -> "Table":
    """The best first."""
    headings = ("TP", "PP", "TTFT, ms", "TPOT, ms", "latency, s", "communication", "MB sent by all")
    table = _table(title, (), (*headings, "GB on a device"))
    table.add_column("", justify="left")
    for row in rows:
        table.add_row(
            *(str(row.tp), str(row.pp), f"{row.ttft_ms:.2f}", f"{row.tpot_ms:.2f}", f"{row.latency_s:.3f}"),
            *(f"{row.communication_share:.0%}", _megabytes(row.all_ranks_bytes), f"{row.device_gb:.1f}"),
            "" if row.fits else "does not fit",
        )
    return table


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right")
    return table


def _shape(shape: tuple[int, ...]) -> str:
    return "[" + ", ".join(str(size) for size in shape) + "]"


def _megabytes(size: float | None) -> str:
    return _or_dash(None if size is None else size / 1e6, ".3f")


def _or_dash(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)
