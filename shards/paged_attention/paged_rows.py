"""What a step's decode rows are, in tensors that stay where they are from step to step."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from molink.shards.attention.attention import AttentionRules, layer_number
from molink.shards.device.device import Device
from molink.shards.device.transfers import Staging
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.kv.kv_pool import KvPool
from molink.shards.paged_attention.latents import attend_latents
from molink.shards.paged_attention.paged import (
    BlockAddresses,
    Logits,
    NotPaged,
    PagedAttention,
    PagedLatentAttention,
    RotaryAngles,
    keeps_latents,
)
from molink.shards.spec import KV_BLOCK_TOKENS, Span


class PagedRows:
    """At most `rows` new tokens of sessions on one span: one of each, or with guesses some, one behind the other.

    Everything is written anew for each step, in two copies: the numbers of all rows in one, and the blocks of those
    rows whose blocks are not what they were.
    """

    def __init__(
        self,
        pool: KvPool,
        span: Span,
        layouts: Sequence[LayerLayout],
        rows: int,
        context_length: int,
        device: Device,
    ) -> None:
        tables = pool.memory.tables_for(span, layouts, context_length)
        self.windows = [table.window for table in tables]
        """Of the tables that a session has."""
        self.latent = keeps_latents(layouts)
        """Whether layers keep latents: keys and values then have slots of their own."""
        self.slots = {
            layer: (index, place if self.latent else 2 * place)
            for index, table in enumerate(tables)
            for place, layer in enumerate(table.kind.layers)
        }
        """For each layer its table, and the slot of its keys there."""
        self._pool = pool
        self._device = device
        self._numbers = Staging((2 + 2 * len(tables), rows), torch.long, device)
        width = -(-context_length // KV_BLOCK_TOKENS)
        entries = 4 if self.latent else 2
        self._blocks = [Staging((rows, entries * width), torch.long, device) for _ in tables]
        self._sent: list[list[Tensor | None]] = [[None] * rows for _ in tables]

    def fill(
        self, caches: Sequence[SequenceCache], counts: Sequence[int], token_ids: Sequence[int] = ()
    ) -> None:
        """The rows are the next so many tokens of these sessions, which have blocks for them; all others are nobody's.

        `token_ids` are one for each, where the span starts the model.
        """
        rows = [
            (cache, cache.length + at)
            for cache, count in zip(caches, counts, strict=True)
            for at in range(count)
        ]
        numbers = [list(token_ids), [position for _, position in rows]]
        whose = [cache for cache, _ in rows]
        for index, window in enumerate(self.windows):
            self._send_blocks(index, whose)
            seen = [self._seen(index, cache, position, window) for cache, position in rows]
            numbers += [[start for start, _ in seen], [stop for _, stop in seen]]
        lines = self._numbers.host().numpy()  # written to in a tenth of the time that torch takes
        lines.fill(0)
        for line, values in zip(lines, numbers, strict=True):
            line[: len(values)] = values
        self._numbers.send()

    def _send_blocks(self, index: int, caches: Sequence[SequenceCache]) -> None:
        """The blocks of rows whose blocks are not what they were go to the device. Raises ValueError where a session
        has none: its row would keep the addresses of whoever had it before."""
        sent, moved = self._sent[index], list[tuple[int, Tensor]]()
        for row, cache in enumerate(caches):
            places = self._pool.places(cache.tables[index])
            if not len(places):
                raise ValueError(f"the session of row {row} is without blocks")
            if sent[row] is not places:
                sent[row] = places
                moved.append((row, places.view(-1)))
        if moved:
            self._blocks[index].send_rows(moved)

    def _seen(self, index: int, cache: SequenceCache, position: int, window: int | None) -> tuple[int, int]:
        """The tokens of its table that a session's token at that position sees."""
        stop = position + 1 - cache.tables[index].first * KV_BLOCK_TOKENS
        return (0 if window is None else max(0, stop - window)), stop

    def wait(self) -> None:
        """Until what was launched for them is done."""
        self._device.wait()

    def token_ids(self, rows: int) -> Tensor:
        """[1, rows] of the first rows, in memory that stays."""
        return self._numbers.on_device[:1, :rows]

    def positions(self, rows: int) -> Tensor:
        """[1, rows] where they stand in their sequences, in memory that stays."""
        return self._numbers.on_device[1:2, :rows]

    def places(self, rows: int) -> list[BlockAddresses]:
        """For each table, in memory that stays."""
        numbers = self._numbers.on_device
        return [
            BlockAddresses(blocks.on_device[:rows], numbers[2 + 2 * index : 4 + 2 * index, :rows])
            for index, blocks in enumerate(self._blocks)
        ]


class PagedBatch(Cache):  # type: ignore[misc] # transformers has no types
    """What a model sees as its cache while it runs the first rows: keys and values go and come by address."""

    bitwise = True

    def __init__(
        self,
        attention: PagedAttention,
        rows: PagedRows,
        count: int,
        *,
        latents: PagedLatentAttention | None = None,
        fuses: bool = False,
    ) -> None:
        super().__init__(layers=[])
        self.fuses = fuses
        self._latents = latents if rows.latent else None
        self._turned: tuple[RotaryAngles, Tensor] | None = None
        """Of the layer that is under way, and its keys."""
        self._attention = attention
        self._slots = rows.slots
        self._windows = rows.windows
        self._places = rows.places(count)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the fresh keys and values [1, heads, rows, dim] of one layer, and returns them."""
        table, slot = self._slots[layer_idx]
        if self._latents is not None:
            self._latents.store(key_states, value_states, self._places[table], slot)
            return key_states, value_states
        waiting, self._turned = self._turned, None
        if waiting is None:
            self._attention.store(key_states, value_states, self._places[table], slot)
            return key_states, value_states
        turned, keys = waiting
        if keys is not key_states:
            raise NotPaged(f"layer {layer_idx} changes keys between their rotation and the cache")
        self._attention.rotate_and_store(turned, keys, value_states, self._places[table], slot)
        return key_states, value_states

    def rotate_when_stored(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """Queries and keys [1, heads, rows, dim], not turned yet, are turned by [1, rows, dim] when the next `update`
        stores these keys."""
        self._turned = RotaryAngles(query, cos, sin), key

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,  # noqa: ARG002 - it is in the batch's blocks
        rules: AttentionRules,
    ) -> Tensor:
        """As `packed.PackedBatch.attend`. Raises NotPaged."""
        table, slot = self._slots[layer_number(module)]
        if not self.knows(module, rules):
            raise NotPaged(f"layer {layer_number(module)} attends in a way of its own")
        scaling = query.shape[3] ** -0.5 if rules.scaling is None else rules.scaling
        if self._latents is not None:
            return attend_latents(self._latents, module, query, self._places[table], slot, scaling)
        logits = Logits(scaling, rules.softcap, rules.sinks)
        return self._attention.attend(query, self._places[table], slot, key.shape[1], logits)

    def knows(self, module: nn.Module, rules: AttentionRules) -> bool:
        """Whether the layer attends as paged attention does: without biases, in its table's window; to latents, in no
        other way than by scaled products."""
        table, _ = self._slots[layer_number(module)]
        if self._latents is not None and not rules.plain:
            return False
        return rules.slopes is None and (rules.sliding_window or None) == self._windows[table]

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return query_length, 0
