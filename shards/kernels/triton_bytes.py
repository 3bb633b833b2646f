"""Products of a few rows with matrices of one byte for each number, in Triton: the bytes are read once, as they are
kept, and become numbers in registers.

Where a row of the matrix is cut in parts, the last program that has summed up one adds all of them: one launch fewer.
They are added in their order, so that results do not depend on which was last.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.kernels.byte_tiles import PROGRAMS, ByteTile, tile_for
from molink.shards.kernels.triton_rows import TritonRows
from molink.shards.paged_attention.paged_triton import TYPES


class TritonBytes:
    """`by_bytes.ByteProduct` on a CUDA device. Used from one thread."""

    def __init__(self, processors: int, shared_bytes: int, device: torch.device | str = "cpu") -> None:
        """As `paged_triton.TritonAttention`."""
        self._processors = processors
        self._shared_bytes = shared_bytes
        self._rows = TritonRows()
        self._arrived = torch.zeros(PROGRAMS * processors, dtype=torch.int32, device=device)
        """Of each tile of the product, how many of its parts have been summed up; 0 between two launches."""

    def takes(self, inputs: Tensor) -> bool:
        rows = inputs.numel() // inputs.shape[-1]
        return self._tile(rows, (1, inputs.shape[-1]), inputs) is not None

    def multiply(self, inputs: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
        columns, numbers = weight.shape
        rows = inputs.reshape(-1, numbers)
        count = len(rows)
        if count == 1:
            return self._rows.multiply_scaled(inputs, weight, scales, bias)
        tile = self._tile(count, (columns, numbers), inputs)
        if tile is None:
            raise ValueError(f"{count} rows are more than the kernel takes")
        product = rows.new_empty(count, columns)
        sums = rows.new_empty((tile.parts, count, columns) if tile.parts > 1 else 1, dtype=torch.float32)
        part = tile.part_numbers(numbers)
        _multiply[(triton.cdiv(columns, tile.columns), tile.parts)](
            rows, weight, scales, scales if bias is None else bias, product, sums, self._arrived,
            count, rows.stride(0), columns, numbers, part,
            ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step, PARTS=tile.parts,
            EVEN=columns % tile.columns == 0 and part * tile.parts == numbers,
            BIASED=bias is not None, TYPE=TYPES[inputs.dtype], num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
        return product.view(*inputs.shape[:-1], columns)

    def _tile(self, rows: int, shape: tuple[int, int], inputs: Tensor) -> ByteTile | None:
        return tile_for(rows, shape, self._processors, inputs.itemsize, self._shared_bytes)


@triton.jit(do_not_specialize=["count"])
def _multiply(
    rows, weight, scales, biases, product, sums, arrived, count, row, columns, numbers, part_numbers,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, PARTS: tl.constexpr, EVEN: tl.constexpr,
    BIASED: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """All rows times some of the matrix's rows, which are the product's columns, or a part of them. EVEN: nothing is
    beyond an edge."""
    tile, part = tl.program_id(0), tl.program_id(1)
    column = tile.to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    there = column < columns
    line = tl.arange(0, ROWS)
    ours = line < count
    step = part * part_numbers + tl.arange(0, STEP)
    lefts = rows + line[:, None] * row + step[None]
    rights = weight + column[None] * numbers + step[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for _ in range(0, part_numbers, STEP):
        if EVEN:
            left = tl.load(lefts, mask=ours[:, None], other=0.0)
            right = tl.load(rights)
        else:
            left = tl.load(lefts, mask=ours[:, None] & (step < numbers)[None], other=0.0)
            right = tl.load(rights, mask=there[None] & (step < numbers)[:, None], other=0)
        total += tl.dot(left, right.to(TYPE), input_precision="ieee")
        lefts += STEP
        rights += STEP
        step += STEP
    mask = ours[:, None] & there[None]
    at = line[:, None].to(tl.int64) * columns + column[None]
    is_last = True
    if PARTS > 1:
        tl.store(sums + part.to(tl.int64) * count * columns + at, total, mask=mask)
        tl.debug_barrier()  # all of the program's numbers are there before it says so
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == PARTS - 1
        if is_last:
            total = tl.zeros([ROWS, COLUMNS], tl.float32)
            for other in tl.static_range(PARTS):
                there_too = sums + other * count * columns + at
                total += tl.load(there_too, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
    if is_last:
        total = total * tl.load(scales + column, mask=there, other=0.0)
        if BIASED:
            total = total + tl.load(biases + column, mask=there, other=0.0).to(tl.float32)
        tl.store(product + at, total.to(TYPE), mask=mask)
