"""Cells and claims of the redundancy paper as a terminal shows them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from molink.simnet.papers.redundancy.claims import Claim
from molink.simnet.papers.redundancy.rows import RedundancyRow

if TYPE_CHECKING:
    from rich.table import Table

_NUMBERS = (
    *("requests", "TTFT\ns", "TBT\nms", "worst\nTBT\nms", "JCT\ns", "tokens/s,\neach", "peak\nGB"),
    *("JCT below\nSplitwise", "\nvLLM", "tokens\nabove\nSplitwise", "\nvLLM", "GB more\n(paper)"),
)
_SETTINGS = (
    ("instances", "inst.", "{:g} instances of 4 x {device}"),
    ("rate_rps", "req/s", "{:g} requests/s"),
    ("interconnect_gbps", "Gbps", "{:g} Gbps to others"),
)
"""Fields of a row, how they are called above a column, and in a sentence if they are the same in all rows."""


def redundancy_table(rows: Sequence[RedundancyRow]) -> "Table":
    """A line for each row, settings apart; what is the same in all of them is in the title. 120 columns hold it."""
    from rich import box
    from rich.table import Table

    first = rows[0]
    varying = [
        (field, name) for field, name, _ in _SETTINGS if len({getattr(row, field) for row in rows}) > 1
    ]
    same = ", ".join(
        sentence.format(getattr(first, field), device=first.device)
        for field, name, sentence in _SETTINGS
        if (field, name) not in varying
    )
    table = Table(
        title=f"Llama-2-70B, {first.workload} workload on {first.device}: {same}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    if varying:
        table.add_column(", ".join(name for _, name in varying))
    table.add_column("policy", no_wrap=True)
    for name in _NUMBERS:
        table.add_column(name, justify="right", no_wrap=True)
    settings = [tuple(getattr(row, field) for field, _ in varying) for row in rows]
    for number, row in enumerate(rows):
        begins = number == 0 or settings[number - 1] != settings[number]
        ends = number + 1 == len(rows) or settings[number + 1] != settings[number]
        setting = ", ".join(f"{value:g}" for value in settings[number]) if begins else ""
        table.add_row(*([setting] if varying else []), row.policy, *_cells(row), end_section=ends)
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


def _cells(row: RedundancyRow) -> list[str]:
    cells = [f"{row.requests}", f"{row.ttft_s:.3f}", f"{1000 * row.tbt_s:.1f}", f"{1000 * row.tbt_max_s:.0f}"]
    cells += [f"{row.jct_s:.2f}", f"{row.tokens_per_instance_s:.0f}", f"{row.peak_memory_gb:.1f}"]
    cells += [_percent(row.jct_reduction_splitwise), _percent(row.jct_reduction_vllm)]
    cells += [_percent(row.tokens_gain_splitwise), _percent(row.tokens_gain_vllm)]
    printed = "" if row.paper_extra_memory_gb is None else f" ({row.paper_extra_memory_gb:g})"
    cells.append("" if row.extra_memory_gb is None else f"{row.extra_memory_gb:.1f}{printed}")
    return cells


def _percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.1f}%"
