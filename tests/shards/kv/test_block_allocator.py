"""Whatever is taken, shared, named and released, the books agree with the tables and with what was written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from support.properties import examples

from molink.shards.kv.block_allocator import BlockAllocator
from molink.shards.kv.extents import Block, BlockKind, PoolFull, runs_of

KINDS = (BlockKind((0, 1), 10), BlockKind((2,), 7))


class Lists:
    """Memory of extents as lists."""

    def create(self, kind: BlockKind, count: int) -> list[object]:  # noqa: ARG002 - the protocol's
        return [None] * count

    def copy(
        self, source: list[object], source_index: int, target: list[object], target_index: int, count: int
    ) -> None:
        target[target_index : target_index + count] = source[source_index : source_index + count]


def allocator(limit_bytes: int | None = None) -> BlockAllocator[list[object]]:
    return BlockAllocator(Lists(), limit_bytes)


def test_blocks_taken_at_once_are_neighbours_and_those_behind_a_table_continue_it() -> None:
    books = allocator()
    (kind, _) = KINDS
    blocks = books.allocate(kind, 6)
    assert len(runs_of(blocks)) == 1
    books.release(blocks[3:])
    more = books.allocate(kind, 3, after=blocks[2])
    assert len(runs_of(blocks[:3] + more)) == 1


def test_a_full_pool_refuses_and_takes_nothing() -> None:
    books = allocator(100)
    held = books.allocate(KINDS[0], 8)
    with pytest.raises(PoolFull) as caught:
        books.allocate(KINDS[0], 3)
    assert (caught.value.wanted_bytes, caught.value.free_bytes) == (30, 20)
    books.check_integrity([held])


def test_named_blocks_outlive_their_session_and_the_ends_of_the_oldest_go_first() -> None:
    books = allocator(100)
    kind = KINDS[0]
    old, new = books.allocate(kind, 5), books.allocate(kind, 5)
    for name, block in enumerate(old + new):
        books.name(block, name)
    books.release(old)
    books.release(new)
    assert books.used_bytes == 100
    books.allocate(kind, 3)
    assert [books.find(kind, name) is not None for name in range(10)] == [True] * 2 + [False] * 3 + [True] * 5


def test_used_blocks_are_never_taken_for_others() -> None:
    books = allocator(100)
    kind = KINDS[0]
    first = books.allocate(kind, 4)
    for name, block in enumerate(first):
        books.name(block, name)
    books.refer(first[:2])
    books.release(first)
    others = books.allocate(kind, 8)
    assert set(others).isdisjoint(first[:2])
    assert [books.find(kind, name) for name in range(4)] == [*first[:2], None, None]


def test_free_blocks_among_used_ones_make_room_for_another_kind() -> None:
    books = allocator(100)
    wide, narrow = KINDS
    table = books.allocate(wide, 10)
    table[2].extent.memory[2] = "kept"
    books.release(table[:2] + table[3:])
    assert books.used_bytes == 100
    others = books.allocate(narrow, 12)
    assert table[2].extent.memory[table[2].index] == "kept"
    books.check_integrity([[table[2]], others])


def test_a_lower_limit_drops_what_nobody_uses_and_keeps_the_rest() -> None:
    books = allocator(200)
    kind = KINDS[0]
    used, idle = books.allocate(kind, 8), books.allocate(kind, 8)
    books.name(idle[0], "idle")
    books.release(idle)
    books.release(used[4:])
    assert books.limit(40)
    assert books.used_bytes == 40
    assert not books.limit(30)
    books.check_integrity([used[:4]])


class Tables(RuleBasedStateMachine):
    """Tables that grow, share, shrink and end under a limit, each block holding what its table wrote there."""

    tables = Bundle("tables")

    @initialize(limit=st.one_of(st.none(), st.integers(0, 300)))
    def start(self, limit: int | None) -> None:
        self.books = allocator(limit)
        self.held: list[tuple[BlockKind, list[Block], list[object]]] = []
        self.names = 0

    @rule(target=tables, kind=st.sampled_from(KINDS), count=st.integers(1, 12))
    def begin(self, kind: BlockKind, count: int) -> object:
        table: tuple[BlockKind, list[Block], list[object]] = (kind, [], [])
        self.held.append(table)
        self.extend(table, count)
        return table

    @rule(table=tables, count=st.integers(1, 12))
    def extend(self, table: tuple[BlockKind, list[Block], list[object]], count: int) -> None:
        kind, blocks, written = table
        before = list(blocks)
        try:
            taken = self.books.allocate(kind, count, blocks[-1] if blocks else None)
        except PoolFull:
            assert blocks == before
            return
        assert all(block.references == 1 and block.name is None for block in taken)
        for block in taken:
            self.names += 1
            block.extent.memory[block.index] = self.names
            blocks.append(block)
            written.append(self.names)

    @rule(table=tables, data=st.data())
    def name(self, table: tuple[BlockKind, list[Block], list[object]], data: st.DataObject) -> None:
        _, blocks, written = table
        if blocks:
            at = data.draw(st.integers(0, len(blocks) - 1))
            self.books.name(blocks[at], written[at])

    @rule(target=tables, table=tables)
    def share(self, table: tuple[BlockKind, list[Block], list[object]]) -> object:
        kind, _, written = table
        found: list[Block] = []
        for name in written:
            block = self.books.find(kind, name)
            if block is None:
                break
            found.append(block)
        self.books.refer(found)
        shared = (kind, found, written[: len(found)])
        self.held.append(shared)
        return shared

    @rule(table=consumes(tables))
    def end(self, table: tuple[BlockKind, list[Block], list[object]]) -> None:
        self.books.release(table[1])
        self.held = [one for one in self.held if one is not table]

    @rule(limit=st.one_of(st.none(), st.integers(0, 300)))
    def change_limit(self, limit: int | None) -> None:
        fits = self.books.limit(limit)
        distinct = {block for _, blocks, _ in self.held for block in blocks}
        needed = sum(block.extent.kind.block_bytes for block in distinct)
        assert fits == (limit is None or needed <= limit)

    @invariant()
    def books_agree(self) -> None:
        self.books.check_integrity([blocks for _, blocks, _ in self.held])
        for _, blocks, written in self.held:
            assert [block.extent.memory[block.index] for block in blocks] == written

    def teardown(self) -> None:
        for _, blocks, _ in self.held:
            self.books.release(blocks)
        self.books.limit(0)
        assert self.books.used_bytes == 0


TestTables = Tables.TestCase
TestTables.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@given(counts=st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_what_nobody_refers_to_takes_no_memory(counts: list[int]) -> None:
    books = allocator()
    tables = [books.allocate(KINDS[index % 2], count) for index, count in enumerate(counts)]
    assert books.used_bytes == sum(KINDS[index % 2].block_bytes * n for index, n in enumerate(counts))
    for table in tables:
        books.release(table)
    assert books.used_bytes == 0


def test_a_wrong_count_of_references_is_found() -> None:
    books = allocator()
    blocks = books.allocate(KINDS[0], 2)
    with pytest.raises(RuntimeError, match="references"):
        books.check_integrity([blocks[:1]])
