"""Ways to multiply rows by a matrix on a processor: what each takes, and which is used for so many rows.

Which way is fastest depends on the processor, on how many rows there are, and on the numbers' form. So the ways are
timed when a span is loaded, on its own matrices; deciding from the times is pure.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from molink.shards.native.native_way import NativeWay

LEAST_WEIGHTS = 1 << 16
"""Smaller matrices are not worth a choice: the call costs more than the product."""
TIMED_ROWS = (1, 128, 8, 32, 4, 2)
"""Each of the ways is timed with so many rows, what tells most first."""
TIMED_ALWAYS = 3
"""The first so many of these are timed on the slowest machine too."""
TIMED_ROWS_OF_ALL = 32
"""More rows are multiplied by fewer of the matrices: they are no longer waited for."""
TIMED_BYTES = 96 * 1024 * 1024
"""Of matrices that are multiplied in turn: no processor's cache keeps them all."""
TIMED_TURNS = 4
TIMED_BUDGET_S = 0.6
"""No further number of rows is begun after this long, and none is timed again."""
HOPELESS = 2.0
"""A way that took so many times the least time is not timed again with so many rows."""
WORTH = 0.9
"""Another way has to take at most so much of the first one's time."""
UNPACKED_ELEMENTS = 1 << 20
"""Numbers that are unpacked at a time: they are multiplied before they leave the processor's caches."""
STREAMED_ROWS = 6
"""With so many rows oneDNN reads packed weights a quarter to two fifths faster than with one or two: it then has the
next ones on their way while it multiplies. The zeros cost nothing that would not be waited for."""
ALIGNED_BYTES: Final = 64
"""Memory that torch allocates begins at a multiple of it, so products with vectors may rely on it: at other addresses
`_weight_int8pack_mm` ends the process."""

Way: TypeAlias = Callable[[int, Tensor], object]
"""Multiplies rows [count, columns] by the matrix of this number."""
T = TypeVar("T")
Choice: TypeAlias = tuple[tuple[int, T], ...]
"""From so many rows on, what to use; in order, the first from 1."""
DenseProduct: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Of rows [count, columns] and a matrix [out, columns]: [count, out]."""


class Scratch:
    """Memory that the products of one stage use in turn, kept from one to the next.

    A tensor that is made anew for each product is beyond the C library's threshold at real widths: its pages would be
    mapped, zeroed and unmapped every time. Used from one thread.
    """

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        return self._buffer.nbytes

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with anything in it, until the next one is taken."""
        needed = math.prod(shape) * dtype.itemsize
        if self._buffer.nbytes < needed:
            with torch.inference_mode(mode=False):
                self._buffer = torch.empty(0, dtype=torch.uint8)
                self._buffer = torch.empty(needed, dtype=torch.uint8)
        return self._buffer[:needed].view(dtype).view(*shape)


@dataclass(frozen=True, slots=True)
class Timings:
    """What each of several ways took."""

    rows: tuple[int, ...]
    """Ascending."""
    taken_s: tuple[tuple[float, ...], ...]
    """For each number of rows, the least time of each way."""

    def choose(self, ways: Sequence[T]) -> Choice[T]:
        """The first way, unless another one is faster, for each number of rows up to the next."""
        chosen: list[tuple[int, T]] = []
        for rows, taken_s in zip(self.rows, self.taken_s, strict=True):
            best = min(range(len(ways)), key=taken_s.__getitem__)
            way = ways[best if taken_s[best] < WORTH * taken_s[0] else 0]
            chosen.append((rows if chosen else 1, way))
        return tuple(chosen)

    def pays(self, way: int) -> bool:
        """Whether this way, used for any number of rows, is faster than the best of the others: in the geometric mean
        of what it takes of their time."""
        shares = [
            taken_s[way] / min(other_s for other, other_s in enumerate(taken_s) if other != way)
            for taken_s in self.taken_s
        ]
        return math.prod(shares) ** (1 / len(shares)) < WORTH

    def without(self, way: int) -> "Timings":
        """Those of the other ways."""
        return Timings(
            self.rows,
            tuple(tuple(one_s for at, one_s in enumerate(taken_s) if at != way) for taken_s in self.taken_s),
        )


def used_for(choice: Choice[T], rows: int) -> T:
    """What was chosen for so many rows."""
    found = choice[0][1]
    for least, way in choice:
        if rows < least:
            break
        found = way
    return found


def time_ways(ways: Sequence[Way], columns: Sequence[int], dtype: torch.dtype) -> Timings:
    """Times products of all ways with matrices of so many columns, in turns, for several numbers of rows.

    Of each product alone the least time counts: one is seldom interrupted by other programs, all of them often.
    """
    deadline_s = time.perf_counter() + TIMED_BUDGET_S
    found: dict[int, tuple[float, ...]] = {}
    with torch.inference_mode():
        for rows in TIMED_ROWS:
            if len(found) >= TIMED_ALWAYS and time.perf_counter() > deadline_s:
                break
            few = columns[: math.ceil(min(1.0, TIMED_ROWS_OF_ALL / rows) * len(columns))]
            inputs = {one: torch.ones(rows, one, dtype=dtype) for one in set(few)}
            least_s = [[math.inf] * len(few) for _ in ways]
            for turn in range(TIMED_TURNS):
                bound_s = HOPELESS * min(map(sum, least_s)) if turn else math.inf
                for way, of_way_s in zip(ways, least_s, strict=True):
                    if turn and sum(of_way_s) > bound_s:
                        continue
                    for matrix, one in enumerate(few):
                        of_way_s[matrix] = min(of_way_s[matrix], _taken_s(way, matrix, inputs[one]))
                if turn and time.perf_counter() > deadline_s:
                    break
            found[rows] = tuple(map(sum, least_s))
    return Timings(tuple(sorted(found)), tuple(found[rows] for rows in sorted(found)))


def _taken_s(way: Way, matrix: int, rows: Tensor) -> float:
    """Seconds of one product; without end where it cannot be made, such as for want of memory."""
    began_s = time.perf_counter()
    try:
        way(matrix, rows)
    except RuntimeError:
        return math.inf
    return time.perf_counter() - began_s


def few_of(matrices: Sequence[T], nbytes: Callable[[T], int]) -> list[T]:
    """The first of them that together have TIMED_BYTES, or all."""
    timed: list[T] = []
    total = 0
    for matrix in matrices:
        if total >= TIMED_BYTES:
            break
        timed.append(matrix)
        total += nbytes(matrix)
    return timed


def has_onednn() -> bool:
    """Whether oneDNN's product can be called as torch's own compiler calls it."""
    available = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return available and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes `torch.nn.functional.linear` up to rounding; the weights as they lie, or packed for it."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001 - what torch's own compiler calls
    return product


def packed_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `onednn_product` with packed weights, few rows filled up to STREAMED_ROWS."""
    flat = rows.reshape(-1, rows.shape[-1])
    if len(flat) >= STREAMED_ROWS:
        return onednn_product(rows, weight, bias)
    return onednn_product(filled_up(flat), weight, bias)[: len(flat)].view(*rows.shape[:-1], -1)


def packed_for_onednn(weight: Tensor) -> Tensor | None:
    """The weights as oneDNN likes them best, in as many bytes; None where it does not multiply such here."""
    if not has_onednn() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return None
    try:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)  # noqa: SLF001 - what torch's own compiler calls
        onednn_product(torch.zeros(1, weight.shape[1], dtype=weight.dtype), packed)
    except RuntimeError:  # a processor that cannot multiply such numbers
        return None
    return packed


def divided_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes `torch.nn.functional.linear` up to rounding: weights times rows instead of rows times weights, a part
    of the weights for each thread. Where they cannot be divided, one row counts twice, for a product with a single
    column is
    made in another way, which is slow."""
    flat = rows.reshape(-1, rows.shape[-1])
    parts = math.gcd(torch.get_num_threads(), len(weight))
    columns = (flat if parts > 1 or len(flat) > 1 else torch.cat((flat, flat))).t()
    divided = torch.bmm(weight.reshape(parts, -1, weight.shape[1]), columns.expand(parts, -1, -1))
    product = divided.view(len(weight), -1).t()[: len(flat)].contiguous()
    if bias is not None:
        product += bias
    return product.view(*rows.shape[:-1], -1)


def filled_up(rows: Tensor) -> Tensor:
    """[at least STREAMED_ROWS, columns], zeros behind the rows that there are."""
    return functional.pad(rows, (0, 0, 0, max(0, STREAMED_ROWS - len(rows))))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor if its memory begins at a multiple of ALIGNED_BYTES, else a copy that does. On processors."""
    return tensor if tensor.data_ptr() % ALIGNED_BYTES == 0 else tensor.clone()


def dense_products(without: frozenset[str] = frozenset()) -> tuple[DenseProduct, ...]:
    """Products of a matrix that lies unpacked in a buffer; torch's alone where all were dropped."""
    found: list[DenseProduct] = [] if NativeWay.LINEAR in without else [functional.linear]
    if has_onednn() and NativeWay.ONEDNN not in without:
        found.append(onednn_product)
    return tuple(found) or (functional.linear,)


def multiply_in_parts(
    rows: Tensor,
    out: int,
    dtype: torch.dtype,
    unpack: Callable[[int, int], Tensor],
    product: DenseProduct,
) -> Tensor:
    """Rows [count, columns] times a matrix [out, columns] of which `unpack` gives the rows from one up to, not
    including, another in `dtype`: [count, out] in `dtype`."""
    step = max(64, UNPACKED_ELEMENTS // rows.shape[1] // 64 * 64)
    rows = rows.to(dtype)
    if step >= out:
        return product(rows, unpack(0, out))
    result = rows.new_empty(len(rows), out)
    for start in range(0, out, step):
        stop = min(start + step, out)
        result[:, start:stop] = product(rows, unpack(start, stop))
    return result
