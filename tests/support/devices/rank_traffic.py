"""What our own ranks of one peer move, as equations (4) and (6) count it.

The embedding is whole on every rank, so that equation (4) holds without its extra term. Hidden states go through pipes
between the peer and its ranks: a copy of what comes in to each, what goes out from one. Of logits nothing does: the
first rank draws from what it gathers of the others.
"""

from dataclasses import dataclass

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import all_reduce_factor, all_reduce_volume
from molink.shards.spec import ModelSpec, Span

REDUCTIONS_PER_LAYER = 2
"""After attention and after the MLP or its experts."""


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """Bytes of some steps."""

    reduced_bytes: float
    """Sent by one rank in all-reduces, corrected. All ranks together: times their number."""
    pipe_bytes: float
    """Payload of the pipes of all ranks, both ways."""


def step_traffic(spec: ModelSpec, span: Span, ranks: int, rows: int) -> RankTraffic:
    """One step of `rows` tokens through `span`."""
    rows_bytes = rows * spec.activation_bytes
    reduced = REDUCTIONS_PER_LAYER * len(span) * rows_bytes * all_reduce_factor(ranks)
    into = ranks * rows_bytes if span.start > 0 else 0
    out = 0 if span.stop == spec.layers else rows_bytes
    return RankTraffic(reduced, into + out)


def request_traffic(spec: ModelSpec, ranks: int, lengths: Lengths) -> RankTraffic:
    """One request through the whole model: equation (4) with one stage."""
    return RankTraffic(all_reduce_volume(spec, Layout(tensor=ranks), lengths).bytes, 0)
