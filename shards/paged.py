"""Decode rows of many sessions in one call per layer: attention that finds keys and values by the blocks' addresses.

Blocks lie wherever the pool put them, in extents that come, go and move. What runs on the device therefore takes no
tensors of the pool but a table of addresses, which is written anew before each step: so a recorded step (see
`decode.py`) stays valid whatever happens to the extents.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from molink.shards.kv_memory import LayerLayout


class Places(NamedTuple):
    """Where rows find the keys and values of layers that forget alike. Both tensors are on the device."""

    blocks: Tensor
    """[rows, 2 * width] int64: for each block of a row the address of its first key of slot 0, head 0, and the tokens
    of its extent. Slot 2i holds the keys and 2i + 1 the values of the i-th of the layers; within a slot a head's
    vectors lie one after the other."""
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


class Turned(NamedTuple):
    """By how much positions turn queries and keys (Su et al., "RoFormer", 2021): each number x with the one y half a
    vector on becomes x cos - y sin, and y becomes y cos + x sin. Products are rounded before they are added."""

    query: Tensor
    """[1, heads, rows, dim]"""
    cos: Tensor
    """[1, rows, dim]"""
    sin: Tensor


class PagedAttention(Protocol):
    """Attends for rows of one new token each. No call waits for the device."""

    def store(self, keys: Tensor, values: Tensor, places: Places, slot: int) -> None:
        """Writes the keys [1, key heads, rows, dim] to `slot` and the values to the next, at each row's last token."""
        ...

    def rotate_and_store(
        self, turned: Turned, keys: Tensor, values: Tensor, places: Places, slot: int
    ) -> None:
        """As `store`, of the keys as their positions turn them; the queries are turned where they lie."""
        ...

    def attend(self, query: Tensor, places: Places, slot: int, key_heads: int, logits: Logits) -> Tensor:
        """Queries [1, heads, rows, dim] over what each row sees in `slot` and the next; as many come back. A row of
        nobody gets zeros."""
        ...


def pages(layouts: Sequence[LayerLayout]) -> bool:
    """Whether rows on these layers can be attended to by address: keys and values alike, attended to as stored."""
    shapes = {
        shape
        for layout in layouts
        for shape in (
            (layout.key_heads, layout.key_dim, layout.dtype),
            (layout.value_heads, layout.value_dim, layout.dtype),
        )
    }
    others = (layout.expands or layout.states or layout.index_dim for layout in layouts)
    return len(shapes) == 1 and not any(others)
