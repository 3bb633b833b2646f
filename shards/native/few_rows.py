"""Products of few rows with matrices as they lie in memory, by the compiled library: which forms it takes, whether it
gives what torch gives, and the calls."""

import ctypes
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from molink.shards.native.compiling import compiled_library, kept_library, user_folder

LEAST_BYTES: Final = 32 * 1024**2
"""Fewer weights stay in a processor's caches and are ready in a moment: their loading does not wait for a compiler."""
UNIT: Final = 64
"""Rows and columns of a matrix are multiples of it."""
_TRIED_ROWS: Final = (1, 7)
"""Lines of a matrix go through it six, four, two or one at a time."""
_LEAST_ROUNDING: Final = 1e-5
_ROUNDING_UNITS: Final = 4
"""As in `fused_layers.py`."""

Describe: TypeAlias = Callable[[Any], None]
"""Of a module that has a matrix."""


class Form(IntEnum):
    """How the numbers of a matrix [rows, columns] lie in memory; as in `few_rows.c`."""

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
    """`matrix` of `few_rows.c`."""

    _fields_ = (
        ("numbers", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("bias", ctypes.c_void_p),
        ("rows", ctypes.c_int64), ("columns", ctypes.c_int64), ("form", ctypes.c_int64),
    )  # fmt: skip


class FewRows:
    """The library, and the memory in which it computes, of one stage; the library may come later. Used from one
    thread."""

    __slots__ = ("_alike", "_declined", "_forms", "_library", "_scratch", "_waiting", "most_rows")

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self._library: ctypes.CDLL | None = None
        self._declined = False
        self._forms = self.most_rows = 0
        """So many rows it takes at once: one where a processor's registers hold no more."""
        self._scratch = torch.empty(0)
        self._alike: dict[tuple[object, ...], bool] = {}
        self._waiting: list[tuple[weakref.ref[nn.Module], Describe]] = []
        if library is not None:
            self.bind(library)

    @property
    def is_bound(self) -> bool:
        """Whether the library is there."""
        return self._library is not None

    @property
    def is_awaited(self) -> bool:
        """Whether it is not, and there are matrices for it."""
        return any(module() is not None for module, _ in self._waiting)

    @property
    def library(self) -> ctypes.CDLL:
        """Raises RuntimeError where it is not there."""
        if self._library is None:
            raise RuntimeError("the compiled library is not there")
        return self._library

    def bind(self, library: ctypes.CDLL) -> None:
        """The library is there; matrices that have waited for it are described. Not while a step is under way."""
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = kinds
        self._library = library
        self._forms = int(library.few_rows_forms())
        self.most_rows = int(library.few_rows_most())
        waiting, self._waiting = self._waiting, []
        for found, describe in waiting:
            module = found()
            if module is not None:
                describe(module)

    def decline(self) -> None:
        """Neither waits for a library nor takes one any more: this machine does without."""
        self._library, self._forms, self.most_rows = None, 0, 0
        self._waiting, self._declined = [], True

    def describe(self, module: nn.Module, describe: "Describe") -> None:
        """Has `describe` note of the module what the library needs to know of its matrix: now, or when the library has
        come."""
        if self.is_bound:
            describe(module)
        elif not self._declined:
            self._waiting.append((weakref.ref(module), describe))

    @staticmethod
    def has_shape(weight: Tensor) -> bool:
        """Whether matrices of such a shape can be multiplied at all."""
        return not any(size % UNIT for size in weight.shape)

    def matrix(
        self, form: Form, numbers: int, shape: tuple[int, int], scales: Tensor | None = None
    ) -> "FewRowsMatrix | None":
        """The matrix whose numbers are at this address for as long as it is used; None where the library cannot
        multiply such."""
        if any(size % UNIT for size in shape) or not self._forms >> form & 1:
            return None
        fields = MatrixFields(numbers, None if scales is None else scales.data_ptr(), None, *shape, int(form))
        return FewRowsMatrix(self, fields, torch.float32 if form in _FLOATS else torch.bfloat16)

    def rows_of(self, weight: Tensor) -> "FewRowsMatrix | None":
        """The matrix of a linear layer as torch keeps it, if the library multiplies such as torch does."""
        form = {torch.float32: Form.FLOAT_ROWS, torch.bfloat16: Form.HALF_ROWS}.get(weight.dtype)
        if form is None or weight.is_mkldnn or not weight.is_contiguous():
            return None
        if (form,) not in self._alike:
            small = torch.arange(UNIT * 2 * UNIT).sin().view(UNIT, 2 * UNIT).to(weight.dtype)
            tried = self.matrix(form, small.data_ptr(), (UNIT, 2 * UNIT))
            self._alike[form,] = tried is not None and tried.gives(
                lambda rows: functional.linear(rows, small)
            )
        return (
            self.matrix(form, weight.data_ptr(), (weight.shape[0], weight.shape[1]))
            if self._alike[form,]
            else None
        )

    def alike(
        self, matrix: "FewRowsMatrix | None", reference: Callable[[Tensor], Tensor]
    ) -> "FewRowsMatrix | None":
        """The matrix if the first one of its form and shape gives what `reference` gives of one row and of
        several: how oneDNN packs weights is its own affair."""
        if matrix is None:
            return None
        kind = (matrix.fields.form, matrix.fields.rows, matrix.fields.columns)
        if kind not in self._alike:
            self._alike[kind] = matrix.gives(reference)
        return matrix if self._alike[kind] else None

    def scratch(self, most: int, parts: int) -> int:
        """Address of memory for so many inputs of so many numbers: one for each thread or row, whatever there are more
        of."""
        needed = parts * int(self.library.few_rows_scratch(most))
        if self._scratch.numel() < needed:
            with torch.inference_mode(mode=False):
                self._scratch = torch.empty(needed)
        return self._scratch.data_ptr()


def few_rows_for(weights: Iterable[Tensor]) -> FewRows:
    """For a stage of these weights on a processor, with the library if it is kept; for many weights it is compiled
    first."""
    is_large = sum(one.nbytes for one in weights) >= LEAST_BYTES
    return FewRows((compiled_library if is_large else kept_library)(user_folder()))


class FewRowsMatrix:
    """A matrix that is multiplied by few rows. It does not keep the memory of its numbers alive: whoever does, drops it
    with them."""

    __slots__ = ("_address", "_owner", "dtype", "fields")

    def __init__(self, owner: FewRows, fields: MatrixFields, dtype: torch.dtype) -> None:
        self._owner = owner
        self.fields = fields
        self._address = ctypes.addressof(fields)
        self.dtype = dtype

    def product(self, rows: Tensor) -> Tensor:
        """[..., columns] with few rows, in `dtype`, times the transposed matrix: [..., rows of the matrix]."""
        rows = rows.contiguous()
        result = rows.new_empty(*rows.shape[:-1], self.fields.rows)
        threads, owner, count = torch.get_num_threads(), self._owner, rows.numel() // self.fields.columns
        scratch = owner.scratch(self.fields.columns, max(threads, count))
        halves = self.dtype is torch.bfloat16
        owner.library.few_rows_product(
            self._address, count, rows.data_ptr(), halves, result.data_ptr(), scratch, threads
        )
        return result

    @property
    def most_rows(self) -> int:
        """So many rows it is multiplied by at once."""
        return min(self._owner.most_rows, _MOST_ROWS.get(self.fields.form, self._owner.most_rows))

    def takes(self, rows: Tensor) -> bool:
        """Whether these are so few rows, in its dtype."""
        return 0 < rows.numel() <= self.most_rows * self.fields.columns and rows.dtype is self.dtype

    def gives(self, reference: Callable[[Tensor], Tensor]) -> bool:
        """Whether its products are those of `reference`, up to rounding."""
        most = max(_LEAST_ROUNDING, _ROUNDING_UNITS * torch.finfo(self.dtype).eps)
        with torch.inference_mode():
            for count in _TRIED_ROWS:
                numbers = torch.arange(1.0, count * self.fields.columns + 1)
                rows = numbers.sin().to(self.dtype).view(count, -1)
                if not self.takes(rows):
                    continue
                expected = reference(rows).float()
                differences = (self.product(rows).float() - expected).norm(dim=-1)
                if bool((differences > most * expected.norm(dim=-1)).any()):
                    return False
        return True


_MOST_ROWS: Final = {Form.NF4_PANELS: 4}
"""More rows of these go faster through bitsandbytes (decision 0038)."""
_FLOATS: Final = (Form.FLOAT_PANELS, Form.FLOAT_ROWS)
_ADDRESS: Final = ctypes.c_void_p
_COUNT: Final = ctypes.c_int64
_ARGUMENTS: Final = {
    "few_rows_forms": ((), _COUNT),
    "few_rows_most": ((), _COUNT),
    "few_rows_scratch": ((_COUNT,), _COUNT),
    "few_rows_product": ((_ADDRESS, _COUNT, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT), None),
    "few_rows_layer": (
        (_ADDRESS, _COUNT, *(_ADDRESS,) * 3, _COUNT, _COUNT, *(_ADDRESS,) * 3, _COUNT, _COUNT),
        None,
    ),
}
