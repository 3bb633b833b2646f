"""Cells and claims of the redundancy paper as a terminal shows them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.redundancy.claims import Claim
from molink.simnet.redundancy.rows import RedundancyRow

if TYPE_CHECKING:
    from rich.table import Table

_NUMBERS = (
    *("requests", "TTFT\ns", "TBT\nms", "worst TBT\nms", "JCT\ns", "tokens/s,\ninstance", "peak\nGB"),
    *("JCT below\nSplitwise, vLLM", "tokens above\nSplitwise, vLLM", "GB more\n(paper)"),
)


def redundancy_table(rows: Sequence[RedundancyRow]) -> "Table":
    """A line for each row, settings apart."""
    from rich.table import Table

    first = rows[0]
    table = Table(
        title=f"Llama-2-70B on instances of 4 x {first.device}, {first.workload} workload",
        title_justify="left",
    )
    table.add_column("instances,\nrate, Gbps")
    table.add_column("policy", no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right")
    for number, row in enumerate(rows):
        begins = number == 0 or _setting(rows[number - 1]) != _setting(row)
        ends = number + 1 == len(rows) or _setting(rows[number + 1]) != _setting(row)
        table.add_row(_setting(row) if begins else "", row.policy, *_cells(row), end_section=ends)
    return table


def claims_table(found: Sequence[Claim]) -> "Table":
    """A line for each claim."""
    from rich.table import Table

    table = Table(
        title="What the paper's text says, and where ours comes nearest to it", title_justify="left"
    )
    for name in ("policy", "claim", "paper", "ours", "at", "agrees"):
        table.add_column(name, justify="left" if name in ("policy", "claim") else "right")
    for one in found:
        where = "" if one.instances is None else f"{one.instances} instances, {one.rate_rps:g}/s"
        numbers = (f"{one.paper:.2f}", f"{one.ours:.2f}", where, "yes" if one.agrees else "no")
        table.add_row(one.policy, one.claim, *numbers)
    return table


def _setting(row: RedundancyRow) -> str:
    return f"{row.instances}, {row.rate_rps:g}/s, {row.interconnect_gbps:g}"


def _cells(row: RedundancyRow) -> list[str]:
    cells = [f"{row.requests}", f"{row.ttft_s:.3f}", f"{1000 * row.tbt_s:.1f}", f"{1000 * row.tbt_max_s:.0f}"]
    cells += [f"{row.jct_s:.2f}", f"{row.tokens_per_instance_s:.0f}", f"{row.peak_memory_gb:.1f}"]
    cells.append(_parts(row.jct_reduction_splitwise, row.jct_reduction_vllm))
    cells.append(_parts(row.tokens_gain_splitwise, row.tokens_gain_vllm))
    printed = "" if row.paper_extra_memory_gb is None else f" ({row.paper_extra_memory_gb:g})"
    cells.append("" if row.extra_memory_gb is None else f"{row.extra_memory_gb:.1f}{printed}")
    return cells


def _parts(*parts: float | None) -> str:
    return ", ".join(f"{100 * part:.1f} %" for part in parts if part is not None)
