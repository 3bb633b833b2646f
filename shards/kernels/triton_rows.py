"""The product of one row with a matrix, in Triton, by multiplying and adding: only reading the matrix takes time.

Matrix products of tensor cores have sixteen rows at least, and the libraries of cards cut what they sum up for one row
into parts that another launch adds. Here a program has a few of the matrix's rows, and its loads are on their way three
at a time. On an H200 that reads 16 to 120 MB at 3.2 to 4.3 TB/s, where cuBLAS reads 2.7 to 4.2. Two rows take as long
as there, more take longer: they are left to it.
"""

import triton
import triton.language as tl
from torch import Tensor

from molink.shards.paged_attention.paged_triton import TYPES

LEAST_BYTES, MOST_BYTES = 4 << 20, 512 << 20
"""Smaller matrices are over before it matters, and larger ones keep every library busy."""
_TILE_BYTES = 8192
"""Of the matrix, that one program reads at a time."""
_STEP, _LONG_STEP = 512, 1024
_LONG_NUMBERS = 8192
"""Rows of bytes of this length or more are read in longer steps."""


class TritonRows:
    """`row_products.RowProduct` on a CUDA device."""

    def takes(self, inputs: Tensor, weight: Tensor) -> bool:
        return (
            inputs.numel() == inputs.shape[-1]
            and inputs.dtype is weight.dtype
            and inputs.dtype in TYPES
            and weight.is_contiguous()
            and LEAST_BYTES <= weight.nbytes <= MOST_BYTES
        )

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._launch(inputs, weight, None, bias)

    def multiply_scaled(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """As `by_bytes.ByteProduct.multiply`, of one row."""
        return self._launch(inputs, weight, scales, bias)

    def _launch(self, inputs: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
        columns, numbers = weight.shape
        step = _LONG_STEP if weight.itemsize == 1 and numbers >= _LONG_NUMBERS else _STEP
        tile = _TILE_BYTES // (step * weight.itemsize)
        product = inputs.new_empty(*inputs.shape[:-1], columns)
        nothing = inputs
        _multiply_row[(triton.cdiv(columns, tile),)](
            inputs.reshape(-1), weight, nothing if scales is None else scales, nothing if bias is None else bias,
            product, columns, numbers,
            COLUMNS=tile, STEP=step, EVEN=columns % tile == 0 and numbers % step == 0,
            SCALED=scales is not None, BIASED=bias is not None, TYPE=TYPES[inputs.dtype], num_warps=4,
        )  # fmt: skip
        return product


@triton.jit
def _multiply_row(
    inputs, weight, scales, biases, product, columns, numbers,
    COLUMNS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """The row times some of the matrix's rows, which are the product's columns. EVEN: nothing is beyond an edge."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    step = tl.arange(0, STEP)
    lefts = inputs + step
    rights = weight + column[:, None] * numbers + step[None]
    total = tl.zeros([COLUMNS, STEP], tl.float32)
    for _ in tl.range(0, numbers, STEP, num_stages=3):
        if EVEN:
            left, right = tl.load(lefts), tl.load(rights)
        else:
            left = tl.load(lefts, mask=step < numbers, other=0.0)
            right = tl.load(rights, mask=there[:, None] & (step < numbers)[None], other=0)
        total += right.to(TYPE).to(tl.float32) * left.to(tl.float32)[None]
        lefts += STEP
        rights += STEP
        step += STEP
    result = tl.sum(total, 1)
    if SCALED:
        result = result * tl.load(scales + column, mask=there, other=0.0)
    if BIASED:
        result = result + tl.load(biases + column, mask=there, other=0.0).to(tl.float32)
    tl.store(product + column, result.to(TYPE), mask=there)
