"""Opening of a session's cache, with what the pool already has of its beginning."""

from collections.abc import Sequence

from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.kv.kv_pool import KvPool
from molink.shards.spec import KV_BLOCK_TOKENS, Span


def open_cache(
    pool: KvPool,
    span: Span,
    layouts: Sequence[LayerLayout],
    capacity_tokens: int,
    names: Sequence[bytes] = (),
    *,
    reserve: bool = True,
) -> SequenceCache:
    """A session's cache: with the blocks of the longest beginning of `names` that the pool has, and blocks of its own
    for all other tokens that its layers hold at once, or, without `reserve`, for none yet.

    Raises PoolFull, and ValueError for a capacity below 1 or layouts that are not the span's.
    """
    if capacity_tokens < 1:
        raise ValueError(f"capacity_tokens must be at least 1, got {capacity_tokens}")
    if len(layouts) != len(span):
        raise ValueError(f"span {span} has {len(span)} layers but {len(layouts)} layouts were given")
    tables, state = (
        pool.memory.tables_for(span, layouts, capacity_tokens),
        pool.memory.state_table(span, layouts),
    )
    cache = SequenceCache(pool, span, layouts, tables, state, capacity_tokens, reserved=reserve)
    names = names if state is None else ()  # what a state is behind a shared beginning, nobody has kept
    names_held = names[: (capacity_tokens - 1) // KV_BLOCK_TOKENS]
    cache.length = cache.certain_tokens = KV_BLOCK_TOKENS * pool.adopt(tables, names_held)
    if reserve:
        try:
            cache.take_blocks(cache.length)
        except PoolFull:
            cache.close()
            raise
    cache.name_blocks(names)
    return cache
