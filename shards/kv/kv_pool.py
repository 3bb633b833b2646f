"""The KV cache of an engine: one owner of all blocks, of the memory behind them and of what is shared."""

from collections import deque
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from molink.shards.kv.block_allocator import BlockAllocator
from molink.shards.kv.block_table import BlockTable, Runs
from molink.shards.kv.extents import Block, PoolFull, runs_of
from molink.shards.kv.kv_memory import KvMemory
from molink.shards.kv.pool_memory import PoolMemory
from molink.shards.kv.session_state import StateMemory
from molink.shards.spec import KV_BLOCK_TOKENS, Span


class KvPool:
    """Blocks for sessions on any spans of a model, together at most `limit_bytes`. Used from the engine's thread,
    but for `give_back`."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self.memory = PoolMemory(device)
        self._allocator: BlockAllocator[KvMemory | StateMemory] = BlockAllocator(self.memory, limit_bytes)
        self._tables: set[BlockTable] = set()
        self._returned: deque[tuple[BlockTable, Sequence[bytes]]] = deque()

    @property
    def used_bytes(self) -> int:
        """Memory of all blocks, and of free ones between them."""
        self.collect()
        return self._allocator.used_bytes

    @property
    def tables(self) -> int:
        """Block tables that sessions hold."""
        self.collect()
        return len(self._tables)

    def states(self, table: BlockTable, kept: int = 0) -> dict[int, tuple[Tensor, ...]]:
        """The states [1, *shape] of each layer in one of the blocks of a `state_table` that has them."""
        block = table.blocks[kept]
        views: dict[int, tuple[Tensor, ...]] = block.extent.memory.views(block.index)
        return views

    def adopt(self, tables: Sequence[BlockTable], names: Sequence[bytes]) -> int:
        """Fills empty tables with the blocks of the longest beginning that is there; returns its blocks.

        Of layers with a window these are also blocks that the window has passed, as far as they are there and the
        table may hold them: the session may go back so far.
        """
        count = self.match(tables, names)
        for table in tables:
            last_first = reversed(names[max(0, count - table.most) : count])
            table.blocks = self._allocator.find_each(table.kind, last_first)[::-1]
            table.first = count - len(table.blocks)
            self._allocator.refer(table.blocks)
            self._tables.add(table)
        return count

    def match(self, tables: Sequence[BlockTable], names: Sequence[bytes]) -> int:
        """How many blocks from the start are there with everything that a token behind them sees."""
        self.collect()
        find_each, found = self._allocator.find_each, len(names)
        for table in tables:
            if table.window is None:
                found = min(found, len(find_each(table.kind, names[:found])))

        def has(table: BlockTable, count: int) -> bool:
            wanted = names[table.kept_from(count * KV_BLOCK_TOKENS) : count]
            return len(find_each(table.kind, wanted)) == len(wanted)

        limited = [table for table in tables if table.window is not None]
        return next(count for count in range(found, -1, -1) if all(has(table, count) for table in limited))

    def extend(self, tables: Sequence[BlockTable], ends: Sequence[int]) -> None:
        """Gives each table blocks until it reaches its end, counted in blocks from the start of the sequence.

        Raises PoolFull, and then no table has changed.
        """
        missing = [max(0, end - table.end) for table, end in zip(tables, ends, strict=True)]
        taken: list[list[Block]] = []
        try:
            for table, count in zip(tables, missing, strict=True):
                last = table.blocks[-1] if table.blocks else None
                taken.append(self._allocator.allocate(table.kind, count, last) if count else [])
        except (PoolFull, MemoryError, RuntimeError):
            for got in taken:
                self._allocator.release(got)
            raise
        for table, got in zip(tables, taken, strict=True):
            table.blocks += got
            table.runs = None
            self._tables.add(table)

    def drop_first(self, table: BlockTable, count: int) -> None:
        """The window has passed so many more blocks."""
        self._allocator.release(table.blocks[:count])
        del table.blocks[:count]
        table.first += count
        table.runs = None

    def cut(self, tables: Sequence[BlockTable], blocks: int) -> None:
        """The tables end behind so many blocks of the sequence."""
        for table in tables:
            kept = max(0, blocks - table.first)
            self._allocator.release(table.blocks[kept:])
            del table.blocks[kept:]
            table.runs = None

    def clear(self, tables: Sequence[BlockTable]) -> None:
        """The tables hold nothing from now on."""
        for table in tables:
            self._allocator.release(table.blocks)
            table.blocks, table.first, table.runs = [], 0, None

    def give_back(self, tables: Sequence[BlockTable], names: Sequence[bytes] = ()) -> None:
        """The session has ended: its blocks, of which the first have these names and are full, are free or idle when
        the engine's thread next asks for some. From any thread."""
        self._returned.extend((table, names) for table in tables)

    def collect(self, stepping: Collection[BlockTable] = ()) -> None:
        """Frees what was given back, but for tables of the step that is about to run, and those that are held."""
        for _ in range(len(self._returned)):
            table, names = self._returned.popleft()
            if table in stepping or table.held:
                self._returned.append((table, names))
                continue
            self.publish(table, names, 0, table.end)
            self.clear((table,))
            table.released = True
            self._tables.discard(table)

    def make_writable(self, tables: Sequence[BlockTable], tokens: int) -> None:
        """What follows the first `tokens` tokens is going to change: blocks that others share are replaced.

        Raises PoolFull, and then no table has changed.
        """
        start = tokens // KV_BLOCK_TOKENS
        shared = [[block for block in table.from_block(start) if block.references > 1] for table in tables]
        fresh: list[list[Block]] = []
        try:
            for table, others in zip(tables, shared, strict=True):
                fresh.append(self._allocator.allocate(table.kind, len(others)) if others else [])
        except (PoolFull, MemoryError, RuntimeError):
            for got in fresh:
                self._allocator.release(got)
            raise
        for table, others, own in zip(tables, shared, fresh, strict=True):
            if others:
                replaced = dict(zip(others, own, strict=True))
                for old in table.from_block(start)[:1]:
                    if tokens % KV_BLOCK_TOKENS and (new := replaced.get(old)) is not None:
                        self.memory.copy(old.extent.memory, old.index, new.extent.memory, new.index, 1)
                table.blocks = [replaced.get(block, block) for block in table.blocks]
                table.runs = None
                self._allocator.release(others)
            for block in table.from_block(start):
                self._allocator.unname(block)

    def publish(self, table: BlockTable, names: Sequence[bytes], start: int, stop: int) -> None:
        """Blocks [start, stop) of the sequence are full; `names` are those of all blocks from the first on."""
        for index in range(max(start, table.first), min(stop, len(names))):
            self._allocator.name(table.blocks[index - table.first], names[index])

    def runs(self, table: BlockTable, start: int, stop: int) -> list[tuple[KvMemory, int, int]]:
        """Tokens [start, stop) of the sequence, as far as they are still there: for each run of blocks the memory that
        it is in, its first token there, and how many it has."""
        runs: list[tuple[KvMemory, int, int]] = []
        begin = table.first * KV_BLOCK_TOKENS
        for extent, index, count in self._runs(table).each:
            end = begin + count * KV_BLOCK_TOKENS
            low, high = max(start, begin), min(stop, end)
            if low < high:
                runs.append((extent.memory, index * KV_BLOCK_TOKENS + low - begin, high - low))
            begin = end
        return runs

    def places(self, table: BlockTable) -> Tensor:
        """As `KvMemory.places`, [blocks, 2 * shapes] int64 on the host. The same tensor as long as the blocks are the
        same."""
        runs = self._runs(table)
        if runs.places is None:
            parts = [
                extent.memory.places(index * KV_BLOCK_TOKENS, count, KV_BLOCK_TOKENS)
                for extent, index, count in runs.each
            ]
            runs.places = torch.cat(parts) if parts else torch.empty(0, 2, dtype=torch.long)
        return runs.places

    def limit(self, limit_bytes: int | None) -> bool:
        """Blocks may take so much from now on (None: as much as they like); whether what sessions hold fits. Prefixes
        that no session uses go as far as they must."""
        self.collect()
        return self._allocator.limit(limit_bytes)

    def forget(self, span: Span) -> None:
        """The layers are gone: so is what they remember but for what sessions still hold."""
        self.collect()
        self._allocator.forget(span)

    def check_integrity(self) -> None:
        """Raises RuntimeError where tables, counts, names and memory do not agree."""
        self.collect()
        self._allocator.check_integrity([table.blocks for table in self._tables])

    def _runs(self, table: BlockTable) -> Runs:
        known = table.runs
        if known is None or known.moves != self._allocator.extents.moves:
            known = table.runs = Runs(self._allocator.extents.moves, runs_of(table.blocks))
        return known
