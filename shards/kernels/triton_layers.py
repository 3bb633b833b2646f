"""Normalization and gates of transformer layers in Triton, one launch each.

Each rounds where the architecture's own operations round, in the same order, and does not contract products and sums,
so that results are the same bit for bit but for the order of a norm's sum and the last bits of an exponential.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.kernels.fused import Activation, NormKind

_GATE_BLOCK = 1024
_WIDE = 2048
"""From so many numbers on a row is looked at by eight warps."""


class TritonLayers:
    """`fused.LayerKernels` on a CUDA device."""

    def norm(
        self, states: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, kind: NormKind
    ) -> tuple[Tensor, Tensor]:
        dim = states.shape[-1]
        rows = states.reshape(-1, dim)
        others = rows if added is None else added.reshape(-1, dim)
        normed = torch.empty_like(rows)
        summed = rows if added is None else torch.empty_like(rows)
        _norm[(len(rows),)](
            rows, others, weight, summed, normed, rows.stride(0), others.stride(0), epsilon,
            DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), ADDS=added is not None, KIND=kind.value,
            num_warps=8 if dim >= _WIDE else 4 if dim > _WIDE // 4 else 1, enable_fp_fusion=False,
        )  # fmt: skip
        return normed.view(states.shape), states if added is None else summed.view(states.shape)

    def gate(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        dim = gate.shape[-1]
        gates, ups = gate.reshape(-1, dim), up.reshape(-1, dim)
        gated = gate.new_empty(gates.shape)
        _gate[(len(gates), triton.cdiv(dim, _GATE_BLOCK))](
            gates, ups, gated, gates.stride(0), ups.stride(0),
            DIM=dim, ACTIVATION=activation.value, NUMBERS=_GATE_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
        return gated.view(gate.shape)


@triton.jit
def _norm(
    states, added, weight, summed, normed, row, added_row, epsilon,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """One row: where it ADDS, states + added, and of that, or of the states, the root-mean-square norm."""
    at = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    real = dims < DIM
    one = tl.load(states + at * row + dims, mask=real, other=0.0)
    TYPE: tl.constexpr = one.dtype
    if ADDS:
        other = tl.load(added + at * added_row + dims, mask=real, other=0.0)
        one = (one.to(tl.float32) + other.to(tl.float32)).to(TYPE)
        tl.store(summed + at * DIM + dims, one, mask=real)
    wide = one.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, 0) / DIM + epsilon)
    weights = tl.load(weight + dims, mask=real, other=0.0).to(tl.float32)
    if KIND == "rounded":
        result = weights * scaled.to(TYPE).to(tl.float32)
    elif KIND == "whole":
        result = weights * scaled
    else:
        result = scaled * (1.0 + weights)
    tl.store(normed + at * DIM + dims, result.to(TYPE), mask=real)


@triton.jit
def _gate(
    gates, ups, gated, gate_row, up_row, DIM: tl.constexpr, ACTIVATION: tl.constexpr, NUMBERS: tl.constexpr
):  # fmt: skip
    """A part of one row: the activation of the gate times the other."""
    at = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    real = dims < DIM
    gate = tl.load(gates + at * gate_row + dims, mask=real, other=0.0)
    TYPE: tl.constexpr = gate.dtype
    wide = gate.to(tl.float32)
    if ACTIVATION == "silu":
        active = wide / (1.0 + tl.exp(-wide))
    else:
        active = wide * tl.sigmoid(2.0 * 0.7978845608028654 * (wide + 0.044715 * (wide * wide * wide)))
    up = tl.load(ups + at * up_row + dims, mask=real, other=0.0).to(tl.float32)
    tl.store(gated + at * DIM + dims, (active.to(TYPE).to(tl.float32) * up).to(TYPE), mask=real)
