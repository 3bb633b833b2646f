"""Products of a few rows with matrices of one byte for each number, in Triton: the bytes are read once, as they are
kept, and become numbers in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.kernels.byte_tiles import ByteTile, tile_for

_ADDED = 256
"""Numbers of the product that one program adds up."""
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class TritonBytes:
    """`by_bytes.ByteProduct` on a CUDA device."""

    def __init__(self, processors: int, shared_bytes: int) -> None:
        """As `paged_triton.TritonAttention`."""
        self._processors = processors
        self._shared_bytes = shared_bytes

    def takes(self, inputs: Tensor) -> bool:
        rows = inputs.numel() // inputs.shape[-1]
        return self._tile(rows, (1, inputs.shape[-1]), inputs) is not None

    def multiply(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        columns, numbers = weight.shape
        rows = inputs.reshape(-1, numbers)
        count = len(rows)
        tile = self._tile(count, (columns, numbers), inputs)
        if tile is None:
            raise ValueError(f"{count} rows are more than the kernel takes")
        product = rows.new_empty(count, columns)
        biases, kind = scales if bias is None else bias, _TYPES[inputs.dtype]
        sums = (
            product if tile.parts == 1 else rows.new_empty((tile.parts, count, columns), dtype=torch.float32)
        )
        _multiply[(triton.cdiv(columns, tile.columns), tile.parts)](
            rows, weight, scales, biases, sums, count, rows.stride(0), columns,
            NUMBERS=numbers, PART=tile.part_numbers(numbers), ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step,
            WHOLE=tile.parts == 1, BIASED=bias is not None, TYPE=kind, num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
        if tile.parts > 1:
            _add[(count, triton.cdiv(columns, _ADDED))](
                sums, scales, biases, product, count, columns,
                PARTS=tile.parts, ADDED=_ADDED, BIASED=bias is not None, TYPE=kind, num_warps=4,
            )  # fmt: skip
        return product.view(*inputs.shape[:-1], columns)

    def _tile(self, rows: int, shape: tuple[int, int], inputs: Tensor) -> ByteTile | None:
        return tile_for(rows, shape, self._processors, inputs.itemsize, self._shared_bytes)


@triton.jit
def _scaled(total, scales, biases, column, there, BIASED: tl.constexpr, TYPE: tl.constexpr):  # fmt: skip
    """The product's numbers, of sums [..., columns]."""
    total = total * tl.load(scales + column, mask=there, other=0.0)
    if BIASED:
        total = total + tl.load(biases + column, mask=there, other=0.0).to(tl.float32)
    return total.to(TYPE)


@triton.jit(do_not_specialize=["count"])
def _multiply(
    rows, weight, scales, biases, sums, count, row, columns,
    NUMBERS: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    WHOLE: tl.constexpr, BIASED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """All rows times some of the matrix's rows, which are the product's columns; or the sums of a part of these."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    there = column < columns
    line = tl.arange(0, ROWS)
    ours = line < count
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, PART, STEP):
        numbers = part * PART + first + tl.arange(0, STEP)
        real = numbers < NUMBERS
        left = tl.load(rows + line[:, None] * row + numbers[None], mask=ours[:, None] & real[None], other=0.0)
        right = tl.load(
            weight + column[None] * NUMBERS + numbers[:, None], mask=there[None] & real[:, None], other=0
        )
        total += tl.dot(left, right.to(TYPE), input_precision="ieee")
    mask = ours[:, None] & there[None]
    if WHOLE:
        to = sums + line[:, None] * columns + column[None]
        tl.store(to, _scaled(total, scales, biases, column, there, BIASED, TYPE), mask=mask)
    else:
        to = sums + (part * count + line[:, None]).to(tl.int64) * columns + column[None]
        tl.store(to, total, mask=mask)


@triton.jit(do_not_specialize=["count"])
def _add(
    sums, scales, biases, product, count, columns,
    PARTS: tl.constexpr, ADDED: tl.constexpr, BIASED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Some of the product's numbers of one row, from the sums of all parts."""
    line = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * ADDED + tl.arange(0, ADDED)
    there = column < columns
    total = tl.zeros([ADDED], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (part * count + line) * columns + column, mask=there, other=0.0)
    tl.store(
        product + line * columns + column,
        _scaled(total, scales, biases, column, there, BIASED, TYPE),
        mask=there,
    )
