"""Extents of a KV cache: runs of neighbouring blocks in one piece of memory. Pure: the memory is another's.

Blocks of one kind take each other's place. What is free between others is of no use to another kind before those have
moved together (compaction).
"""

from collections.abc import Hashable, Iterator, Sequence
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


class Extents(Generic[M]):
    """All extents, by kind: made as blocks are needed, gone when all of theirs are free."""

    __slots__ = ("_by_kind", "_memory", "moves", "used_bytes")

    def __init__(self, memory: BlockMemory[M]) -> None:
        self.used_bytes = 0
        """Of all extents, whatever is in them."""
        self.moves = 0
        """How often blocks have moved: places that were looked up before are stale."""
        self._memory = memory
        self._by_kind: dict[BlockKind, list[Extent[M]]] = {}

    def __iter__(self) -> Iterator[Extent[M]]:
        return (extent for same in self._by_kind.values() for extent in same)

    def free_blocks(self, kind: BlockKind) -> int:
        """Of the kind, between others."""
        return sum(extent.free for extent in self._by_kind.get(kind, ()))

    def scattered_bytes(self, wanted: BlockKind | None) -> int:
        """Of free blocks between others, which are of no use to another kind before those have moved together."""
        kinds = (kind for kind in self._by_kind if kind != wanted)
        return sum(self.free_blocks(kind) * kind.block_bytes for kind in kinds)

    def pieces(self, kind: BlockKind, count: int, after: Block | None, room_bytes: float) -> Iterator[Block]:
        """So many blocks that hold nothing, in as few runs as there can be: best right behind `after`, else in an
        extent that is there, else in a new one where `room_bytes` allow it. Raises PoolFull."""
        behind = _run_behind(kind, after)
        if len(behind) >= count:
            yield from behind[:count]
            return
        runs = [run for extent in self._by_kind.get(kind, ()) if extent.free for run in _free_runs(extent)]
        fitting = [run for run in runs if len(run) >= count]
        if fitting:
            yield from min(fitting, key=len)[:count]
            return
        if count * kind.block_bytes <= room_bytes:
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

    def remove_empty(self) -> None:
        """Extents that were made for blocks which nobody got."""
        for extent in [extent for extent in self if extent.free == len(extent.blocks)]:
            self._remove(extent)

    def free(self, block: Block) -> None:
        """The block holds nothing any more."""
        extent = block.extent
        extent.free += 1
        if extent.free == len(extent.blocks):
            self._remove(extent)

    def compact(self, wanted: BlockKind | None) -> None:
        """Moves the blocks of extents that are partly free into extents of their number, but for the kind that is
        wanted, whose free blocks are of use."""
        for kind, extents in list(self._by_kind.items()):
            if kind == wanted:
                continue
            for extent in [extent for extent in extents if extent.free]:
                kept = [block for block in extent.blocks if not is_free(block)]
                self._move(extent, kept)

    def _create(self, kind: BlockKind, count: int) -> Extent[M]:
        extent = Extent(kind, count, self._memory.create(kind, count))
        self._by_kind.setdefault(kind, []).append(extent)
        self.used_bytes += count * kind.block_bytes
        return extent

    def _remove(self, extent: Extent[M]) -> None:
        self.used_bytes -= len(extent.blocks) * extent.kind.block_bytes
        same = self._by_kind[extent.kind]
        same.remove(extent)
        if not same:
            del self._by_kind[extent.kind]
        del (
            extent.memory
        )  # now: extents and blocks refer to each other, and would keep it until they are collected

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
        self._by_kind.setdefault(extent.kind, []).append(target)
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


def is_free(block: Block) -> bool:
    """Whether it holds nothing."""
    return block.references == 0 and block.name is None


def _free_runs(extent: Extent[Any]) -> Iterator[list[Block]]:
    run: list[Block] = []
    for block in extent.blocks:
        if is_free(block):
            run.append(block)
        elif run:
            yield run
            run = []
    if run:
        yield run


def _run_behind(kind: BlockKind, after: Block | None) -> list[Block]:
    if after is None or after.extent.kind != kind:
        return []
    behind: list[Block] = []
    for block in after.extent.blocks[after.index + 1 :]:
        if not is_free(block):
            break
        behind.append(block)
    return behind
