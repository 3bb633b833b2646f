"""Bytes that tensor, pipeline and hybrid parallelism move for one request. Pure.

Equations (1) to (7) of the communication-patterns paper, section III, each as a function whose `Volume` says what it
counts: the paper's figures are partly of one rank and partly sums over boundaries, and only collectives are corrected
by what an algorithm sends for each byte of payload (NCCL's performance guide: 2(t-1)/t for an all-reduce, (t-1)/t for
an all-gather).

Symbols: L layers, h hidden size, v vocabulary, b bytes an element, t ranks, p stages, S_p and S_d as in `Lengths`.
"""

from dataclasses import dataclass
from enum import StrEnum

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.shards.spec import DTYPE_BYTES, ModelSpec

PAPER_TENSORS_PER_BOUNDARY = 2
"""What the engine that the paper profiled sends from stage to stage: hidden state and residual, each of h elements."""
TOKEN_BYTES = 4


class Scope(StrEnum):
    """Scope of a volume: whose bytes it counts."""

    RANK = "one rank"
    """Any one of the ranks: all of them move as much."""
    BOUNDARIES = "one rank of each stage, over all boundaries"
    MIXED = "one rank's collectives, and what crosses all boundaries"


@dataclass(frozen=True, slots=True)
class Volume:
    """Bytes of one request."""

    bytes: float
    scope: Scope
    corrected: bool
    """Whether collectives count what an algorithm sends instead of their payload."""
    equation: int | None
    """Number in the paper; None: it has none."""


def tensor_volume(spec: ModelSpec, tensor: int, lengths: Lengths) -> Volume:
    """Tensor parallelism alone, equation (1): 2L + 1 all-reduces of a hidden state for each row, corrected, the one
    besides the layers' being the embedding's; and for each token generated a gather of a rank's v/t logits, payload.

    One rank.
    """
    rows_bytes = lengths.forwarded_tokens * spec.activation_bytes
    reduced = (2 * spec.layers + 1) * rows_bytes * all_reduce_factor(tensor)
    return Volume(reduced + gather_volume(spec, tensor, lengths).bytes, Scope.RANK, True, 1)


def pipeline_volume(
    spec: ModelSpec, pipeline: int, lengths: Lengths, tensors_per_boundary: int = PAPER_TENSORS_PER_BOUNDARY
) -> Volume:
    """Pipeline parallelism alone, equation (2): tensors of h elements for each row over p - 1 boundaries.

    All boundaries, payload. The token's way back from the last stage is not in it.
    """
    sent = point_to_point_volume(spec, Layout(1, pipeline), lengths, tensors_per_boundary)
    return Volume(sent.bytes, sent.scope, sent.corrected, 2)


def hybrid_volume(
    spec: ModelSpec,
    layout: Layout,
    lengths: Lengths,
    tensors_per_boundary: int = PAPER_TENSORS_PER_BOUNDARY,
    *,
    first_stage: bool = False,
) -> Volume:
    """Tensor parallelism inside stages and a pipeline between them, equation (3): the sum of (4) to (7).

    Mixed, as printed: (4) and (6) are of one rank, (5) and (7) of one rank of each stage over all boundaries.
    `first_stage` adds the embedding's all-reduces, which only ranks of that stage have.
    """
    parts = (
        all_reduce_volume(spec, layout, lengths),
        all_gather_volume(spec, layout, lengths, tensors_per_boundary),
        gather_volume(spec, layout.tensor, lengths),
        point_to_point_volume(spec, layout, lengths, tensors_per_boundary),
    )
    total = sum(part.bytes for part in parts)
    if first_stage:
        total += embedding_volume(spec, layout.tensor, lengths).bytes
    return Volume(total, Scope.MIXED, True, 3)


def all_reduce_volume(spec: ModelSpec, layout: Layout, lengths: Lengths) -> Volume:
    """Equation (4): two all-reduces of a hidden state for each row and each of a stage's L/p layers.

    One rank of one stage, corrected, without the embedding.
    """
    rows_bytes = lengths.forwarded_tokens * spec.activation_bytes
    layers = spec.layers / layout.pipeline
    return Volume(2 * layers * rows_bytes * all_reduce_factor(layout.tensor), Scope.RANK, True, 4)


def embedding_volume(spec: ModelSpec, tensor: int, lengths: Lengths, *, as_printed: bool = False) -> Volume:
    """Returns what the first stage's ranks all-reduce besides equation (4), with an embedding divided by vocabulary.

    One rank, corrected. The text below equation (7) prints it as payload, without the factor 2(t-1)/t that (1) gives
    the same operation: that is `as_printed`. With two ranks both are equal.
    """
    payload = lengths.forwarded_tokens * spec.activation_bytes if tensor > 1 else 0
    factor = 1.0 if as_printed else all_reduce_factor(tensor)
    return Volume(payload * factor, Scope.RANK, not as_printed, None)


def all_gather_volume(
    spec: ModelSpec, layout: Layout, lengths: Lengths, tensors_per_boundary: int = PAPER_TENSORS_PER_BOUNDARY
) -> Volume:
    """Equation (5): ranks of a stage that received a t-th of each tensor gather the rest of it from each other.

    One rank of each receiving stage, over all p - 1 boundaries, corrected.
    """
    tensors = tensors_per_boundary * (layout.pipeline - 1) * lengths.forwarded_tokens
    factor = all_gather_factor(layout.tensor)
    return Volume(tensors * spec.activation_bytes * factor, Scope.BOUNDARIES, True, 5)


def gather_volume(spec: ModelSpec, tensor: int, lengths: Lengths) -> Volume:
    """Equation (6): a rank's v/t logits for each token generated.

    One rank, payload. With a single rank, for which the print leaves v, nothing is sent.
    """
    logits = lengths.decode_tokens * spec.vocabulary_size / tensor if tensor > 1 else 0.0
    return Volume(logits * DTYPE_BYTES[spec.dtype], Scope.RANK, False, 6)


def point_to_point_volume(
    spec: ModelSpec, layout: Layout, lengths: Lengths, tensors_per_boundary: int = PAPER_TENSORS_PER_BOUNDARY
) -> Volume:
    """Equation (7): each rank of a stage sends its counterpart in the next one h/t elements of each tensor.

    One rank of each sending stage, over all p - 1 boundaries, payload.
    """
    tensors = tensors_per_boundary * (layout.pipeline - 1) * lengths.forwarded_tokens
    return Volume(tensors * spec.activation_bytes / layout.tensor, Scope.BOUNDARIES, False, 7)


def all_reduce_factor(ranks: int) -> float:
    """Returns what each rank sends in a ring all-reduce for each byte of the reduced tensor."""
    return 2 * (ranks - 1) / ranks


def all_gather_factor(ranks: int) -> float:
    """Returns what each rank sends in a ring all-gather for each byte of the gathered tensor."""
    return (ranks - 1) / ranks
