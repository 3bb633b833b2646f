"""The communication operations of one request: how many, of what shape. Pure.

Counted as Tables III to VI of the communication-patterns paper count them. Collectives are those of one rank, of the
first stage for all-reduces (it alone has the embedding's), of a receiving stage for all-gathers, of the last for
gathers. Sends, receives and all-gathers are added up over all boundaries, for one rank of each stage.
"""

import math
from dataclasses import dataclass
from typing import Literal

from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import (
    PAPER_TENSORS_PER_BOUNDARY,
    all_gather_factor,
    all_reduce_factor,
)
from molink.shards.spec import DTYPE_BYTES, ModelSpec

Kind = Literal["Allreduce", "Allgather", "Gather", "Send", "Recv"]
Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Operation:
    """Equal operations of one phase of a request."""

    phase: Phase
    kind: Kind
    count: int
    shape: tuple[int, ...]
    """Elements of each: the tensor reduced, the whole one that an all-gather leaves, a rank's part of a gather's."""
    element_bytes: int
    factor: float
    """Bytes that a rank sends for each byte of payload."""

    @property
    def message_bytes(self) -> int:
        """Payload of one of them."""
        return math.prod(self.shape) * self.element_bytes

    @property
    def payload_bytes(self) -> int:
        """Of all of them."""
        return self.count * self.message_bytes

    @property
    def corrected_bytes(self) -> float:
        """What a rank sends in all of them."""
        return self.payload_bytes * self.factor


def operations(
    spec: ModelSpec,
    layout: Layout,
    lengths: Lengths,
    tensors_per_boundary: int = PAPER_TENSORS_PER_BOUNDARY,
) -> tuple[Operation, ...]:
    """What one request of `lengths` does under `layout`; none of what a single rank or stage does not need.

    Where stages cannot have equally many layers, all-reduces are those of the largest one. Logits of a vocabulary that
    ranks cannot share evenly are those of the largest share.
    """
    prefill = _phase(spec, layout, "prefill", lengths.prefill_tokens, 1, tensors_per_boundary)
    steps = lengths.decode_tokens - 1
    return prefill + (_phase(spec, layout, "decode", 1, steps, tensors_per_boundary) if steps else ())


def _phase(
    spec: ModelSpec, layout: Layout, phase: Phase, rows: int, steps: int, tensors_per_boundary: int
) -> tuple[Operation, ...]:
    tensor, pipeline = layout.tensor, layout.pipeline
    element_bytes = DTYPE_BYTES[spec.dtype]
    hidden = (rows, spec.hidden_size)
    crossing = tensors_per_boundary * (pipeline - 1) * steps
    found: list[Operation] = []

    def add(kind: Kind, count: int, shape: tuple[int, ...], factor: float = 1.0) -> None:
        found.append(Operation(phase, kind, count, shape, element_bytes, factor))

    if tensor > 1:
        embedding = 1
        reductions = 2 * math.ceil(spec.layers / pipeline) + embedding
        add("Allreduce", reductions * steps, hidden, all_reduce_factor(tensor))
        add("Gather", steps, (math.ceil(spec.vocabulary_size / tensor),))
    if tensor > 1 and pipeline > 1:
        add("Allgather", crossing, hidden, all_gather_factor(tensor))
    if pipeline > 1:
        part = (rows, math.ceil(spec.hidden_size / tensor))
        add("Send", crossing, part)
        add("Recv", crossing, part)
    return tuple(found)
