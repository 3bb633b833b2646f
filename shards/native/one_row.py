"""Products of one row with matrices as they lie in memory, by the compiled library: which forms it takes, whether it
gives what torch gives, and the calls."""

import ctypes
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from molink.shards.native.compiling import compiled_library

LEAST_BYTES: Final = 32 * 1024**2
"""Fewer weights stay in a processor's caches: nothing is compiled for them."""
UNIT: Final = 64
"""Rows and columns of a matrix are multiples of it."""
_LEAST_ROUNDING: Final = 1e-5
_ROUNDING_UNITS: Final = 4
"""As in `fused_layers.py`."""


class Form(IntEnum):
    """How the numbers of a matrix [rows, columns] lie in memory; as in `one_row.c`."""

    FLOAT_PANELS = 0
    """[rows / 64, columns, 64]: oneDNN's own."""
    HALF_PANELS = 1
    """[rows / 64, columns / 2, 64, 2], bfloat16: oneDNN's own."""
    BYTE_PANELS = 2
    """As `int8_products` packs them."""
    NF4_PANELS = 3
    """As `nf4_products` packs them."""
    FLOAT_ROWS = 4
    """As torch keeps them."""
    HALF_ROWS = 5
    """The same in bfloat16."""


class MatrixFields(ctypes.Structure):
    """`matrix` of `one_row.c`."""

    _fields_ = (
        ("numbers", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("form", ctypes.c_int64),
    )  # fmt: skip


class OneRow:
    """The library, and the memory in which it computes, of one stage. Used from one thread."""

    __slots__ = ("_alike", "_forms", "_scratch", "library")

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds
        self.library = library
        self._forms = int(library.one_row_forms())
        self._scratch = torch.empty(0)
        self._alike: dict[tuple[object, ...], bool] = {}

    def matrix(
        self, form: Form, numbers: int, shape: tuple[int, int], scales: Tensor | None = None
    ) -> "OneRowMatrix | None":
        """The matrix whose numbers are at this address for as long as it is used; None where the library cannot
        multiply such."""
        if any(size % UNIT for size in shape) or not self._forms >> form & 1:
            return None
        fields = MatrixFields(numbers, None if scales is None else scales.data_ptr(), None, *shape, int(form))
        return OneRowMatrix(self, fields, torch.float32 if form in _FLOATS else torch.bfloat16)

    def rows_of(self, weight: Tensor) -> "OneRowMatrix | None":
        """The matrix of a linear layer as torch keeps it, if the library multiplies such as torch does."""
        form = {torch.float32: Form.FLOAT_ROWS, torch.bfloat16: Form.HALF_ROWS}.get(weight.dtype)
        if form is None or weight.is_mkldnn or not weight.is_contiguous():
            return None
        if (form,) not in self._alike:
            small = torch.arange(UNIT * 2 * UNIT).sin().view(UNIT, 2 * UNIT).to(weight.dtype)
            tried = self.matrix(form, small.data_ptr(), (UNIT, 2 * UNIT))
            self._alike[form,] = tried is not None and tried.gives(lambda row: functional.linear(row, small))
        return (
            self.matrix(form, weight.data_ptr(), (weight.shape[0], weight.shape[1]))
            if self._alike[form,]
            else None
        )

    def alike(
        self, matrix: "OneRowMatrix | None", reference: Callable[[Tensor], Tensor]
    ) -> "OneRowMatrix | None":
        """The matrix if the first one of its form and shape gives what `reference` gives of a row: how oneDNN packs
        weights is its own affair."""
        if matrix is None:
            return None
        kind = (matrix.fields.form, matrix.fields.rows, matrix.fields.columns)
        if kind not in self._alike:
            self._alike[kind] = matrix.gives(reference)
        return matrix if self._alike[kind] else None

    def scratch(self, most: int, threads: int) -> int:
        """Address of memory for inputs of so many numbers, for each thread."""
        needed = threads * int(self.library.one_row_scratch(most))
        if self._scratch.numel() < needed:
            with torch.inference_mode(mode=False):
                self._scratch = torch.empty(needed)
        return self._scratch.data_ptr()


def one_row_for(weights: Iterable[Tensor], folder: Path | None) -> OneRow | None:
    """For a stage of these weights on a processor; the library is kept in `folder`, or compiled and kept there."""
    library = compiled_library(folder) if sum(one.nbytes for one in weights) >= LEAST_BYTES else None
    return None if library is None else OneRow(library)


class OneRowMatrix:
    """A matrix that is multiplied by one row. It does not keep the memory of its numbers alive: whoever does, drops it
    with them."""

    __slots__ = ("_address", "_owner", "dtype", "fields")

    def __init__(self, owner: OneRow, fields: MatrixFields, dtype: torch.dtype) -> None:
        self._owner = owner
        self.fields = fields
        self._address = ctypes.addressof(fields)
        self.dtype = dtype

    def product(self, row: Tensor) -> Tensor:
        """[..., columns] with one row, in `dtype`, times the transposed matrix: [..., rows]."""
        row = row.contiguous()
        result = row.new_empty(*row.shape[:-1], self.fields.rows)
        threads, owner = torch.get_num_threads(), self._owner
        scratch = owner.scratch(self.fields.columns, threads)
        halves = self.dtype is torch.bfloat16
        owner.library.one_row_product(
            self._address, row.data_ptr(), halves, result.data_ptr(), scratch, threads
        )
        return result

    def takes(self, rows: Tensor) -> bool:
        """Whether these are one row, in its dtype."""
        return rows.numel() == self.fields.columns and rows.dtype is self.dtype

    def gives(self, reference: Callable[[Tensor], Tensor]) -> bool:
        """Whether its product is that of `reference`, up to rounding."""
        with torch.inference_mode():
            row = torch.arange(1.0, self.fields.columns + 1).sin().to(self.dtype)[None]
            expected, found = reference(row).float(), self.product(row).float()
        most = max(_LEAST_ROUNDING, _ROUNDING_UNITS * torch.finfo(self.dtype).eps)
        return float((found - expected).norm()) <= most * float(expected.norm())


_FLOATS: Final = (Form.FLOAT_PANELS, Form.FLOAT_ROWS)
_ADDRESS: Final = ctypes.c_void_p
_COUNT: Final = ctypes.c_int64
_ARGUMENTS: Final = {
    "one_row_forms": ((), _COUNT),
    "one_row_scratch": ((_COUNT,), _COUNT),
    "one_row_product": ((_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT), None),
    "one_row_layer": (
        (*(_ADDRESS,) * 4, _COUNT, *(_ADDRESS,) * 3, _COUNT, _COUNT),
        None,
    ),
}
