"""What the redundancy paper's text claims, beside the largest or smallest value of our rows. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from molink.simnet.papers.redundancy.rows import PAIR_POLICIES, PAPER_MIXED_PART, RedundancyRow

NEAR = 1 / 3
"""Of the paper's value: so far off, ours still agrees."""


@dataclass(frozen=True, slots=True)
class PaperClaim:
    """One of them."""

    policy: str
    claim: str
    paper: float
    ours: float
    instances: int | None
    """Where ours was found."""
    rate_rps: float | None
    agrees: bool


def claims(rows: Sequence[RedundancyRow]) -> list[PaperClaim]:
    """Those of the rows' workload and device, as far as the rows have the policies for them, about the paper's policy
    and then about ours in its place; at the fastest interconnect if there are several."""
    fastest = max(row.interconnect_gbps for row in rows)
    return [
        claim
        for policy in PAIR_POLICIES
        for claim in _claims_of(
            policy,
            [
                row
                for row in rows
                if row.interconnect_gbps == fastest
                and (row.policy == policy or row.policy not in PAIR_POLICIES)
            ],
        )
    ]


def _claims_of(policy: str, rows: Sequence[RedundancyRow]) -> list[PaperClaim]:
    """`rows` have that policy and those that it is compared with."""
    own = [row for row in rows if row.policy == policy]
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
            _most("TTFT, part of vLLM's, at most about", 1.0, own, lambda row: row.ttft_of_vllm),
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
    if workload == "light" and device == "h100" and policy == PAIR_POLICIES[0]:
        theirs = [row for row in rows if row.policy == "splitwise"]
        found.append(_most("Splitwise's TTFT at worst, s, nearly", 0.45, theirs, lambda row: row.ttft_s))
    found.append(_first("part of settings with the least JCT", policy, rows, lambda row: row.jct_s))
    found.append(_first("part of settings with the least TBT", policy, rows, lambda row: row.tbt_s))
    return [claim for claim in found if claim is not None]


def _most(
    name: str, paper: float, rows: Sequence[RedundancyRow], value: Callable[[RedundancyRow], float | None]
) -> PaperClaim | None:
    known = [(own, row) for row in rows if (own := value(row)) is not None]
    return _claim(name, paper, *max(known, key=lambda one: one[0])) if known else None


def _least(
    name: str, paper: float, rows: Sequence[RedundancyRow], value: Callable[[RedundancyRow], float | None]
) -> PaperClaim | None:
    known = [(own, row) for row in rows if (own := value(row)) is not None]
    return _claim(name, paper, *min(known, key=lambda one: one[0])) if known else None


def _claim(name: str, paper: float, ours: float, row: RedundancyRow) -> PaperClaim:
    return PaperClaim(
        row.policy, name, paper, ours, row.instances, row.rate_rps, abs(ours - paper) <= NEAR * paper
    )


def _first(
    name: str, policy: str, rows: Sequence[RedundancyRow], value: Callable[[RedundancyRow], float]
) -> PaperClaim | None:
    settings: dict[tuple[int, float], list[RedundancyRow]] = {}
    for row in rows:
        settings.setdefault((row.instances, row.rate_rps), []).append(row)
    compared = [
        beside
        for beside in settings.values()
        if len(beside) > 1 and any(row.policy == policy for row in beside)
    ]
    if not compared:
        return None
    ahead = sum(min(beside, key=value).policy == policy for beside in compared) / len(compared)
    return PaperClaim(policy, name, 1.0, ahead, None, None, ahead == 1.0)


def _saved_s(row: RedundancyRow, reduction: float | None) -> float | None:
    """Seconds, of a part of the other policy's JCT."""
    return None if reduction is None else row.jct_s / (1 - reduction) - row.jct_s
