"""The KV cache of an engine: one owner of all blocks, of the memory behind them and of what is shared."""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from molink.shards.kv.block_allocator import Block, BlockAllocator, BlockKind, Extent, PoolFull, runs_of
from molink.shards.kv.kv_memory import KvMemory, LayerLayout
from molink.shards.kv.session_state import StateMemory
from molink.shards.spec import KV_BLOCK_TOKENS, Span, most_kv_blocks

Run = tuple[Extent[Any], int, int]
"""An extent, the first of its blocks, and how many."""


@dataclass(slots=True, eq=False)
class Runs:
    """Where a table's blocks lay when so many had moved."""

    moves: int
    each: list[Run]
    places: Tensor | None = None
    """Of `KvPool.places`, once asked for."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Where one session's keys and values are, in layers that forget alike."""

    kind: BlockKind
    window: int | None
    most: int
    """Blocks that it holds at most, unless a step has more than MAX_STEP_TOKENS new tokens."""
    blocks: list[Block] = field(default_factory=list)
    first: int = 0
    """How many blocks were passed by the window and are not there any more."""
    runs: Runs | None = None
    """None when blocks came or went since."""
    held: bool = False
    """Whether a step that has begun will use it, so that its blocks stay even if its session ends."""
    released: bool = False
    """Whether its session has ended and its blocks are free."""

    def kept_from(self, length: int) -> int:
        """The first block that the token at position `length`, or a later one, sees."""
        return 0 if self.window is None else max(0, length - self.window + 1) // KV_BLOCK_TOKENS

    @property
    def least_length(self) -> int:
        """A sequence of so many tokens, or more, sees nothing of what is not there any more."""
        return 0 if self.window is None or not self.first else self.first * KV_BLOCK_TOKENS + self.window - 1

    @property
    def end(self) -> int:
        """The block of the sequence behind its last one."""
        return self.first + len(self.blocks)

    def from_block(self, index: int) -> list[Block]:
        """The blocks of the tokens from that block of the sequence on."""
        return self.blocks[max(0, index - self.first) :]


class KvPool:
    """Blocks for sessions on any spans of a model, together at most `limit_bytes`. Used from the engine's thread,
    but for `give_back`."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device = device
        self._allocator: BlockAllocator[KvMemory | StateMemory] = BlockAllocator(self, limit_bytes)
        self._layouts: dict[BlockKind, tuple[LayerLayout, ...]] = {}
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

    def tables_for(
        self, span: Span, layouts: Sequence[LayerLayout], capacity_tokens: int
    ) -> tuple[BlockTable, ...]:
        """Empty tables of a session of at most so many tokens on the span: one for the layers that see everything,
        one for each window."""
        groups: dict[int | None, list[int]] = {}
        for index, layout in enumerate(layouts):
            groups.setdefault(layout.window, []).append(index)
        tables = []
        for window, indices in groups.items():
            own = tuple(layouts[index] for index in indices)
            bytes_per_token = sum(layout.bytes_per_token for layout in own)
            kind = BlockKind(
                tuple(span.start + index for index in indices), KV_BLOCK_TOKENS * bytes_per_token
            )
            self._layouts[kind] = own
            tables.append(BlockTable(kind, window, most_kv_blocks(capacity_tokens, window)))
        return tuple(tables)

    def state_table(self, span: Span, layouts: Sequence[LayerLayout]) -> BlockTable | None:
        """An empty table for what the layers keep beside keys and values, which is one block; None if nothing."""
        own = {layer: layout for layer, layout in zip(span, layouts, strict=True) if layout.states}
        if not own:
            return None
        kind = BlockKind(tuple(own), sum(layout.state_bytes for layout in own.values()), per_session=True)
        self._layouts[kind] = tuple(own.values())
        return BlockTable(kind, None, 1)

    def states(self, table: BlockTable) -> dict[int, tuple[Tensor, ...]]:
        """The states [1, *shape] of each layer of a `state_table` that has its block."""
        (block,) = table.blocks
        views: dict[int, tuple[Tensor, ...]] = block.extent.memory.views(block.index)
        return views

    def adopt(self, tables: Sequence[BlockTable], names: Sequence[bytes]) -> int:
        """Fills empty tables with the blocks of the longest beginning that is there; returns its blocks.

        Of layers with a window these are also blocks that the window has passed, as far as they are there and the
        table may hold them: the session may go back so far.
        """
        count = self.match(tables, names)
        for table in tables:
            table.blocks = self._named(table, reversed(names[max(0, count - table.most) : count]))[::-1]
            table.first = count - len(table.blocks)
            self._allocator.refer(table.blocks)
            self._tables.add(table)
        return count

    def match(self, tables: Sequence[BlockTable], names: Sequence[bytes]) -> int:
        """How many blocks from the start are there with everything that a token behind them sees."""
        self.collect()
        found = len(names)
        for table in tables:
            if table.window is None:
                found = min(found, len(self._named(table, names[:found])))
        limited = [table for table in tables if table.window is not None]
        return next(
            count
            for count in range(found, -1, -1)
            if all(self._has(table, names, count) for table in limited)
        )

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
            replaced = dict(zip(others, own, strict=True))
            for old in table.from_block(start)[:1]:
                if tokens % KV_BLOCK_TOKENS and (new := replaced.get(old)) is not None:
                    self.copy(old.extent.memory, old.index, new.extent.memory, new.index, 1)
            table.blocks = [replaced.get(block, block) for block in table.blocks]
            table.runs = None
            self._allocator.release(others)
            for block in table.from_block(start):
                self._allocator.unname(block)

    def publish(self, table: BlockTable, names: Sequence[bytes], start: int, stop: int) -> None:
        """Blocks [start, stop) of the sequence are full; `names` are those of all blocks from the first on."""
        for index in range(max(start, table.first), min(stop, len(names))):
            self._allocator.name(table.blocks[index - table.first], names[index])

    def views(self, table: BlockTable, start: int, stop: int) -> list[list[Tensor]]:
        """Tokens [start, stop) of the sequence, as far as they are still there: for each run of blocks a view of
        every slot."""
        views: list[list[Tensor]] = []
        begin = table.first * KV_BLOCK_TOKENS
        for extent, index, count in self._runs(table).each:
            end = begin + count * KV_BLOCK_TOKENS
            low, high = max(start, begin), min(stop, end)
            if low < high:
                views.append(extent.memory.slots(index * KV_BLOCK_TOKENS + low - begin, high - low))
            begin = end
        return views

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

    def create(self, kind: BlockKind, count: int) -> KvMemory | StateMemory:
        """Memory of an extent, for the allocator.

        Raises PoolFull where the device has less than was planned, which some other program may have taken: sessions
        can make room for each other then, as if the pool were smaller.
        """
        try:
            return self._made(kind, count, self._device)
        except torch.OutOfMemoryError as error:
            raise PoolFull(count * kind.block_bytes, 0) from error

    def aside(self, kind: BlockKind, count: int) -> KvMemory | StateMemory:
        """Memory of the host for blocks that wait for a place, for the allocator."""
        return self._made(kind, count, torch.device("cpu"))

    def _made(self, kind: BlockKind, count: int, device: torch.device) -> KvMemory | StateMemory:
        layouts = self._layouts[kind]
        if kind.per_session:
            states = {layer: layout.states for layer, layout in zip(kind.layers, layouts, strict=True)}
            return StateMemory(states, count, device)
        return KvMemory(layouts, count * KV_BLOCK_TOKENS, device)

    def copy(
        self,
        source: KvMemory | StateMemory,
        source_index: int,
        target: KvMemory | StateMemory,
        target_index: int,
        count: int,
    ) -> None:
        """Blocks from one extent's memory to another's of the same kind, for the allocator."""
        places = (source_index, target_index, count)
        with torch.inference_mode():
            if isinstance(target, StateMemory) and isinstance(source, StateMemory):
                target.copy_from(source, *places)
            elif isinstance(target, KvMemory) and isinstance(source, KvMemory):
                target.copy_from(source, *(place * KV_BLOCK_TOKENS for place in places))

    def _runs(self, table: BlockTable) -> Runs:
        known = table.runs
        if known is None or known.moves != self._allocator.moves:
            known = table.runs = Runs(self._allocator.moves, runs_of(table.blocks))
        return known

    def _named(self, table: BlockTable, names: Iterable[bytes]) -> list[Block]:
        """The blocks of these names, up to the first that is not there."""
        found: list[Block] = []
        for name in names:
            block = self._allocator.find(table.kind, name)
            if block is None:
                break
            found.append(block)
        return found

    def _has(self, table: BlockTable, names: Sequence[bytes], count: int) -> bool:
        wanted = names[table.kept_from(count * KV_BLOCK_TOKENS) : count]
        return len(self._named(table, wanted)) == len(wanted)
