"""Products with 8-bit matrices on a GPU."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from molink.shards.attention.attention import BatchSlot


class ByteProduct(Protocol):
    """Multiplies a few rows by bytes as they are kept. Neither call waits for the device."""

    def takes(self, inputs: Tensor) -> bool:
        """Whether there are so few rows in these inputs [..., columns], of a dtype that fits the card."""
        ...

    def multiply(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """Inputs [..., columns] times the transposed matrix of int8 [rows, columns], of which a step in each row is
        worth as much as float32 `scales` [rows] say; plus `bias` [rows]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class ByteProducts:
    """The product of one stage's matrices in steps that fuse."""

    slot: BatchSlot
    kernel: ByteProduct


def gpu_product(
    by_bytes: ByteProducts | None,
    inputs: Tensor,
    packed: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    bias: Tensor | None,
) -> Tensor:
    """Inputs times the matrix that is `packed` as bytes and scales: by the kernel, or, of many rows, with the bytes as
    numbers of the inputs' dtype and scaled afterwards."""
    weight, scales = packed
    if by_bytes is not None and by_bytes.slot.fuses and by_bytes.kernel.takes(inputs):
        return by_bytes.kernel.multiply(inputs, weight, scales, bias)
    if dtype is torch.float16:  # in which sums of whole numbers would overflow
        return functional.linear(inputs, weight.to(dtype).mul_(scales.unsqueeze(-1).to(dtype)), bias)
    product = functional.linear(inputs, weight.to(dtype)).mul_(scales)
    return product if bias is None else product.add_(bias)
