"""The tensors behind blocks of the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.shards.kv.session_state import StateLayout


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """What one layer's attention hands to its cache for each token. Learnt by running it once, see
    `probe.py`."""

    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype
    expands: bool
    """Whether the layer transforms what the cache returns before it attends, as multi-head latent attention
    does."""
    window: int | None = None
    """How many of the latest tokens, its own included, a token sees; None: all."""
    index_dim: int = 0
    """Of the key, if there is one, by which it chooses what to attend to (DeepSeek-V3.2's sparse attention)."""
    states: tuple[StateLayout, ...] = ()
    """What it keeps of a session beside keys and values; of those it may have none: then there are zero heads."""

    @property
    def bytes_per_token(self) -> int:
        elements = self.key_heads * self.key_dim + self.value_heads * self.value_dim + self.index_dim
        return elements * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Of one session, however long it is."""
        return sum(state.nbytes for state in self.states)


class KvMemory:
    """Keys and values of some layers for a run of tokens.

    Those of equal shape share one tensor [slots, 1, heads, tokens, dim], so that the views that a step needs of all
    layers cost two operations, and attention reads neighbouring tokens without a copy. Slot 2i is the keys and slot
    2i + 1 the values of the i-th layer; behind them are the index keys of layers that have some.
    """

    __slots__ = ("_order", "buffers")

    def __init__(self, layouts: Sequence[LayerLayout], tokens: int, device: torch.device) -> None:
        shapes = [
            shape
            for layout in layouts
            for shape in (
                (layout.key_heads, layout.key_dim, layout.dtype),
                (layout.value_heads, layout.value_dim, layout.dtype),
            )
        ]
        shapes += [(1, layout.index_dim, layout.dtype) for layout in layouts if layout.index_dim]
        groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
        for slot, shape in enumerate(shapes):
            groups.setdefault(shape, []).append(slot)
        self.buffers = [
            torch.empty(len(slots), 1, heads, tokens, dim, dtype=dtype, device=device)
            for (heads, dim, dtype), slots in groups.items()
        ]
        self._order = [slot for slots in groups.values() for slot in slots] if len(groups) > 1 else None

    def slots(self, start: int, tokens: int) -> list[Tensor]:
        """Views [1, heads, tokens, dim] of tokens [start, start + tokens), one for each slot."""
        if self._order is None:
            return list(self.buffers[0].narrow(3, start, tokens).unbind(0))
        views: list[Tensor] = [self.buffers[0]] * len(self._order)
        grouped = (view for buffer in self.buffers for view in buffer.narrow(3, start, tokens).unbind(0))
        for slot, view in zip(self._order, grouped, strict=True):
            views[slot] = view
        return views

    def places(self, start: int, count: int, tokens: int) -> Tensor:
        """[count, 2 * shapes] int64: for each `tokens` tokens from `start` on, and each shape that slots have, the
        address of the first one's vector in the first such slot and head, and how many tokens there are in all."""
        entries = []
        for buffer in self.buffers:
            vector_bytes = buffer.shape[4] * buffer.itemsize
            first = buffer.data_ptr() + start * vector_bytes
            addresses = first + tokens * vector_bytes * torch.arange(count)
            entries += [addresses, torch.full_like(addresses, buffer.shape[3])]
        return torch.stack(entries, 1)

    def copy_from(self, source: "KvMemory", source_start: int, start: int, tokens: int) -> None:
        """Takes over tokens of memory of the same layouts."""
        for theirs, ours in zip(source.buffers, self.buffers, strict=True):
            ours.narrow(3, start, tokens).copy_(theirs.narrow(3, source_start, tokens))


def raw_bytes(views: Sequence[Tensor]) -> bytes:
    """Views [1, heads, tokens, dim] of neighbouring tokens as bytes of [heads, all tokens, dim]."""
    whole = views[0] if len(views) == 1 else torch.cat(list(views), 2)
    whole = whole.to("cpu").contiguous()
    return bytes(whole.view(torch.uint8).numpy().data) if whole.numel() else b""


def write_raw(views: Sequence[Tensor], raw: memoryview) -> None:
    """The reverse: as many bytes as the views have."""
    first = views[0]
    tokens = [view.shape[2] for view in views]
    held = torch.empty(raw.nbytes, dtype=torch.uint8)
    held.numpy().data[:] = raw
    whole = held.view(first.dtype).view(1, first.shape[1], sum(tokens), first.shape[3])
    for view, part in zip(views, whole.split_with_sizes(tokens, 2), strict=True):
        view.copy_(part)
