"""Whether systems come in the order in which the paper has them, setting by setting. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from molink.simnet.serve.paper import SYSTEM_OF
from molink.simnet.serve.presets import Preset
from molink.simnet.serve.rows import ServeRow, by_setting

METRICS = (("TTFT", "ttft_s"), ("TPOT", "tpot_s"), ("latency", "latency_s"), ("tokens/s", "throughput_tps"))
"""How they are called, and their fields."""
MORE_IS_BETTER = "throughput_tps"
OURS = "molink"


@dataclass(frozen=True, slots=True)
class Order:
    """Of one metric, over pairs of systems in a setting to which the paper prints different values."""

    metric: str
    pairs: int
    kept: int
    """Of the pairs: here, too, the one is better that is in the paper."""
    swapped: Mapping[tuple[str, str], int]
    """How often the second is better here, and the first in the paper."""


def orders(preset: Preset, rows: Sequence[ServeRow]) -> tuple[Order, ...]:
    """By metric; none without two systems of the paper. Its own system is the policy that does what the paper says,
    not ours, unless only ours ran."""
    settings = by_setting(preset, rows)
    found = []
    for metric, field in METRICS:
        swaps = [swap for one in settings for swap in _pairs(_systems(one), field)]
        if swaps:
            swapped = Counter((better, worse) for better, worse, kept in swaps if not kept)
            found.append(Order(metric, len(swaps), len(swaps) - swapped.total(), dict(swapped)))
    return tuple(found)


def _systems(rows: Sequence[ServeRow]) -> list[ServeRow]:
    """One row for each system, or, in an ablation, technique, that the paper prints in a setting."""
    printed = [row for row in rows if row.paper_ttft_s is not None]
    faithful = {SYSTEM_OF.get(row.policy) for row in printed if row.policy != OURS}
    return [row for row in printed if row.policy != OURS or SYSTEM_OF.get(OURS) not in faithful]


def _pairs(rows: Sequence[ServeRow], field: str) -> Iterator[tuple[str, str, bool]]:
    """The better in the paper, the worse, and whether they come so here."""
    sign = -1 if field == MORE_IS_BETTER else 1
    both = [
        row for row in rows if getattr(row, f"paper_{field}") is not None and getattr(row, field) is not None
    ]
    ranked = sorted(both, key=lambda row: sign * getattr(row, f"paper_{field}"))
    for better, worse in combinations(ranked, 2):
        if getattr(better, f"paper_{field}") != getattr(worse, f"paper_{field}"):
            kept = sign * getattr(better, field) < sign * getattr(worse, field)
            yield better.system, worse.system, kept
