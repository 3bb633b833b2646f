"""What `molink-simnet communication` shows."""

from collections.abc import Sequence

from molink.simnet.papers.communication.advice import AdviceRow
from molink.simnet.papers.communication.rows import OperationRow, TimeRow, VolumeRow
from molink.simnet.presentation.tables import Column, Table

_TIMES = (
    Column("TTFT", "ttft_ms", "ms", ".2f"),
    Column("TPOT", "tpot_ms", "ms", ".2f"),
    Column("latency", "latency_s", "s", ".3f"),
    Column("communication", "communication_share", form=".0%"),
)


def operations_table(title: str, rows: Sequence[OperationRow]) -> Table:
    """Counts, shapes and bytes by the equations, as counted of messages, and as the paper prints them."""
    columns = (
        Column("operation", "operation"),
        Column("count", "count", printed="paper_count"),
        Column("counted", "counted"),
        Column("shape", "shape", form=_shape),
        Column("printed", _printed_shape),
        Column("of one", "message_bytes", "bytes"),
        Column("sent", "corrected_bytes", "MB", _megabytes),
        Column("counted", "counted_bytes", "MB", _megabytes),
    )
    scopes = {row.operation: row.scope for row in rows}
    notes = [f"{operation}: {scope}" for operation, scope in scopes.items()]
    return Table(title, columns, rows, (Column("stage", "stage"),), notes)


def volumes_table(rows: Sequence[VolumeRow]) -> Table:
    """By the equations, and counted."""
    columns = (
        Column("volume", "volume"),
        Column("equation", lambda row: None if row.equation is None else f"({row.equation})"),
        Column("by equation", "bytes", form=_megabytes),
        Column("of", lambda row: f"{row.scope}; {'corrected' if row.corrected else 'payload'}"),
        Column("all ranks", "all_ranks_bytes", form=_megabytes),
        Column(
            "counted of\nall ranks",
            lambda row: None if row.all_ranks_bytes is None else row.counted_bytes,
            form=_megabytes,
        ),
    )
    return Table("Volumes of the request, MB", columns, rows)


def times_table(rows: Sequence[TimeRow]) -> Table:
    """Predicted, simulated, printed."""
    return Table("A lone request", (Column("from", "source"), *_TIMES), rows)


def advice_table(title: str, rows: Sequence[AdviceRow]) -> Table:
    """The best first."""
    columns = (
        Column("layout", lambda row: f"TP={row.tp} PP={row.pp}"),
        *_TIMES,
        Column("sent by all", "all_ranks_bytes", "MB", _megabytes),
        Column("on a device", "device_gb", "GB", ".1f"),
        Column("fits", lambda row: "yes" if row.fits else "no"),
    )
    return Table(title, columns, rows)


def _printed_shape(row: OperationRow) -> str | None:
    if row.paper_shape is not None:
        return _shape(row.paper_shape)
    return None if row.paper_message_bytes is None else f"{row.paper_message_bytes}"


def _shape(shape: Sequence[int]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.3f}"
