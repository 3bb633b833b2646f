"""A GPU's fused kernels written out for a CPU: what `molink.shards.kernels` must do, and who counts it."""

from collections import Counter

import torch
from torch import Tensor
from torch.nn import functional

from molink.shards.kernels.fused import Activation, FusedKernels, NormKind


class WrittenKernels:
    """`fused.LayerKernels` and `by_bytes.ByteProduct`, operation by operation."""

    def __init__(self, *, wrong: bool = False) -> None:
        """`wrong`: norms are off by a little."""
        self.calls: Counter[str] = Counter()
        self._factor = 1.1 if wrong else 1.0

    def norm(
        self, states: Tensor, added: Tensor | None, weight: Tensor, epsilon: float, kind: NormKind
    ) -> tuple[Tensor, Tensor]:
        self.calls["norm" if added is None else "norm of a sum"] += 1
        summed = states if added is None else states + added
        wide = summed.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon) * self._factor
        if kind is NormKind.ROUNDED:
            return weight * wide.to(summed.dtype), summed
        scale = weight.float() + 1 if kind is NormKind.RAISED else weight.float()
        return (wide * scale).to(summed.dtype), summed

    def gate(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        self.calls[activation.value] += 1
        silu = activation is Activation.SILU
        return (functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")) * up

    def takes(self, inputs: Tensor) -> bool:
        return inputs.numel() // inputs.shape[-1] <= 64

    def multiply(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        self.calls["bytes"] += 1
        product = functional.linear(inputs.float(), weight.float()) * scales
        return (product if bias is None else product + bias.float()).to(inputs.dtype)


class WrittenRows:
    """`row_products.RowProduct`, operation by operation: of every row that is alone."""

    def __init__(self, *, wrong: bool = False) -> None:
        """`wrong`: it is off by a little."""
        self.calls = 0
        self._factor = 1.1 if wrong else 1.0

    def takes(self, inputs: Tensor, weight: Tensor) -> bool:
        return inputs.numel() == inputs.shape[-1] and inputs.dtype is weight.dtype

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.calls += 1
        return functional.linear(inputs, weight, bias) * self._factor


def fused_here(*, wrong: bool = False) -> tuple[FusedKernels, WrittenKernels]:
    """What a CPU has in the place of a GPU's kernels, and what counts their calls."""
    written = WrittenKernels(wrong=wrong)
    return FusedKernels(written, written), written
