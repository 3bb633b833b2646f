"""Swapping: room for the sessions of a step is that of sessions which have not stepped for longest."""

from collections.abc import Sequence
from weakref import WeakSet

from molink.shards.batching.partial_step import Rows
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_pool import KvPool


class GrowingCaches:
    """Caches that have reserved nothing: each may have to wait in the host's memory for others' steps."""

    __slots__ = ("_caches", "_pool", "_steps")

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._caches: WeakSet[SequenceCache] = WeakSet()
        self._steps = 0

    def add(self, cache: SequenceCache) -> None:
        """A session begins whose cache takes blocks as it grows."""
        self._caches.add(cache)

    def make_room(self, rows: Sequence[Rows], under_way: Sequence[SequenceCache]) -> None:
        """Every cache of a step has blocks for its new tokens, if need be those of sessions that are neither in this
        step nor in one that is under way. Raises CacheFull, PoolFull."""
        self._steps += 1
        self._pool.collect({table for row in rows for table in row.cache.tables})
        kept = [*(row.cache for row in rows), *under_way]
        for row in rows:
            row.cache.last_step = self._steps
            while True:
                try:
                    row.cache.require(row.count)
                    break
                except PoolFull:
                    if not self._suspend_one(kept):
                        raise

    def truncate(self, cache: SequenceCache, tokens: int) -> None:
        """What the cache holds beyond so many tokens will be computed again. Raises as `SequenceCache.truncate`."""
        while True:
            try:
                cache.truncate(tokens, same_tokens=True)
                return
            except PoolFull:
                if not self._suspend_one((cache,)):
                    raise

    def limit(self, limit_bytes: int) -> bool:
        """The pool may take so much from now on; whether what sessions have reserved fits."""
        fits = self._pool.limit(limit_bytes)
        while not fits and self._suspend_one(()):
            fits = self._pool.limit(limit_bytes)
        return fits

    def _suspend_one(self, kept: Sequence[SequenceCache]) -> bool:
        """Moves the blocks of the session that has not stepped for longest to the host's memory, if there is one."""
        ours = set(map(id, kept))
        others = [one for one in self._caches if id(one) not in ours and one.holds_blocks]
        if others:
            min(others, key=lambda one: one.last_step).suspend()
        return bool(others)
