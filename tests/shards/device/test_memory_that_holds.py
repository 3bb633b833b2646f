"""What fits the limit fits a device that has no byte more, in whatever pieces its memory is."""

import random

import pytest
import torch

from molink.shards.attention import attention
from molink.shards.attention.attention import AttentionRules, attend_sequence
from molink.shards.kv.block_allocator import BlockAllocator
from molink.shards.kv.extents import Block, BlockKind, PoolFull
from molink.shards.kv.kv_memory import KvMemory, LayerLayout
from molink.shards.kv.pool_memory import PoolMemory
from molink.shards.spec import Span

KINDS = (BlockKind((0,), 1), BlockKind((1,), 3))


class Piece:
    """Memory on the device, or on the host, that is free when nothing refers to it."""

    def __init__(self, device: "Device | None", place: int, count: int, size: int) -> None:
        self.device = device
        self.place = place
        self.size = size
        self.content: list[object] = [None] * count

    def __del__(self) -> None:
        if self.device is not None:
            del self.device.taken[self.place]


class Device:
    """So many bytes; without `whole` a piece has to fit between others, as where memory cannot be mapped anew."""

    def __init__(self, size: int, *, whole: bool) -> None:
        self.size = size
        self.whole = whole
        self.taken: dict[int, int] = {}
        self.tickets = 0
        self.waited = 0

    def create(self, kind: BlockKind, count: int) -> Piece:
        size = count * kind.block_bytes
        place = self._place(size)
        if place is None:
            raise PoolFull(size, 0)
        self.taken[place] = size
        return Piece(self, place, count, size)

    def aside(self, kind: BlockKind, count: int) -> Piece:
        self.waited += 1
        return Piece(None, 0, count, count * kind.block_bytes)

    def copy(self, source: Piece, source_index: int, target: Piece, target_index: int, count: int) -> None:
        target.content[target_index : target_index + count] = source.content[
            source_index : source_index + count
        ]

    def _place(self, size: int) -> int | None:
        if self.whole:
            self.tickets += 1
            return self.tickets if sum(self.taken.values()) + size <= self.size else None
        start = 0
        for place, taken in sorted(self.taken.items()):
            if place - start >= size:
                return start
            start = place + taken
        return start if self.size - start >= size else None


@pytest.mark.parametrize("seed", range(8))
def test_what_fits_the_limit_is_there_on_a_device_of_just_so_much(seed: int) -> None:
    draw = random.Random(seed)
    device = Device(240, whole=True)
    allocator: BlockAllocator[Piece] = BlockAllocator(device, 240)
    tables: list[tuple[list[Block], object]] = []
    for step in range(400):
        kind, count = draw.choice(KINDS), draw.randrange(1, 30)
        held = sum(len(blocks) * blocks[0].extent.kind.block_bytes for blocks, _ in tables)
        if held + count * kind.block_bytes <= 240:
            blocks = allocator.allocate(kind, count)  # never PoolFull: the arithmetic promised it
            for block in blocks:
                block.extent.memory.content[block.index] = step
            tables.append((blocks, step))
        elif tables:
            blocks, _ = tables.pop(draw.randrange(len(tables)))
            kept = draw.randrange(len(blocks))
            allocator.release(blocks[kept:])
            if kept:
                tables.append((blocks[:kept], blocks[0].extent.memory.content[blocks[0].index]))
        allocator.check_integrity([blocks for blocks, _ in tables])
        for blocks, content in tables:
            assert {block.extent.memory.content[block.index] for block in blocks} == {content}
    assert device.waited, "blocks had to wait elsewhere while they moved"


def test_where_memory_is_in_pieces_a_table_is_in_several() -> None:
    device = Device(64, whole=False)
    allocator: BlockAllocator[Piece] = BlockAllocator(device, 64)
    first, second, third, fourth = (allocator.allocate(KINDS[0], 16) for _ in range(4))
    allocator.release(first)
    allocator.release(third)
    divided = allocator.allocate(KINDS[0], 32)
    assert len(divided) == 32
    allocator.check_integrity([second, fourth, divided])


def test_a_device_with_less_than_the_limit_is_a_full_pool_and_prefixes_go_first() -> None:
    device = Device(32, whole=True)
    allocator: BlockAllocator[Piece] = BlockAllocator(device, 1000)
    remembered = allocator.allocate(KINDS[0], 20)
    for number, block in enumerate(remembered):
        allocator.name(block, number)
    allocator.release(remembered)
    held = allocator.allocate(KINDS[0], 30)
    with pytest.raises(PoolFull):
        allocator.allocate(KINDS[0], 20)
    allocator.check_integrity([held])


def test_out_of_memory_on_the_device_is_a_full_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(KvMemory, "__init__", none_left)
    memory = PoolMemory(torch.device("cpu"))
    layout = LayerLayout(1, 16, 1, 16, torch.float16, expands=False)
    (table,) = memory.tables_for(Span(0, 1), [layout], 64)
    assert table.kind.block_bytes == 1024
    with pytest.raises(PoolFull, match="4096 bytes of KV cache"):
        memory.create(table.kind, 4)


@pytest.mark.parametrize(
    "rules",
    [
        AttentionRules(None, None, 20.0, None),
        AttentionRules(0.3, 7, 20.0, None),
        AttentionRules(None, None, None, torch.linspace(-1, 1, 4)),
        AttentionRules(None, 5, None, torch.linspace(-1, 1, 4)),
    ],
)
@pytest.mark.parametrize("past", [0, 3, 40])
def test_scores_that_are_written_out_are_so_for_a_few_queries_at_a_time(
    rules: AttentionRules, past: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(past)
    query = torch.randn(1, 4, 23, 16)
    key, value = (torch.randn(1, 2, 23 + past, 16) for _ in range(2))
    expected = attend_sequence(query, key, value, rules)
    sizes: list[int] = []
    definition = attention.attend_by_definition

    def watched(some: torch.Tensor, keys: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(4 * some.shape[1] * some.shape[2] * keys.shape[2])
        return definition(some, keys, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "attend_by_definition", watched)
    monkeypatch.setattr(attention, "_EXACT_SCORES_BYTES", 2048)
    found = attend_sequence(query, key, value, rules)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert len(sizes) > 4
    assert max(sizes) <= 2048


def test_biases_of_positions_are_written_out_for_a_few_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 4, 23, 16)
    key, value = (torch.randn(1, 4, 31, 16) for _ in range(2))
    rules = AttentionRules(None, None, None, None, torch.tensor([0.5, 0.25, 0.125, 0.0625]))
    expected = attend_sequence(query, key, value, rules)
    monkeypatch.setattr(attention, "_EXACT_SCORES_BYTES", 2048)
    torch.testing.assert_close(attend_sequence(query, key, value, rules), expected, atol=1e-5, rtol=1e-5)
