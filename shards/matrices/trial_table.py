"""Table by which the trial runs each native way (`molink.shards.native.trial`): on a matrix of random numbers that
begins where the served one does, modulo 64 bytes, and ends as close to the end of its memory as it can."""

import mmap
import time
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from molink.shards.codec import dtype_of
from molink.shards.matrices import nf4_products
from molink.shards.matrices.int8_products import BytePacking, byte_product, memory_of, torch_byte_product
from molink.shards.matrices.products import (
    ALIGNED_BYTES,
    divided_product,
    has_onednn,
    onednn_product,
    packed_for_onednn,
    packed_product,
)
from molink.shards.native.compiling import kept_library, user_folder
from molink.shards.native.few_rows import FewRows, FewRowsMatrix, Form
from molink.shards.native.native_way import NativeWay, TrialJob
from molink.shards.native.trial import Attempt, Products

MOST_WEIGHTS: Final = 1 << 25
"""Of a larger matrix the first rows are tried: products go through them block by block."""
COMPARED: Final = 256
"""Outputs that are compared with float64, evenly over all of them."""
_PERIOD: Final = (1 << 20) - 3
"""Numbers that are drawn, and then repeated: an odd count, so that rows of a matrix differ."""

Multiply = Callable[[Tensor], Tensor | None]
"""Rows [count, columns] to [count, rows of the matrix]; None: it does not take so many."""


class _Matrix:
    """A matrix as it is kept, and what its numbers are."""

    def __init__(self, job: TrialJob) -> None:
        self.dtype = dtype_of(job.dtype)
        self.columns = job.columns
        self.rows = min(job.rows, max(64, MOST_WEIGHTS // job.columns // 64 * 64))
        self.compared = torch.arange(0, self.rows, max(1, self.rows // COMPARED) | 1)
        numbers = self.rows * self.columns
        if job.form == "none":
            self.weight = _filled(numbers, self.dtype, job.offset).view(self.rows, -1)
            self.nearest = self.weight[self.compared].clone()
            self.exact = self.nearest.double()
            return
        scales = numbers // nf4_products.BLOCK if job.form == "nf4" else self.rows
        self.scales = _filled(scales, torch.float32, job.offset).abs_().add_(0.1)
        if job.form == "int8":
            self.weight = _filled(numbers, torch.int8, job.offset).view(self.rows, -1)
            self.exact = self.weight[self.compared].double() * self.scales[self.compared].double().unsqueeze(
                -1
            )
        else:
            self.weight = _filled(numbers // 2, torch.uint8, job.offset)
            scales_there = self.scales.view(self.rows, -1)[self.compared]
            packed = self.weight.view(self.rows, -1)[self.compared]
            found = torch.empty(len(self.compared), self.columns)
            self.exact = nf4_products.torch_unpack_into(found, packed, scales_there).double()
        self.nearest = self.exact.to(self.dtype)

    def attempt(self, multiply: Multiply) -> tuple[Attempt, int]:
        def attempt(count: int) -> Products | None:
            inputs = _drawn(count * self.columns).to(self.dtype).view(count, -1)
            found, taken_s = timed(multiply, inputs)
            if found is None:
                return None
            plain = (inputs.float() @ self.nearest.float().t()).to(self.dtype)
            return Products(
                found[:, self.compared], plain, inputs.double() @ self.exact.t(), self.columns, taken_s
            )

        return attempt, self.weight.nbytes


def timed(multiply: Multiply, rows: Tensor) -> tuple[Tensor | None, float]:
    """A product and the seconds that it took; one row is multiplied once more, for the first call may set up much."""
    if len(rows) == 1:
        multiply(rows)
    began_s = time.perf_counter()
    result = multiply(rows)
    return result, time.perf_counter() - began_s


def _drawn(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(count, generator=generator)


def _filled(count: int, dtype: torch.dtype, offset: int) -> Tensor:
    """So many random numbers in memory that begins `offset` bytes behind a multiple of ALIGNED_BYTES, as far as they
    can, and ends less than ALIGNED_BYTES before the end of its mapping."""
    offset -= offset % dtype.itemsize
    nbytes = count * dtype.itemsize
    size = -(-(nbytes + ALIGNED_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE
    last = size - nbytes
    start = last - (last - offset) % ALIGNED_BYTES
    room = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    numbers = room[start : start + nbytes].view(dtype)
    drawn = _drawn(min(count, _PERIOD))
    drawn = (
        drawn.to(dtype)
        if dtype.is_floating_point
        else drawn.mul_(40).clamp_(-127, 127).to(torch.int8).view(dtype)
    )
    for begin in range(0, count, len(drawn)):
        part = numbers[begin : begin + len(drawn)]
        part.copy_(drawn[: len(part)])
    return numbers


def _way(make: Callable[[_Matrix], Multiply]) -> Callable[[TrialJob], tuple[Attempt, int]]:
    def trial(job: TrialJob) -> tuple[Attempt, int]:
        matrix = _Matrix(job)
        return matrix.attempt(make(matrix))

    return trial


def _refuses(_: Tensor) -> None:
    """There is no such way here."""


def _linear(matrix: _Matrix) -> Multiply:
    return lambda rows: functional.linear(rows, matrix.weight)


def _onednn(matrix: _Matrix) -> Multiply:
    return (lambda rows: onednn_product(rows, matrix.weight)) if has_onednn() else _refuses


def _divided(matrix: _Matrix) -> Multiply:
    return lambda rows: divided_product(rows, matrix.weight, None)


def _packed(matrix: _Matrix) -> Multiply:
    packed = packed_for_onednn(matrix.weight)
    return _refuses if packed is None else lambda rows: packed_product(rows, packed)


def _torch_bytes(matrix: _Matrix) -> Multiply:
    return lambda rows: torch_byte_product(rows, matrix.weight, matrix.scales)


def _onednn_bytes(matrix: _Matrix) -> Multiply:
    packing = BytePacking()
    if not packing.takes(matrix.rows, matrix.columns, matrix.dtype):
        return _refuses
    packed = packing.pack(matrix.weight)
    return lambda rows: byte_product(rows, packed, matrix.scales)


def _unpacked(matrix: _Matrix) -> Multiply:
    nf4_products.import_library()

    def multiply(rows: Tensor) -> Tensor:
        values = torch.empty(matrix.rows, matrix.columns, dtype=matrix.dtype)
        nf4_products.unpack_into(values, matrix.weight, matrix.scales)
        found = rows.new_zeros(len(rows), matrix.rows)
        found[:, matrix.compared] = (rows.float() @ values[matrix.compared].float().t()).to(rows.dtype)
        return found

    return multiply


def _nf4_product(matrix: _Matrix) -> Multiply:
    rows, columns = matrix.rows, matrix.columns
    if not nf4_products.kernel_takes(rows, columns, matrix.dtype):
        return _refuses
    panels, scales = nf4_products.panels_of(matrix.weight, matrix.scales, rows, columns)
    return lambda inputs: nf4_products.kernel_product(inputs, panels, scales, rows)


def _compiled(matrix: _Matrix) -> Multiply:
    """Tries the forms in which the library may find it, one after the other: a row's product has those of all."""
    library = kept_library(user_folder())
    if library is None:
        raise RuntimeError("the compiled library is not there")
    few_rows, kept = FewRows(library), list[object]()
    found = [one for one in _forms(matrix, few_rows, kept) if one is not None]

    def multiply(rows: Tensor) -> Tensor | None:
        taking = [one for one in found if one.takes(rows)]
        products = [one.product(rows) for one in taking]
        if not kept or not products:
            return None
        furthest = products[0]
        for other in products[1:]:  # the form that is furthest from the first one counts
            differs = (other - products[0]).abs() > (furthest - products[0]).abs()
            furthest = torch.where(differs, other, furthest)
        return furthest

    return multiply


def _forms(matrix: _Matrix, few_rows: FewRows, kept: list[object]) -> list[FewRowsMatrix | None]:
    """Facts as `linear._describe` and `quantized_products._describe` find them; `kept` holds their memory."""
    shape = (matrix.rows, matrix.columns)
    kept.append(matrix)
    if not hasattr(matrix, "scales"):
        packed = packed_for_onednn(matrix.weight)
        found = [few_rows.rows_of(matrix.weight)]
        if packed is not None and memory_of(packed).nbytes == packed.numel() * packed.itemsize:
            form = Form.FLOAT_PANELS if matrix.dtype is torch.float32 else Form.HALF_PANELS
            kept.append(packed)
            panels = few_rows.matrix(form, memory_of(packed).data_ptr(), shape)
            found.append(few_rows.alike(panels, lambda rows: packed_product(rows, packed)))
        return found
    if matrix.weight.dtype is torch.int8:
        packing = BytePacking()
        if not packing.takes(*shape, matrix.dtype):
            return []
        words = packing.pack(matrix.weight)
        kept.append(words)
        return [few_rows.matrix(Form.BYTE_PANELS, memory_of(words).data_ptr(), shape, matrix.scales)]
    if not nf4_products.kernel_takes(*shape, matrix.dtype):
        return []
    halves, scales = nf4_products.panels_of(matrix.weight, matrix.scales, *shape)
    kept += [halves, scales]
    return [few_rows.matrix(Form.NF4_PANELS, halves.data_ptr(), shape, scales)]


def _attention(job: TrialJob) -> tuple[Attempt, int]:
    """Attention of queries on their own keys, each on those up to its own, and of the same on all of them."""
    heads, dim, dtype = job.rows, job.columns, dtype_of(job.dtype)

    def attempt(count: int) -> Products:
        drawn = [_drawn(heads * count * dim * part).to(dtype) for part in (1, 2, 3)]
        query, key, value = (one[: heads * count * dim].view(1, heads, count, dim) for one in drawn)
        began_s = time.perf_counter()
        found = _fused(query, key, value)
        taken_s = time.perf_counter() - began_s
        plain = _written(query.float(), key.float(), value.float()).to(dtype)
        exact = _written(query.double(), key.double(), value.double())
        return Products(found, plain, exact, dim + count, taken_s)

    return attempt, heads * dim * dtype_of(job.dtype).itemsize


def _fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001 - as `attention.py`
    both = [flash(query, key, value, 0.0, causal)[0] for causal in (True, False)]
    return torch.cat(both).flatten(0, 2)


def _written(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.transpose(2, 3) * query.shape[3] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
    both = [functional.softmax(each, -1) @ value for each in (scores.masked_fill(later, -torch.inf), scores)]
    return torch.cat(both).flatten(0, 2)


WAYS: Final = {
    NativeWay.LINEAR: _way(_linear),
    NativeWay.ONEDNN: _way(_onednn),
    NativeWay.DIVIDED: _way(_divided),
    NativeWay.ONEDNN_PACKED: _way(_packed),
    NativeWay.TORCH_BYTES: _way(_torch_bytes),
    NativeWay.ONEDNN_BYTES: _way(_onednn_bytes),
    NativeWay.BITSANDBYTES: _way(_unpacked),
    NativeWay.BITSANDBYTES_PRODUCT: _way(_nf4_product),
    NativeWay.COMPILED: _way(_compiled),
    NativeWay.ATTENTION: _attention,
}
