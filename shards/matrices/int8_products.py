"""Products of matrices of bytes with activations of two bytes, by oneDNN's integer product for processors.

Each row of activations becomes whole numbers of 16 bits, its largest one LARGEST: that is finer than bfloat16, whose
numbers have 8 bits, for all that counts in the sum, and does not depend on what the row is batched with.
Its higher and its lower bytes go through the integer product as two rows, which sums in 32 bits without rounding. The
product takes bytes that mean 128 less, and weights in a layout of its own, which oneDNN makes slowly. So of each shape
it makes the first one, and the others are made here, if the first would have been the same.
"""

import ctypes
from typing import Final

import torch
from torch import Tensor

from molink.shards.matrices.products import aligned, filled_up

LARGEST: Final = 32_512
"""127 higher bytes, and the lower one rounds to at most 255 more."""
PANEL: Final = 64
"""Rows and columns of a matrix that are packed together."""
_TOGETHER: Final = 4
"""Columns of a row whose bytes lie together."""
_CENTRE: Final = 128
_CENTRES: Final = _CENTRE * 257 - (1 << 16)
"""Both bytes' centres, as a signed number of 16 bits."""
_LEAST_STEP: Final = torch.finfo(torch.float32).tiny


class BytePacking:
    """Packs matrices [rows, columns] of int8 for the integer product, of each shape all but the first the fast way."""

    __slots__ = ("_first", "_is_exact")

    def __init__(self) -> None:
        self._first: dict[tuple[int, ...], Tensor | None] = {}
        """None: their bytes are not where they are expected."""
        self._is_exact: bool | None = None

    def takes(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Whether the product can be used for such matrices, here."""
        if dtype is not torch.bfloat16 or rows % PANEL or columns % PANEL:
            return False
        if self._is_exact is None:
            self._is_exact = _is_exact()
        return self._is_exact

    def pack(self, weight: Tensor) -> Tensor:
        """The matrix in the product's layout, as an opaque tensor of as many bytes. Only what it `takes`."""
        shape = tuple(weight.shape)
        first = self._first.get(shape)
        if first is None:
            packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
            if shape not in self._first:
                alike = torch.equal(_words(packed, *shape), _panels(weight))
                self._first[shape] = packed if alike else None
            return packed
        packed = first.clone()
        _words(packed, *shape).copy_(_panels(weight))
        memory_of(packed)[weight.numel() :].view(torch.int32).copy_(weight.sum(1, dtype=torch.int32).neg_())
        return packed

    def forget(self) -> None:
        """Frees what it has kept of each shape: no more matrices are to come."""
        self._first.clear()


def _is_exact() -> bool:
    """Whether there is such a product, and its sums are right: without the instructions for it, two products at a time
    are summed in 16 bits, which may be too few."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    weight = torch.full((PANEL, PANEL), 127, dtype=torch.int8)
    weight[::2] = -127
    try:
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        found = _sums(torch.full((2, PANEL), 255, dtype=torch.uint8), packed, torch.ones(PANEL))
        is_known = torch.equal(_words(packed, PANEL, PANEL), _panels(weight))
    except (AttributeError, RuntimeError):  # an older torch, or a processor for which oneDNN has none
        return False
    return is_known and torch.equal(found, weight.float().sum(1).mul(127).expand(2, -1))


def plain(packed: Tensor) -> Tensor:
    """The matrix as it was before it was packed."""
    columns, rows = packed.shape
    return _words(packed, rows, columns).transpose(1, 2).contiguous().view(torch.int8).view(rows, columns)


def torch_byte_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Rows [count, columns] times a matrix of bytes [out, columns] as it lies, by torch's own product, which gets
    aligned operands only; `scales` as `byte_product` has them."""
    found = (aligned(rows.contiguous()), aligned(weight), aligned(scales.to(rows.dtype)))
    product: Tensor = torch.ops.aten._weight_int8pack_mm(*found)  # noqa: SLF001 - torch's own name
    return product


def byte_product(rows: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Rows [count, columns] in bfloat16 times a packed matrix [out, columns], whose rows' steps are worth the float32
    `scales`: [count, out]."""
    wide = rows.float()
    step = wide.abs().amax(-1, keepdim=True).div_(LARGEST)
    numbers = wide.div_(step.clamp_min(_LEAST_STEP)).round_().to(torch.int16).add_(_CENTRES)
    halves = numbers.view(torch.uint8).view(*rows.shape, 2).permute(2, 0, 1).contiguous()
    count = len(rows)
    sums = _sums(filled_up(halves.view(2 * count, -1)), packed, scales)
    lower, higher = sums[:count], sums[count : 2 * count]
    return lower.add_(higher, alpha=256).mul_(step).to(rows.dtype)


def _sums(halves: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Bytes [count, columns] that mean 128 less times the matrix, in float32."""
    product = torch.ops.onednn.qlinear_pointwise.default
    centre = torch.zeros(1, dtype=torch.int32)  # of the weights
    sums: Tensor = product(
        halves, 1.0, _CENTRE, packed, scales, centre, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return sums


def _panels(weight: Tensor) -> Tensor:
    """[panels, columns / 4, PANEL] words of four neighbouring columns, those of a panel's rows one after the other."""
    rows, columns = weight.shape
    words = aligned(weight.contiguous()).view(torch.int32)
    return words.view(rows // PANEL, PANEL, columns // _TOGETHER).transpose(1, 2)


def _words(packed: Tensor, rows: int, columns: int) -> Tensor:
    """The packed matrix's own memory as such words."""
    words = memory_of(packed)[: rows * columns].view(torch.int32)
    return words.view(rows // PANEL, columns // _TOGETHER, PANEL)


def memory_of(packed: Tensor) -> Tensor:
    """The memory of an opaque tensor, for as long as it lives: the packed matrix, then what the centre makes of each
    row, in int32."""
    memory = ctypes.c_uint8 * int(torch.ops.mkldnn._nbytes(packed))  # noqa: SLF001 - torch has no public name
    return torch.frombuffer(memory.from_address(torch.ops.mkldnn.data_ptr(packed)), dtype=torch.uint8)
