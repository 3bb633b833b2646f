"""What the redundancy paper's text claims, beside the largest or smallest value of our rows. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.simnet.redundancy.rows import PAPER_MIXED_PART, RedundancyRow

NEAR = 1 / 3
"""Of the paper's value: so far off, ours still agrees."""


@dataclass(frozen=True, slots=True)
class Claim:
    """One of them."""

    claim: str
    paper: float
    ours: float
    instances: int | None
    """Where ours was found."""
    rate_rps: float | None
    agrees: bool


def claims(rows: Sequence[RedundancyRow]) -> list[Claim]:
    """Those of the rows' workload and device, as far as the rows have the policies for them; at the fastest
    interconnect if there are several."""
    fastest = max(row.interconnect_gbps for row in rows)
    rows = [row for row in rows if row.interconnect_gbps == fastest]
    own = [row for row in rows if row.policy == "accellm"]
    if not own:
        return []
    workload, device = own[0].workload, own[0].device
    found = []
    if workload == "mixed":
        found += [
            _most(
                "JCT below Splitwise's, up to", PAPER_MIXED_PART, own, lambda row: row.jct_reduction_splitwise
            ),
            _most("JCT below vLLM's, up to", PAPER_MIXED_PART, own, lambda row: row.jct_reduction_vllm),
            _most(
                "tokens above Splitwise's, nearly",
                PAPER_MIXED_PART,
                own,
                lambda row: row.tokens_gain_splitwise,
            ),
            _most("tokens above vLLM's, nearly", PAPER_MIXED_PART, own, lambda row: row.tokens_gain_vllm),
            _least("TTFT, part of Splitwise's, almost", 0.5, own, lambda row: row.ttft_of_splitwise),
        ]
        found += [
            _most(
                "memory beyond the others, GB",
                row.paper_extra_memory_gb,
                [row],
                lambda row: row.extra_memory_gb,
            )
            for row in own
            if row.paper_extra_memory_gb is not None
        ]
    if workload == "heavy" and device == "h100":
        found += [
            _most(
                "JCT below Splitwise's, s, up to",
                3.0,
                own,
                lambda row: _saved_s(row, row.jct_reduction_splitwise),
            ),
            _most("JCT below vLLM's, s, up to", 3.5, own, lambda row: _saved_s(row, row.jct_reduction_vllm)),
        ]
    if workload == "light" and device == "h100":
        theirs = [row for row in rows if row.policy == "splitwise"]
        found.append(_most("Splitwise's TTFT at worst, s, nearly", 0.45, theirs, lambda row: row.ttft_s))
    found.append(_first("part of settings in which accellm has the least JCT", rows, lambda row: row.jct_s))
    found.append(_first("part of settings in which accellm has the least TBT", rows, lambda row: row.tbt_s))
    return [claim for claim in found if claim is not None]


def _most(
    name: str, paper: float, rows: Sequence[RedundancyRow], value: Callable[[RedundancyRow], float | None]
) -> Claim | None:
    known = [(own, row) for row in rows if (own := value(row)) is not None]
    return _claim(name, paper, *max(known, key=lambda one: one[0])) if known else None


def _least(
    name: str, paper: float, rows: Sequence[RedundancyRow], value: Callable[[RedundancyRow], float | None]
) -> Claim | None:
    known = [(own, row) for row in rows if (own := value(row)) is not None]
    return _claim(name, paper, *min(known, key=lambda one: one[0])) if known else None


def _claim(name: str, paper: float, ours: float, row: RedundancyRow) -> Claim:
    return Claim(name, paper, ours, row.instances, row.rate_rps, abs(ours - paper) <= NEAR * paper)


def _first(name: str, rows: Sequence[RedundancyRow], value: Callable[[RedundancyRow], float]) -> Claim | None:
    settings: dict[tuple[int, float], list[RedundancyRow]] = {}
    for row in rows:
        settings.setdefault((row.instances, row.rate_rps), []).append(row)
    compared = [
        beside
        for beside in settings.values()
        if len(beside) > 1 and any(row.policy == "accellm" for row in beside)
    ]
    if not compared:
        return None
    ahead = sum(min(beside, key=value).policy == "accellm" for beside in compared) / len(compared)
    return Claim(name, 1.0, ahead, None, None, ahead == 1.0)


def _saved_s(row: RedundancyRow, reduction: float | None) -> float | None:
    """Seconds, of a part of the other policy's JCT."""
    return None if reduction is None else row.jct_s / (1 - reduction) - row.jct_s
