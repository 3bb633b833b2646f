"""What attention remembers of one session: keys and values of every layer of a hop, in memory reserved at
once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from molink.shards.spec import Span


class CacheFull(ValueError):
    """The session has used all tokens that its lease reserved."""

    def __init__(self, wanted_tokens: int, capacity_tokens: int) -> None:
        super().__init__(
            f"this step needs room for {wanted_tokens} tokens but the lease reserved {capacity_tokens}: "
            "reserve more tokens, or end the session"
        )
        self.wanted_tokens = wanted_tokens
        self.capacity_tokens = capacity_tokens


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

    @property
    def bytes_per_token(self) -> int:
        elements = self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return elements * self.dtype.itemsize


class SequenceCache:
    """The KV state of one session on one hop, of fixed capacity.

    Keys and values of equal shape share one tensor [slots, 1, heads, capacity, dim], so that the views that a
    step needs of all layers cost two operations, and attention reads a contiguous row of tokens without a
    copy. Slot 2i is the keys and slot 2i + 1 the values of the span's i-th layer.
    """

    __slots__ = ("_buffers", "_order", "capacity_tokens", "layouts", "length", "nbytes", "span")

    def __init__(
        self, span: Span, layouts: Sequence[LayerLayout], capacity_tokens: int, device: torch.device
    ) -> None:
        if capacity_tokens < 1:
            raise ValueError(f"capacity_tokens must be at least 1, got {capacity_tokens}")
        if len(layouts) != len(span):
            raise ValueError(f"span {span} has {len(span)} layers but {len(layouts)} layouts were given")
        self.span = span
        self.layouts = tuple(layouts)
        self.capacity_tokens = capacity_tokens
        self.length = 0
        shapes = [
            shape
            for layout in layouts
            for shape in (
                (layout.key_heads, layout.key_dim, layout.dtype),
                (layout.value_heads, layout.value_dim, layout.dtype),
            )
        ]
        groups: dict[tuple[int, int, torch.dtype], list[int]] = {}
        for slot, shape in enumerate(shapes):
            groups.setdefault(shape, []).append(slot)
        self._buffers = [
            torch.empty(len(slots), 1, heads, capacity_tokens, dim, dtype=dtype, device=device)
            for (heads, dim, dtype), slots in groups.items()
        ]
        self._order = [slot for slots in groups.values() for slot in slots] if len(groups) > 1 else None
        self.nbytes = sum(buffer.nbytes for buffer in self._buffers)

    def require(self, tokens: int) -> None:
        """Raises CacheFull unless `tokens` more fit."""
        if self.length + tokens > self.capacity_tokens:
            raise CacheFull(self.length + tokens, self.capacity_tokens)

    def slots(self, start: int, tokens: int) -> list[torch.Tensor]:
        """Views [1, heads, tokens, dim] of tokens [start, start + tokens), one for each slot."""
        if self._order is None:
            return list(self._buffers[0].narrow(3, start, tokens).unbind(0))
        views: list[torch.Tensor] = [self._buffers[0]] * len(self._order)
        grouped = (view for buffer in self._buffers for view in buffer.narrow(3, start, tokens).unbind(0))
        for slot, view in zip(self._order, grouped, strict=True):
            views[slot] = view
        return views

    def truncate(self, length: int) -> None:
        """Forgets the tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate a cache of {self.length} tokens to {length}")
        self.length = length

    def export(self, start: int, stop: int) -> bytearray:
        """Tokens [start, stop) of all layers as raw bytes, for a cache of equal layouts elsewhere."""
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"cannot export tokens [{start}, {stop}) of a cache of {self.length}")
        exported = bytearray()
        for buffer in self._buffers:
            part = buffer.narrow(3, start, stop - start).to("cpu").contiguous()
            exported += part.view(torch.uint8).numpy().data if part.numel() else b""
        return exported

    def restore(self, start: int, tokens: int, exported: bytes | bytearray | memoryview) -> None:
        """Writes what `export` of `tokens` tokens gave at position `start`, which becomes this cache's end.

        Raises CacheFull, and ValueError where there would be a gap or the bytes are not as many as they
        should be.
        """
        view = memoryview(exported).cast("B")
        expected = tokens * sum(layout.bytes_per_token for layout in self.layouts)
        if not 0 <= start <= self.length or tokens < 1 or view.nbytes != expected:
            raise ValueError(
                f"{tokens} tokens at position {start} of a cache of {self.length} need {expected} bytes, "
                f"but {view.nbytes} came"
            )
        if start + tokens > self.capacity_tokens:
            raise CacheFull(start + tokens, self.capacity_tokens)
        offset = 0
        for buffer in self._buffers:
            target = buffer.narrow(3, start, tokens)
            size = target.numel() * target.itemsize
            raw = torch.empty(size, dtype=torch.uint8)
            raw.numpy().data[:] = view[offset : offset + size]
            with torch.inference_mode():
                target.copy_(raw.view(target.dtype).view(target.shape))
            offset += size
        self.length = start + tokens
