"""How much of a matrix of bytes one program multiplies, so that it fits a card and fills it. Pure."""

from dataclasses import dataclass, replace

from molink.shards.paged_attention.paged_tiles import LEAST_SHARED_BYTES

MOST_ROWS = 64
"""More rows are bound by products, not by the bytes of the matrix: they are left to the card's own library."""
_LEAST = 16
"""Rows and columns of the smallest matrix product that tensor cores make."""
_COLUMNS = (64, 32, 16)
_STEP = 128
_STAGES = (4, 3, 2, 1)
_LEAST_STEPS = 4
"""Of one part of the numbers: fewer would be over before their loads overlap."""
PROGRAMS = 4
"""For each processor: so many keep its memory busy."""
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class ByteTile:
    """What one program of the kernel has at a time."""

    rows: int
    columns: int
    """Of the product: rows of the matrix."""
    step: int
    """Numbers of each row that are multiplied at a time."""
    stages: int
    """Steps whose loads are on their way at the same time."""
    parts: int = 1
    """Of each row's numbers: programs of their own multiply each, and the sums are added afterwards."""

    def part_numbers(self, numbers: int) -> int:
        """How many of a row's numbers are in one part, a multiple of the step."""
        return -(-numbers // (self.parts * self.step)) * self.step


def shared_bytes(tile: ByteTile, element_bytes: int) -> int:
    """The most shared memory that the kernel takes with this tile, on any card: rows and bytes that are on their way,
    and both as numbers where the product reads them from there."""
    rows, matrix = tile.rows * tile.step, tile.columns * tile.step
    loaded = max(1, tile.stages - 1) * (rows * element_bytes + matrix)
    multiplied = (rows + matrix) * element_bytes
    return loaded + multiplied


def tile_for(
    rows: int, shape: tuple[int, int], processors: int, element_bytes: int, limit_bytes: int
) -> ByteTile | None:
    """The tile for so many rows and a matrix of that shape, whose rows are the product's columns.

    It is as wide as leaves work for all processors, with as many loads on their way as fit `limit_bytes` of shared
    memory. Where columns alone are too few for all processors, what is summed up is cut in parts as well ("split-K",
    NVIDIA, CUTLASS, "Efficient GEMM in CUDA"). None where there are too many rows, or none fits. In float32, and on
    Turing in all dtypes, the compiler multiplies without tensor cores, out of registers: there they are the limit.
    """
    if rows > MOST_ROWS:
        return None
    columns, numbers = shape
    padded = max(_LEAST, 1 << (rows - 1).bit_length())
    most = _most_parts(numbers, _STEP)
    wide = next((width for width in _COLUMNS if columns * most >= 2 * width * processors), _LEAST)
    if limit_bytes <= LEAST_SHARED_BYTES or element_bytes == _FLOAT32_BYTES:
        return _in_parts(ByteTile(padded, min(wide, 2 * _LEAST), 2 * _LEAST, 2), shape, processors)
    tiles = (ByteTile(padded, wide, step, stages) for step in (_STEP, _STEP // 2) for stages in _STAGES)
    fitting = next((tile for tile in tiles if shared_bytes(tile, element_bytes) <= limit_bytes), None)
    return None if fitting is None else _in_parts(fitting, shape, processors)


def _most_parts(numbers: int, step: int) -> int:
    return max(1, numbers // (_LEAST_STEPS * step))


def _in_parts(tile: ByteTile, shape: tuple[int, int], processors: int) -> ByteTile:
    """The same tile, with as many parts as give every processor enough programs: of whole steps if that can be."""
    columns, numbers = shape
    programs = -(-columns // tile.columns)
    # Not one part more: programs that do not fit begin when all others are over.
    wanted = PROGRAMS * processors // programs
    most = max(1, min(wanted, _most_parts(numbers, tile.step)))
    even = (parts for parts in range(most, most // 2, -1) if numbers % (parts * tile.step) == 0)
    cut = replace(tile, parts=next(even, most))
    return replace(tile, parts=-(-numbers // cut.part_numbers(numbers)))
