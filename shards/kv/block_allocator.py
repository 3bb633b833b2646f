"""Which blocks of the KV cache belong to whom. Pure: the memory behind them is another's, see `kv_pool.py`.

A block holds the keys and values of a fixed number of tokens (`spec.KV_BLOCK_TOKENS`) in a fixed set of layers: its
kind. Blocks live in extents, runs of neighbours in one piece of memory, so that a table that got all its blocks at
once is attended to without a copy. What a table shares with others it refers to; what nobody refers to but has the
name of a prefix (vLLM's automatic prefix caching: Kwon et al., SOSP 2023, section 4.4) stays until memory is short,
least recently used first out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

LEAST_RUN = 4
"""Blocks that are not divided further where memory is in pieces."""
M = TypeVar("M")
"""The memory of an extent."""


class PoolFull(ValueError):
    """There is no memory for so many blocks, even without the prefixes that nobody uses."""

    def __init__(self, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"{wanted_bytes} bytes of KV cache are asked and {free_bytes} are free: wait until a session ends, or "
            "ask for fewer tokens"
        )
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Blocks of one kind can take each other's place."""

    layers: tuple[int, ...]
    block_bytes: int
    per_session: bool = False
    """Whether a block holds a session's state of fixed size (`session_state.py`) and not tokens."""


class Block:
    """A place in an extent. It may move, and whoever refers to it sees it at its new place."""

    __slots__ = ("extent", "index", "name", "references")

    def __init__(self, extent: "Extent[Any]", index: int) -> None:
        self.extent = extent
        self.index = index
        self.references = 0
        self.name: Hashable = None
        """What it holds, if others may share it: the hash of all tokens up to its last."""


class Extent(Generic[M]):
    """Neighbouring blocks. `memory` is what the owner of the memory made for them."""

    __slots__ = ("blocks", "free", "kind", "memory")

    def __init__(self, kind: BlockKind, count: int, memory: M) -> None:
        self.kind = kind
        self.blocks = [Block(self, index) for index in range(count)]
        self.free = count
        """Blocks that hold nothing."""
        self.memory = memory


class BlockMemory(Protocol[M]):
    """Who makes and fills the memory of extents."""

    def create(self, kind: BlockKind, count: int) -> M:
        """Raises PoolFull where there is no such piece of memory, whatever the limit says."""
        ...

    def aside(self, kind: BlockKind, count: int) -> M:
        """As `create`, of memory where blocks only wait while they move."""
        ...

    def copy(self, source: M, source_index: int, target: M, target_index: int, count: int) -> None: ...


class BlockAllocator(Generic[M]):
    """Extents of at most `limit_bytes` together (None: without a limit), and the names of shared blocks."""

    def __init__(self, memory: BlockMemory[M], limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """Of all extents, whatever is in them."""
        self.moves = 0
        """How often blocks have moved: places that were looked up before are stale."""
        self._memory = memory
        self._extents: dict[BlockKind, list[Extent[M]]] = {}
        self._named: dict[tuple[BlockKind, Hashable], Block] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()

    def allocate(self, kind: BlockKind, count: int, after: Block | None = None) -> list[Block]:
        """Refers to `count` blocks that hold nothing: in one run where that can be, best right behind `after`.

        Raises PoolFull, and then only prefixes that nobody used are gone.
        """
        self._make_room(kind, count)
        while True:
            try:
                blocks = list(self._pieces(kind, count, after))
                break
            except PoolFull:  # there is less memory than the limit says
                self._remove_empty()
                if not self._idle:
                    raise
                self._evict()
        for block in blocks:
            block.references = 1
            block.extent.free -= 1
        return blocks

    def find(self, kind: BlockKind, name: Hashable) -> Block | None:
        """The block of that name; it may go at the next `allocate` unless somebody refers to it."""
        return self._named.get((kind, name))

    def refer(self, blocks: Iterable[Block]) -> None:
        """One more table holds these blocks, which hold something."""
        for block in blocks:
            block.references += 1
            self._idle.pop(block, None)

    def release(self, blocks: Iterable[Block]) -> None:
        """A table holds these blocks, in the order of their tokens, no longer. The last ones are the first to go:
        without those before them they are of no use."""
        for block in reversed(list(blocks)):
            block.references -= 1
            if block.references:
                continue
            if block.name is None:
                self._free(block)
            else:
                self._idle[block] = None

    def name(self, block: Block, name: Hashable) -> None:
        """The block is full and will not change: who has the same tokens may share it. The first of a name keeps
        it."""
        if block.name is None and (block.extent.kind, name) not in self._named:
            block.name = name
            self._named[block.extent.kind, name] = block

    def unname(self, block: Block) -> None:
        """The block, which somebody holds, is going to change: nobody else finds it any more."""
        if block.name is not None:
            del self._named[block.extent.kind, block.name]
            block.name = None

    def limit(self, limit_bytes: int | None) -> bool:
        """Sets the limit; whether what is referred to fits it. What is not goes as far as it must."""
        self.limit_bytes = limit_bytes
        while self._room_bytes() + self._scattered_bytes(None) < 0 and self._idle:
            self._evict()
        if self._room_bytes() < 0:
            self._compact(None)
        return self._room_bytes() >= 0

    def forget(self, layers: Iterable[int]) -> None:
        """Nobody will ask for what these layers remember: prefixes of theirs that nobody refers to go."""
        gone = set(layers)
        for block in [block for block in self._idle if not gone.isdisjoint(block.extent.kind.layers)]:
            self._drop_idle(block)

    def check_integrity(self, tables: Iterable[Sequence[Block]]) -> None:
        """Raises RuntimeError where the books do not agree with the tables that there are."""
        counted: dict[Block, int] = {}
        for table in tables:
            for block in table:
                counted[block] = counted.get(block, 0) + 1
        extents = [extent for same in self._extents.values() for extent in same]
        blocks = [block for extent in extents for block in extent.blocks]
        faults = [
            *("a block's place is another's" for e in extents if any(b.extent is not e for b in e.blocks)),
            *("a table holds a block that is in no extent" for _ in counted.keys() - set(blocks)),
            *("a count of references is wrong" for b in blocks if b.references != counted.get(b, 0)),
            *(
                "an idle block is in use, or has no name"
                for b in self._idle
                if b.references or b.name is None
            ),
            *(
                "a free block is idle"
                for b in blocks
                if not b.references and b.name is not None and b not in self._idle
            ),
            *(
                "a name leads elsewhere"
                for (k, n), b in self._named.items()
                if b.name != n or b.extent.kind != k
            ),
            *(
                "a block's name is unknown"
                for b in blocks
                if b.name is not None and (b.extent.kind, b.name) not in self._named
            ),
            *("an extent miscounts" for e in extents if e.free != sum(map(_is_free, e.blocks))),
            *("an empty extent is kept" for e in extents if e.free == len(e.blocks)),
        ]
        if self.used_bytes != sum(len(extent.blocks) * extent.kind.block_bytes for extent in extents):
            faults.append("the bytes of the extents do not add up")
        if faults:
            raise RuntimeError(f"the KV cache is inconsistent: {'; '.join(sorted(set(faults)))}")

    def _room_bytes(self) -> float:
        return float("inf") if self.limit_bytes is None else self.limit_bytes - self.used_bytes

    def _free_blocks(self, kind: BlockKind) -> int:
        return sum(extent.free for extent in self._extents.get(kind, ()))

    def _scattered_bytes(self, wanted: BlockKind | None) -> int:
        """Of free blocks between others, which are of no use to another kind before those have moved together."""
        kinds = (kind for kind in self._extents if kind != wanted)
        return sum(self._free_blocks(kind) * kind.block_bytes for kind in kinds)

    def _make_room(self, kind: BlockKind, count: int) -> None:
        """So many blocks of the kind are free or fit the limit afterwards."""
        if self.limit_bytes is None:
            return
        while True:
            missing_bytes = (count - self._free_blocks(kind)) * kind.block_bytes - self._room_bytes()
            if missing_bytes <= 0:
                return
            scattered_bytes = self._scattered_bytes(kind)
            if missing_bytes <= scattered_bytes:
                self._compact(kind)
                return
            if not self._idle:
                wanted_bytes = count * kind.block_bytes
                raise PoolFull(wanted_bytes, int(wanted_bytes - missing_bytes + scattered_bytes))
            self._evict()

    def _pieces(self, kind: BlockKind, count: int, after: Block | None) -> Iterator[Block]:
        """As few runs as there can be, for which there is room."""
        behind = self._run_behind(kind, after)
        if len(behind) >= count:
            yield from behind[:count]
            return
        runs = [run for extent in self._extents.get(kind, ()) if extent.free for run in _free_runs(extent)]
        fitting = [run for run in runs if len(run) >= count]
        if fitting:
            yield from min(fitting, key=len)[:count]
            return
        if count * kind.block_bytes <= self._room_bytes():
            yield from self._created(kind, count)
            return
        for run in sorted(runs, key=len, reverse=True):
            yield from run[:count]
            count -= len(run[:count])
        if count:
            yield from self._created(kind, count)

    def _created(self, kind: BlockKind, count: int) -> Iterator[Block]:
        """New blocks in one run, or, where no piece of memory is so large, in smaller ones. Raises PoolFull."""
        try:
            extent = self._create(kind, count)
        except PoolFull:
            if count < 2 * LEAST_RUN:
                raise
            yield from self._created(kind, count // 2)
            yield from self._created(kind, count - count // 2)
            return
        yield from extent.blocks

    def _remove_empty(self) -> None:
        for extents in list(self._extents.values()):
            for extent in [extent for extent in extents if extent.free == len(extent.blocks)]:
                self._remove(extent)

    def _run_behind(self, kind: BlockKind, after: Block | None) -> list[Block]:
        if after is None or after.extent.kind != kind:
            return []
        behind: list[Block] = []
        for block in after.extent.blocks[after.index + 1 :]:
            if not _is_free(block):
                break
            behind.append(block)
        return behind

    def _create(self, kind: BlockKind, count: int) -> Extent[M]:
        extent = Extent(kind, count, self._memory.create(kind, count))
        self._extents.setdefault(kind, []).append(extent)
        self.used_bytes += count * kind.block_bytes
        return extent

    def _free(self, block: Block) -> None:
        extent = block.extent
        extent.free += 1
        if extent.free == len(extent.blocks):
            self._remove(extent)

    def _remove(self, extent: Extent[M]) -> None:
        self.used_bytes -= len(extent.blocks) * extent.kind.block_bytes
        same = self._extents[extent.kind]
        same.remove(extent)
        if not same:
            del self._extents[extent.kind]
        del (
            extent.memory
        )  # now: extents and blocks refer to each other, and would keep it until they are collected

    def _evict(self) -> None:
        self._drop_idle(next(iter(self._idle)))

    def _drop_idle(self, block: Block) -> None:
        del self._idle[block]
        self.unname(block)
        self._free(block)

    def _compact(self, wanted: BlockKind | None) -> None:
        """Moves the blocks of extents that are partly free into extents of their number, but for the kind that is
        wanted, whose free blocks are of use."""
        for kind, extents in list(self._extents.items()):
            if kind == wanted:
                continue
            for extent in [extent for extent in extents if extent.free]:
                kept = [block for block in extent.blocks if not _is_free(block)]
                self._move(extent, kept)

    def _move(self, extent: Extent[M], kept: list[Block]) -> None:
        """Where there is no memory for both places, what is kept waits elsewhere until its old place is free."""
        try:
            memory, waits = self._memory.create(extent.kind, len(kept)), False
        except PoolFull:
            memory, waits = self._memory.aside(extent.kind, len(kept)), True
        for start, stop in _neighbours(kept):
            self._memory.copy(extent.memory, kept[start].index, memory, start, stop - start)
        self._remove(extent)
        if waits:
            fresh = self._memory.create(extent.kind, len(kept))
            self._memory.copy(memory, 0, fresh, 0, len(kept))
            memory = fresh
        target = Extent(extent.kind, len(kept), memory)
        self._extents.setdefault(extent.kind, []).append(target)
        self.used_bytes += len(kept) * extent.kind.block_bytes
        target.blocks = kept
        target.free = 0
        for index, block in enumerate(kept):
            block.extent, block.index = target, index
        self.moves += 1


def runs_of(blocks: Sequence[Block]) -> list[tuple[Extent[Any], int, int]]:
    """The table's blocks as (extent, first index, count), neighbours together."""
    return [(blocks[start].extent, blocks[start].index, stop - start) for start, stop in _neighbours(blocks)]


def _neighbours(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of the sequence that lie next to each other in one extent."""
    start = 0
    for at in range(1, len(blocks) + 1):
        before = blocks[at - 1]
        if at == len(blocks) or not (
            blocks[at].extent is before.extent and blocks[at].index == before.index + 1
        ):
            yield start, at
            start = at


def _is_free(block: Block) -> bool:
    return block.references == 0 and block.name is None


def _free_runs(extent: Extent[Any]) -> Iterator[list[Block]]:
    run: list[Block] = []
    for block in extent.blocks:
        if _is_free(block):
            run.append(block)
        elif run:
            yield run
            run = []
    if run:
        yield run
