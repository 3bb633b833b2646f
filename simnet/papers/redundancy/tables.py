"""Cells and claims of the redundancy paper as tables."""

from collections.abc import Sequence

from molink.simnet.papers.redundancy.claims import PaperClaim
from molink.simnet.papers.redundancy.rows import RedundancyRow
from molink.simnet.presentation.tables import Column, Table

_SETTINGS = (
    Column("instances", "instances"),
    Column("rate", "rate_rps", "req/s", "g"),
    Column("lines", "interconnect_gbps", "Gbps", "g"),
)
_COLUMNS = (
    Column("policy", "policy"),
    Column("requests", "requests"),
    Column("TTFT", "ttft_s", "s", ".3f"),
    Column("TBT", lambda row: 1000 * row.tbt_s, "ms", ".1f"),
    Column("worst\nTBT", lambda row: 1000 * row.tbt_max_s, "ms", ".0f"),
    Column("JCT", "jct_s", "s", ".2f"),
    Column("tokens/s\neach", "tokens_per_instance_s", form=".0f"),
    Column("peak", "peak_memory_gb", "GB", ".1f"),
    Column("JCT\nbelow\nSplitwise", "jct_reduction_splitwise", form=".1%"),
    Column("JCT\nbelow\nvLLM", "jct_reduction_vllm", form=".1%"),
    Column("tokens\nabove\nSplitwise", "tokens_gain_splitwise", form=".1%"),
    Column("tokens\nabove\nvLLM", "tokens_gain_vllm", form=".1%"),
    Column("more", "extra_memory_gb", "GB", ".1f", printed="paper_extra_memory_gb", printed_form="g"),
)
_CLAIMS = (
    Column("policy", "policy"),
    Column("claim", "claim"),
    Column("printed", "paper", form=".2f"),
    Column("ours", "ours", form=".2f"),
    Column(
        "at", lambda one: None if one.instances is None else f"{one.instances} instances, {one.rate_rps:g}/s"
    ),
    Column("agrees", lambda one: "yes" if one.agrees else "no"),
)


def redundancy_table(rows: Sequence[RedundancyRow]) -> Table:
    """A line for each row, settings apart."""
    first = rows[0]
    title = f"Llama-2-70B, {first.workload} workload on instances of 4 x {first.device}"
    return Table(title, _COLUMNS, rows, _SETTINGS)


def claims_table(found: Sequence[PaperClaim]) -> Table:
    """A line for each claim."""
    return Table("What the paper's text says, and where ours comes nearest to it", _CLAIMS, found)
