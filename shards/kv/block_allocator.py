"""Which blocks of the KV cache belong to whom. Pure: the memory behind them is another's, see `kv_pool.py`.

A block holds the keys and values of a fixed number of tokens (`spec.KV_BLOCK_TOKENS`) in a fixed set of layers: its
kind. Blocks live in extents, runs of neighbours in one piece of memory, so that a table that got all its blocks at
once is attended to without a copy. What a table shares with others it refers to; what nobody refers to but has the
name of a prefix (vLLM's automatic prefix caching: Kwon et al., SOSP 2023, section 4.4) stays until memory is short,
least recently used first out.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic

from molink.shards.kv.extents import Block, BlockKind, BlockMemory, Extents, M, PoolFull, is_free


class BlockAllocator(Generic[M]):
    """Extents of at most `limit_bytes` together (None: without a limit), and the names of shared blocks."""

    def __init__(self, memory: BlockMemory[M], limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.extents = Extents(memory)
        self._named: dict[tuple[BlockKind, Hashable], Block] = {}
        self._idle: OrderedDict[Block, None] = OrderedDict()

    @property
    def used_bytes(self) -> int:
        """Of all extents, whatever is in them."""
        return self.extents.used_bytes

    def allocate(self, kind: BlockKind, count: int, after: Block | None = None) -> list[Block]:
        """Refers to `count` blocks that hold nothing: in one run where that can be, best right behind `after`.

        Raises PoolFull, and then only prefixes that nobody used are gone.
        """
        self._make_room(kind, count)
        while True:
            try:
                blocks = list(self.extents.pieces(kind, count, after, self._room_bytes()))
                break
            except PoolFull:  # there is less memory than the limit says
                self.extents.remove_empty()
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

    def find_each(self, kind: BlockKind, names: Iterable[Hashable]) -> list[Block]:
        """The blocks of these names, up to the first that is not there."""
        found: list[Block] = []
        for name in names:
            block = self._named.get((kind, name))
            if block is None:
                break
            found.append(block)
        return found

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
                self.extents.free(block)
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
        while self._room_bytes() + self.extents.scattered_bytes(None) < 0 and self._idle:
            self._evict()
        if self._room_bytes() < 0:
            self.extents.compact(None)
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
        extents = list(self.extents)
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
            *("an extent miscounts" for e in extents if e.free != sum(map(is_free, e.blocks))),
            *("an empty extent is kept" for e in extents if e.free == len(e.blocks)),
        ]
        if self.used_bytes != sum(len(extent.blocks) * extent.kind.block_bytes for extent in extents):
            faults.append("the bytes of the extents do not add up")
        if faults:
            raise RuntimeError(f"the KV cache is inconsistent: {'; '.join(sorted(set(faults)))}")

    def _room_bytes(self) -> float:
        return float("inf") if self.limit_bytes is None else self.limit_bytes - self.used_bytes

    def _make_room(self, kind: BlockKind, count: int) -> None:
        """So many blocks of the kind are free or fit the limit afterwards."""
        if self.limit_bytes is None:
            return
        while True:
            missing_bytes = (count - self.extents.free_blocks(kind)) * kind.block_bytes - self._room_bytes()
            if missing_bytes <= 0:
                return
            scattered_bytes = self.extents.scattered_bytes(kind)
            if missing_bytes <= scattered_bytes:
                self.extents.compact(kind)
                return
            if not self._idle:
                wanted_bytes = count * kind.block_bytes
                raise PoolFull(wanted_bytes, int(wanted_bytes - missing_bytes + scattered_bytes))
            self._evict()

    def _evict(self) -> None:
        self._drop_idle(next(iter(self._idle)))

    def _drop_idle(self, block: Block) -> None:
        del self._idle[block]
        self.unname(block)
        self.extents.free(block)
