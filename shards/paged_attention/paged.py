"""Decode rows of many sessions in one call per layer: attention that finds keys and values by the blocks' addresses.

Blocks lie wherever the pool put them, in extents that come, go and move. What runs on the device therefore takes no
tensors of the pool but a table of addresses, which is written anew before each step: so a recorded step (see
`decode.py`) stays valid whatever happens to the extents.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from molink.shards.kv.kv_memory import LayerLayout

Shape: TypeAlias = tuple[int, int, torch.dtype]
"""Heads, numbers of a vector, and their dtype."""


class NotPaged(ValueError):
    """A layer attends by rules that paged attention does not know."""


class BlockAddresses(NamedTuple):
    """Block addresses of the keys and values of layers that forget alike. Both tensors are on the device."""

    blocks: Tensor
    """[rows, 2 * width] int64: for each block of a row the address of its first key of slot 0, head 0, and the tokens
    of its extent. Slot 2i holds the keys and 2i + 1 the values of the i-th of the layers; within a slot a head's
    vectors lie one after the other. Of latents [rows, 4 * width]: the same twice, for latents and for keys beside them,
    each of the i-th layer in slot i."""
    bounds: Tensor
    """[2, rows] int64: the tokens [start, stop) that a row sees, counted from its first block; the last is its own. A
    row of nobody has stop 0."""


class Logits(NamedTuple):
    """How a layer makes logits of products of queries and keys."""

    scaling: float
    softcap: float | None = None
    """Logits l become softcap * tanh(l / softcap)."""
    sinks: Tensor | None = None
    """[heads] logits of a position that takes weight and gives nothing."""


class RotaryAngles(NamedTuple):
    """Rotary angles (Su et al., "RoFormer", 2021), by which positions turn queries and keys: each number x with the
    one y half a vector on becomes x cos - y sin, and y becomes y cos + x sin. Products are
    rounded before they are added."""

    query: Tensor
    """[1, heads, rows, dim]"""
    cos: Tensor
    """[1, rows, dim]"""
    sin: Tensor


class PagedAttention(Protocol):
    """Attends for rows of one new token each. No call waits for the device."""

    def store(self, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int) -> None:
        """Writes the keys [1, key heads, rows, dim] to `slot` and the values to the next, at each row's last token."""
        ...

    def rotate_and_store(
        self, turned: RotaryAngles, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int
    ) -> None:
        """As `store`, of the keys as their positions turn them; the queries are turned where they lie."""
        ...

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        """Queries [1, heads, rows, dim] over what each row sees in `slot` and the next; as many come back. A row of
        nobody gets zeros."""
        ...


class PagedLatentAttention(Protocol):
    """Attends for rows of one new token each to latents: of each token one vector, which is its key and its value for
    all heads, and one further key that its position has turned (DeepSeek-V2, 2024, section 2.1). No call waits."""

    def store(self, latents: Tensor, keys: Tensor, places: BlockAddresses, slot: int) -> None:
        """Writes latents [1, 1, rows, rank] and keys [1, 1, rows, dim] to `slot`, at each row's last token."""
        ...

    def attend(
        self, query: Tensor, turned: Tensor, places: BlockAddresses, slot: int, scaling: float
    ) -> Tensor:
        """Queries [heads, rows, rank] of latents and [heads, rows, dim] of keys, whose products are added, over what
        each row sees in `slot`: [heads, rows, rank]. A row of nobody gets zeros."""
        ...


def pages(layouts: Sequence[LayerLayout]) -> bool:
    """Whether rows on these layers can be attended to by address: keys and values alike, attended to as stored."""
    keys, values = _shapes(layouts)
    expand = any(layout.expands for layout in layouts)
    return len(keys | values) == 1 and not expand and not _keep_more(layouts)


def keeps_latents(layouts: Sequence[LayerLayout]) -> bool:
    """Whether rows on these layers could be attended to as `PagedLatentAttention` does: each layer expands one vector
    of a token to keys and values of all heads."""
    keys, values = _shapes(layouts)
    single = all(layout.expands and layout.key_heads == layout.value_heads == 1 for layout in layouts)
    return single and len(keys) == len(values) == 1 and keys != values and not _keep_more(layouts)


def _shapes(layouts: Sequence[LayerLayout]) -> tuple[set[Shape], set[Shape]]:
    """Of keys, and of values."""
    keys = {(layout.key_heads, layout.key_dim, layout.dtype) for layout in layouts}
    values = {(layout.value_heads, layout.value_dim, layout.dtype) for layout in layouts}
    return keys, values


def _keep_more(layouts: Sequence[LayerLayout]) -> bool:
    return any(layout.states or layout.index_dim for layout in layouts)
