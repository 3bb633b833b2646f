"""Memory of a KV cache's blocks: what is in a block of each kind, and where it lies."""

from collections.abc import Sequence

import torch

from molink.shards.kv.block_table import BlockTable
from molink.shards.kv.extents import BlockKind, PoolFull
from molink.shards.kv.kv_memory import KvMemory, LayerLayout
from molink.shards.kv.session_state import StateMemory
from molink.shards.spec import KV_BLOCK_TOKENS, STATES_KEPT, Span, most_kv_blocks


class PoolMemory:
    """Makes and fills the memory of extents on one device, for the allocator (`BlockMemory`), and the empty tables of
    sessions, by which it knows the kinds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._layouts: dict[BlockKind, tuple[LayerLayout, ...]] = {}

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
        """An empty table for what the layers keep beside keys and values, a block for each of STATES_KEPT moments; None
        if nothing."""
        own = {layer: layout for layer, layout in zip(span, layouts, strict=True) if layout.states}
        if not own:
            return None
        kind = BlockKind(tuple(own), sum(layout.state_bytes for layout in own.values()), per_session=True)
        self._layouts[kind] = tuple(own.values())
        return BlockTable(kind, None, STATES_KEPT)

    def create(self, kind: BlockKind, count: int) -> KvMemory | StateMemory:
        """Memory of an extent.

        Raises PoolFull where the device has less than was planned, which some other program may have taken: sessions
        can make room for each other then, as if the pool were smaller.
        """
        try:
            return self._made(kind, count, self._device)
        except torch.OutOfMemoryError as error:
            raise PoolFull(count * kind.block_bytes, 0) from error

    def aside(self, kind: BlockKind, count: int) -> KvMemory | StateMemory:
        """Memory of the host for blocks that wait for a place."""
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
        """Blocks from one extent's memory to another's of the same kind."""
        places = (source_index, target_index, count)
        with torch.inference_mode():
            if isinstance(target, StateMemory) and isinstance(source, StateMemory):
                target.copy_from(source, *places)
            elif isinstance(target, KvMemory) and isinstance(source, KvMemory):
                target.copy_from(source, *(place * KV_BLOCK_TOKENS for place in places))
