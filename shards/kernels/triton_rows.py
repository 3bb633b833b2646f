"""The product of a few rows with a matrix, in Triton, by multiplying and adding: only reading the matrix takes time.

Matrix products of tensor cores have sixteen rows at least, and the libraries of cards cut what they sum up for one row
into parts that another launch adds. Here a program has a few of the matrix's rows, and its loads are on their way three
at a time. On an H200 that reads 16 to 120 MB at 3.2 to 4.3 TB/s, where cuBLAS reads 2.7 to 4.2.
"""

import triton
import triton.language as tl
from torch import Tensor

from molink.shards.paged_attention.paged_triton import TYPES

MOST_ROWS, MOST_ROWS_OF_BYTES = 8, 4
"""Each has a sum of its own in registers for all numbers of a tile. Tiles of bytes would have to be so small for more
that too few bytes are on their way."""
LEAST_BYTES, MOST_BYTES = 4 << 20, 512 << 20
"""Smaller matrices are over before it matters, and larger ones keep every library busy."""
_TILE_BYTES = 8192
"""Of the matrix, that one program reads at a time, if registers are enough."""
_TILE_SUMS, _LEAST_TILE = 8192, 2048
"""Sums of all rows for a tile, and the numbers that one has nevertheless."""
_STEP, _LONG_STEP = 512, 1024
_LONG_NUMBERS = 8192
"""Rows of bytes of this length or more are read in longer steps."""


class TritonRows:
    """`row_products.RowProduct` on a CUDA device."""

    def takes(self, inputs: Tensor, weight: Tensor) -> bool:
        return (
            inputs.numel() <= MOST_ROWS * inputs.shape[-1]
            and inputs.dtype is weight.dtype
            and inputs.dtype in TYPES
            and weight.is_contiguous()
            and LEAST_BYTES <= weight.nbytes <= MOST_BYTES
        )

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self._launch(inputs, weight, None, bias)

    def multiply_scaled(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        """As `by_bytes.ByteProduct.multiply`, of as few rows."""
        return self._launch(inputs, weight, scales, bias)

    def _launch(self, inputs: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None) -> Tensor:
        columns, numbers = weight.shape
        rows = inputs.reshape(-1, numbers)
        count = triton.next_power_of_2(len(rows))
        step = _LONG_STEP if weight.itemsize == 1 and numbers >= _LONG_NUMBERS else _STEP
        together = min(_TILE_BYTES // weight.itemsize, max(_LEAST_TILE, _TILE_SUMS // count))
        tile = max(1, together // step)
        product = inputs.new_empty(*inputs.shape[:-1], columns)
        nothing = inputs
        _multiply_rows[(triton.cdiv(columns, tile),)](
            rows, weight, nothing if scales is None else scales, nothing if bias is None else bias, product,
            len(rows), rows.stride(0), columns, numbers,
            ROWS=count, COLUMNS=tile, STEP=step, EVEN=columns % tile == 0 and numbers % step == 0,
            SCALED=scales is not None, BIASED=bias is not None, TYPE=TYPES[inputs.dtype], num_warps=4,
        )  # fmt: skip
        return product


@triton.jit(do_not_specialize=["count"])
def _multiply_rows(
    rows, weight, scales, biases, product, count, row, columns, numbers,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The rows times some of the matrix's rows, which are the product's columns. EVEN: nothing is beyond an edge."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    step = tl.arange(0, STEP)
    lefts = rows + step
    rights = weight + column[:, None] * numbers + step[None]
    totals = ()
    for _ in tl.static_range(ROWS):
        totals += (tl.zeros([COLUMNS, STEP], tl.float32),)  # type: ignore[assignment]
    for _ in tl.range(0, numbers, STEP, num_stages=3):
        inside = (step < numbers) | EVEN
        right = tl.load(rights) if EVEN else tl.load(rights, mask=there[:, None] & inside[None], other=0)
        right = right.to(TYPE).to(tl.float32)
        summed = ()
        for line in tl.static_range(ROWS):
            left = tl.load(lefts + line * row, mask=inside & (line < count), other=0.0)
            summed += (totals[line] + right * left.to(tl.float32)[None],)
        totals = summed  # type: ignore[assignment]
        lefts += STEP
        rights += STEP
        step += STEP
    for line in tl.static_range(ROWS):
        result = tl.sum(totals[line], 1)
        if SCALED:
            result = result * tl.load(scales + column, mask=there, other=0.0)
        if BIASED:
            result = result + tl.load(biases + column, mask=there, other=0.0).to(tl.float32)
        tl.store(product + line * columns + column, result.to(TYPE), mask=there & (line < count))
