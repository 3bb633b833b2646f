"""How many keys the paged attention kernel looks at together, so that it fits a card's shared memory. Pure."""

from dataclasses import dataclass

LEAST_SHARED_BYTES = 64 * 1024
"""What one program of the smallest card that is served may use: Turing, and every card of AMD's."""
LEAST_QUERIES = 16
"""Rows of the smallest matrix product that tensor cores make."""
_FLOAT32_BYTES = 4
_ENTRY_BYTES = 16
"""Of a token's block in a table: an address, and the tokens of its extent."""
_BARRIER_BYTES = 64
_REGISTERS_DIM = 128
"""Longer vectors in float32, which tensor cores do not multiply, would spill registers in large tiles."""
_WARP_GROUP_ROWS = 64
"""From so many rows on Hopper's products read what is loaded ahead from buffers of its own."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Keys that are looked at together."""

    tokens: int
    stages: int
    """Iterations of the kernel's loop whose loads are on their way at the same time."""


TILES = (Tile(64, 3), Tile(32, 3), Tile(16, 3), Tile(16, 1))
"""The largest that fits is the fastest: it waits least often. On Turing the compiler multiplies without tensor cores,
out of registers, and the two largest would spill them."""


def query_rows(group: int) -> int:
    """Rows of the product for `group` query heads that share a key head: a power of two."""
    return max(LEAST_QUERIES, 1 << (group - 1).bit_length())


def shared_bytes(tile: Tile, head_dim: int, group: int, element_bytes: int) -> int:
    """The most shared memory that the kernel takes with this tile, on any card.

    Queries lie there (twice where the tensor cores want them in another order), a tile of keys and one of values, the
    weights in float32, and what is read ahead of the block table. As compiled by Triton 3.6 for compute capability 7.5
    to 12.0 it takes 0.5 to 1 of this. In float32, without reading ahead, keys and values take turns.
    """
    vector_bytes = (1 << (head_dim - 1).bit_length()) * element_bytes
    rows = query_rows(group)
    copies = 1 if tile.stages == 1 and element_bytes == _FLOAT32_BYTES else 2
    vectors = copies * (rows + tile.tokens)
    if rows >= _WARP_GROUP_ROWS and tile.stages > 1:
        vectors = max(vectors, rows + 2 * (tile.stages - 1) * tile.tokens)
    weights = rows * tile.tokens * _FLOAT32_BYTES
    entries = tile.tokens * _ENTRY_BYTES + _BARRIER_BYTES
    return vectors * vector_bytes + weights + entries


def tile_for(head_dim: int, group: int, element_bytes: int, limit_bytes: int) -> Tile | None:
    """The largest tile whose kernel fits `limit_bytes` of shared memory, what a card gives one program, and its
    registers; None where none does."""
    multiplied_apart = element_bytes == _FLOAT32_BYTES and head_dim > _REGISTERS_DIM
    most = LEAST_QUERIES if limit_bytes <= LEAST_SHARED_BYTES or multiplied_apart else TILES[0].tokens
    fitting = (tile for tile in TILES if shared_bytes(tile, head_dim, group, element_bytes) <= limit_bytes)
    return next((tile for tile in fitting if tile.tokens <= most), None)


@dataclass(frozen=True, slots=True)
class LatentTile:
    """As `Tile`, for latents."""

    tokens: int
    stages: int
    heads: int
    """That one program attends for."""
    piece: int
    """Numbers of a latent that are multiplied with a query at a time; WHOLE: all of them."""


WHOLE = 1 << 16
_LATENT_TILES = tuple(
    LatentTile(tokens, stages, LEAST_QUERIES, WHOLE)
    for tokens, stages in ((64, 2), (32, 2), (16, 2), (16, 1))
)
_PIECED_LATENTS = (LatentTile(16, 1, LEAST_QUERIES, 64), LatentTile(16, 1, LEAST_QUERIES // 2, 64))
"""Where products are made out of registers, in float32 and on Turing, these do not hold whole latents: 2 to 6 KB of
each thread would be spilled. Pieces take 51 to 70 KB of shared memory and spill nothing (DeepSeek's latents, as
compiled by Triton 3.7.1)."""


def latent_shared_bytes(tile: LatentTile, rank: int, dim: int, element_bytes: int) -> int:
    """As `shared_bytes`, of the kernel for latents of `rank` and keys of `dim` numbers: latents are both keys and
    values, and lie there once. In pieces products are made of float32 numbers, whatever the dtype is."""
    padded_rank, padded_dim = 1 << (rank - 1).bit_length(), 1 << (dim - 1).bit_length()
    entries = 2 * tile.tokens * _ENTRY_BYTES + _BARRIER_BYTES
    weights = tile.heads * (tile.tokens + 1) * _FLOAT32_BYTES
    if tile.piece < padded_rank:
        rows = (tile.heads + tile.tokens) * padded_rank + tile.heads * max(tile.piece, padded_dim)
        return rows * _FLOAT32_BYTES + weights + entries
    loaded = (tile.stages - 1) * tile.tokens
    vector_bytes = (padded_rank + padded_dim) * element_bytes
    return (tile.heads + tile.tokens + loaded) * vector_bytes + weights + entries


def latent_tile_for(rank: int, dim: int, element_bytes: int, limit_bytes: int) -> LatentTile | None:
    """As `tile_for`, for latents."""
    from_registers = limit_bytes <= LEAST_SHARED_BYTES or element_bytes == _FLOAT32_BYTES
    tiles = _PIECED_LATENTS if from_registers else _LATENT_TILES
    fitting = (tile for tile in tiles if latent_shared_bytes(tile, rank, dim, element_bytes) <= limit_bytes)
    return next(fitting, None)
