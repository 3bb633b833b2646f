"""Products of a few rows with matrices of one byte for each number, in Triton: the bytes are read once, as they are
kept, and become numbers in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.kernels.byte_tiles import tile_for

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class TritonBytes:
    """`by_bytes.ByteProduct` on a CUDA device."""

    def __init__(self, processors: int, shared_bytes: int) -> None:
        """As `paged_triton.TritonAttention`."""
        self._processors = processors
        self._shared_bytes = shared_bytes

    def takes(self, inputs: Tensor) -> bool:
        rows = inputs.numel() // inputs.shape[-1]
        return tile_for(rows, 1, self._processors, inputs.itemsize, self._shared_bytes) is not None

    def multiply(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        columns, numbers = weight.shape
        rows = inputs.reshape(-1, numbers)
        tile = tile_for(len(rows), columns, self._processors, inputs.itemsize, self._shared_bytes)
        if tile is None:
            raise ValueError(f"{len(rows)} rows are more than the kernel takes")
        product = rows.new_empty(len(rows), columns)
        _multiply[(triton.cdiv(columns, tile.columns),)](
            rows, weight, scales, scales if bias is None else bias, product, len(rows), rows.stride(0), columns,
            NUMBERS=numbers, ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step, BIASED=bias is not None,
            TYPE=_TYPES[inputs.dtype], num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
        return product.view(*inputs.shape[:-1], columns)


@triton.jit(do_not_specialize=["count"])
def _multiply(
    rows, weight, scales, biases, product, count, row, columns,
    NUMBERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, BIASED: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """All rows times some of the matrix's rows, which are the product's columns."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    line = tl.arange(0, ROWS)
    ours = line < count
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, NUMBERS, STEP):
        numbers = first + tl.arange(0, STEP)
        real = numbers < NUMBERS
        left = tl.load(rows + line[:, None] * row + numbers[None], mask=ours[:, None] & real[None], other=0.0)
        right = tl.load(
            weight + column[None] * NUMBERS + numbers[:, None], mask=there[None] & real[:, None], other=0
        )
        total += tl.dot(left, right.to(TYPE), input_precision="ieee")
    total = total * tl.load(scales + column, mask=there, other=0.0)[None]
    if BIASED:
        total = total + tl.load(biases + column, mask=there, other=0.0).to(tl.float32)[None]
    to = product + line[:, None] * columns + column[None]
    tl.store(to, total.to(TYPE), mask=ours[:, None] & there[None])
