"""What the paged attention kernel holds fits the card, for every head, dtype and group that is served."""

import pytest

from molink.shards.paged_attention.paged_tiles import (
    LEAST_SHARED_BYTES,
    TILES,
    Tile,
    latent_shared_bytes,
    latent_tile_for,
    query_rows,
    shared_bytes,
    tile_for,
)

SHARED_KIB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""By compute capability: what a program may have (CUDA programming guide, technical specifications)."""
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
COMPILED = (
    # capability, element bytes, head size, group, tokens, stages, bytes that Triton 3.6 says the compiled kernel takes
    (75, 2, 64, 1, 64, 3, 20480),
    (75, 2, 128, 1, 64, 3, 40960),
    (75, 2, 256, 1, 32, 3, 49152),
    (75, 2, 256, 1, 64, 3, 81920),
    (75, 4, 128, 1, 64, 3, 45120),
    (75, 4, 256, 1, 16, 1, 33856),
    (75, 4, 256, 1, 32, 3, 51264),
    (80, 2, 64, 1, 64, 3, 21504),
    (80, 2, 128, 1, 64, 3, 39936),
    (80, 2, 256, 1, 64, 3, 76800),
    (80, 4, 64, 1, 64, 3, 41984),
    (90, 4, 128, 1, 64, 3, 78912),
    (90, 4, 128, 1, 16, 1, 17472),
    (120, 2, 256, 1, 64, 3, 76800),
    (120, 4, 128, 1, 32, 3, 43520),
    (90, 2, 256, 48, 64, 3, 164864),
    (80, 4, 256, 48, 16, 1, 86272),
    (90, 4, 256, 48, 32, 3, 140032),
)


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_has_a_tile_that_fits_the_card(capability: int, element_bytes: int, head_dim: int) -> None:
    limit_bytes = SHARED_KIB[capability] * 1024
    for group in (1, 2, 3, 4, 8, 16):
        tile = tile_for(head_dim, group, element_bytes, limit_bytes)
        assert tile is not None
        assert shared_bytes(tile, head_dim, group, element_bytes) <= limit_bytes


@pytest.mark.parametrize(
    ("head_dim", "element_bytes", "capability", "tokens"),
    [
        (128, 2, 75, 16),
        (256, 2, 75, 16),
        (128, 2, 86, 64),
        (256, 2, 89, 64),
        (192, 4, 86, 16),
        (256, 4, 120, 16),
        (256, 4, 75, 16),
        (256, 4, 90, 16),
        (128, 4, 89, 64),
        (64, 4, 89, 64),
    ],
)
def test_only_where_large_tiles_do_not_fit_memory_or_registers_they_are_smaller(
    head_dim: int, element_bytes: int, capability: int, tokens: int
) -> None:
    tile = tile_for(head_dim, 4, element_bytes, SHARED_KIB[capability] * 1024)
    assert tile is not None
    assert tile.tokens == tokens


@pytest.mark.parametrize(
    ("capability", "element_bytes", "head_dim", "group", "tokens", "stages", "compiled_bytes"), COMPILED
)
def test_the_bound_is_no_less_than_what_compiled_kernels_take(
    capability: int,
    element_bytes: int,
    head_dim: int,
    group: int,
    tokens: int,
    stages: int,
    compiled_bytes: int,
) -> None:
    bound = shared_bytes(Tile(tokens, stages), head_dim, group, element_bytes)
    assert bound <= SHARED_KIB[capability] * 1024 or tile_for(
        head_dim, group, element_bytes, SHARED_KIB[capability] * 1024
    ) != Tile(tokens, stages)
    assert compiled_bytes <= bound <= 2.2 * compiled_bytes


def test_what_fits_nowhere_has_no_tile() -> None:
    assert tile_for(1024, 8, 4, LEAST_SHARED_BYTES) is None
    assert tile_for(1024, 64, 4, SHARED_KIB[90] * 1024) is None


def test_tiles_come_from_the_largest_to_the_smallest() -> None:
    sizes = [shared_bytes(tile, 128, 4, 4) for tile in TILES]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("group", "rows"), [(1, 16), (8, 16), (16, 16), (17, 32), (48, 64)])
def test_query_rows_are_a_power_of_two_that_the_tensor_cores_take(group: int, rows: int) -> None:
    assert query_rows(group) == rows


@pytest.mark.parametrize("capability", SHARED_KIB)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_latents_of_deepseek_have_a_tile_on_every_card(capability: int, element_bytes: int) -> None:
    limit_bytes = SHARED_KIB[capability] * 1024
    tile = latent_tile_for(512, 64, element_bytes, limit_bytes)
    assert tile is not None
    assert latent_shared_bytes(tile, 512, 64, element_bytes) <= limit_bytes
    in_pieces = capability == 75 or element_bytes == 4
    assert (tile.piece < 512) == in_pieces


@pytest.mark.parametrize(
    ("element_bytes", "capability", "compiled_bytes"), [(2, 75, 51200), (4, 75, 51744), (4, 80, 70720)]
)
def test_the_bound_of_latents_in_pieces_is_no_less_than_what_compiled_kernels_take(
    element_bytes: int, capability: int, compiled_bytes: int
) -> None:
    tile = latent_tile_for(512, 64, element_bytes, SHARED_KIB[capability] * 1024)
    assert tile is not None
    assert compiled_bytes <= latent_shared_bytes(tile, 512, 64, element_bytes) <= 1.1 * compiled_bytes


def test_latents_that_are_too_long_for_a_card_have_no_tile() -> None:
    assert latent_tile_for(2048, 64, 2, LEAST_SHARED_BYTES) is None
