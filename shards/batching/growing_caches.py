"""Swapping: room for the sessions of a step is that of sessions which have not stepped for longest.

Sessions whose tokens are between layers stay where they are: keys and values of these tokens count only when they are
through all layers, and would not be moved with the others. Where no other makes room they are taken through first.
"""

from collections.abc import Callable, Collection, Sequence
from weakref import WeakSet

from molink.shards.batching.partial_step import PartialStep, Rows
from molink.shards.kv.extents import PoolFull
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_pool import KvPool


class GrowingCaches:
    """Caches that have reserved nothing: each may have to wait in the host's memory for others' steps."""

    __slots__ = (
        "_caches",
        "_limit_bytes",
        "_pool",
        "_postponed_bytes",
        "_steps",
        "_unfinished",
        "finish_slices",
    )

    def __init__(self, pool: KvPool, limit_bytes: int | None, unfinished: Collection[PartialStep]) -> None:
        """`limit_bytes` is what the pool may take at first; of the steps in `unfinished` some are between layers."""
        self._pool = pool
        self._caches: WeakSet[SequenceCache] = WeakSet()
        self._limit_bytes = limit_bytes
        """What the pool may take now; None: as much as it likes."""
        self._postponed_bytes: int | None = None
        """What it may take once no tokens are between layers; None: what it may now."""
        self._steps = 0
        self._unfinished = unfinished
        self.finish_slices: Callable[[], bool] = lambda: False
        """Takes tokens that are between layers through all of them now; whether there were some."""

    def add(self, cache: SequenceCache) -> None:
        """A session begins whose cache takes blocks as it grows."""
        self._caches.add(cache)

    def make_room(self, rows: Sequence[Rows]) -> None:
        """Every cache of a step has blocks for its new tokens, if need be those of sessions that are not in this step.
        Raises CacheFull, PoolFull."""
        self._steps += 1
        self._pool.collect({table for row in rows for table in row.cache.tables})
        self.settle()
        kept = [row.cache for row in rows]
        for row in rows:
            row.cache.last_step = self._steps
            while True:
                try:
                    row.cache.require(row.count)
                    break
                except PoolFull:
                    if self._suspend_one(kept):
                        continue
                    if not self.finish_slices():
                        raise
                    self.make_room(rows)  # from the first row on: a limit that was put off may hold by now
                    return

    def truncate(self, cache: SequenceCache, tokens: int) -> None:
        """What the cache holds beyond so many tokens will be computed again. Raises as `SequenceCache.truncate`."""
        while True:
            try:
                cache.truncate(tokens, same_tokens=True)
                return
            except PoolFull:
                if not (self._suspend_one((cache,)) or self.finish_slices()):
                    raise

    def limit(self, limit_bytes: int) -> bool:
        """The pool may take so much from now on; whether what sessions have reserved fits.

        Where it does not because of tokens between layers that nobody takes through, the limit stays as it was, so that
        others can step, until `settle` finds none of them.
        """
        self._postponed_bytes = None
        fits = self._pool.limit(limit_bytes)
        while not fits and (self._suspend_one(()) or self.finish_slices()):
            fits = self._pool.limit(limit_bytes)
        if not fits and self._any_between_layers:
            self._pool.limit(self._limit_bytes)
            self._postponed_bytes = limit_bytes
        else:
            self._limit_bytes = limit_bytes
        return fits

    def settle(self) -> None:
        """A limit that was put off because of tokens between layers holds from now on, if there are none."""
        if self._postponed_bytes is not None and not self._any_between_layers:
            self.limit(self._postponed_bytes)

    @property
    def _any_between_layers(self) -> bool:
        """Whether blocks are there that can be moved when tokens are through."""
        return any(cache in self._caches and cache.holds_blocks for cache in self._between_layers())

    def _between_layers(self) -> list[SequenceCache]:
        return [one.row.cache for one in self._unfinished if one.under_way]

    def _suspend_one(self, kept: Sequence[SequenceCache]) -> bool:
        """Moves the blocks of the session that has not stepped for longest to the host's memory, if there is one."""
        ours = set(map(id, (*kept, *self._between_layers())))
        others = [one for one in self._caches if id(one) not in ours and one.holds_blocks]
        if others:
            min(others, key=lambda one: one.last_step).suspend()
        return bool(others)
