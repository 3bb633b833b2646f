"""A step of decode rows and chunks of prompts on a GPU: the rows attend together, each chunk by itself."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers.cache_utils import Cache

from molink.shards.attention.attention import AttentionRules, attend_sequence, layer_number
from molink.shards.batching.packed import StepSession
from molink.shards.batching.partial_step import Rows
from molink.shards.paged_attention.paged_rows import PagedBatch

Upload = Callable[[Sequence[int]], Tensor]
"""Numbers as a tensor on the device, without waiting for it."""


class MixedBatch(Cache):  # type: ignore[misc] # transformers has no types
    """What a model sees as its cache: of sessions that decode `single`, of the others their own blocks."""

    bitwise = True

    def __init__(
        self,
        rows: Sequence[Rows],
        single: PagedBatch | None,
        upload: Upload,
        *,
        fuses: bool = False,
    ) -> None:
        """`rows` are those of each session, packed in this order; `single` knows those that decode."""
        super().__init__(layers=[])
        self.fuses = fuses
        self._first_layer = rows[0].cache.span.start
        self._single = single
        self._chunks: list[tuple[StepSession, int, int]] = []
        self._singles: list[tuple[StepSession, int, int]] = []
        start = 0
        for row in rows:
            sessions = self._singles if single is not None and row.decodes else self._chunks
            sessions.append((StepSession(row.cache, row.count), start, start + row.count))
            start += row.count
        self._places = upload([place for _, first, stop in self._singles for place in range(first, stop)])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the fresh keys and values [1, heads, tokens, dim] of one layer, and returns them."""
        if self._single is not None:
            keys, values = (states[:, :, self._places] for states in (key_states, value_states))
            self._single.update(keys, values, layer_idx)
        slot = 2 * (layer_idx - self._first_layer)
        for session, start, stop in self._chunks:
            session.write(slot, key_states[:, :, start:stop])
            session.write(slot + 1, value_states[:, :, start:stop])
        return key_states, value_states

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        """As `packed.PackedBatch.attend`."""
        singles = None
        chunks = self._chunks
        if self._single is not None and self._single.knows(module, rules):
            rows = query[:, :, self._places]
            singles = self._single.attend(module, rows, key, value, rules)
        else:
            chunks = chunks + self._singles
        slot = 2 * (layer_number(module) - self._first_layer)
        parts = []
        for session, start, stop in chunks:
            keys, values = session.read(slot), session.read(slot + 1)
            if session.cache.layouts[slot // 2].expands:
                keys, values = module.expand_kv(keys, values)  # type: ignore[operator] # as `PagedBatch` found it
            parts.append((start, stop, attend_chunk(query[:, :, start:stop], keys, values, rules)))
        attended = query.new_empty(*query.shape[:3], (parts[0][2] if singles is None else singles).shape[3])
        for start, stop, part in parts:
            attended[:, :, start:stop] = part
        if singles is not None:
            attended[:, :, self._places] = singles
        return attended

    def commit(self) -> None:
        """The step succeeded: the new tokens count."""
        for session, _, _ in self._chunks + self._singles:
            session.cache.advance(session.count)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return query_length, 0


def attend_chunk(query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules) -> Tensor:
    """As `attention.attend_sequence`; behind a past by the fused kernel that knows such masks without being given
    one."""
    queries, keys = query.shape[2], key.shape[2]
    alike = key.shape[3] == value.shape[3]
    if not 1 < queries < keys or rules.sliding_window or not rules.plain or not alike:
        return attend_sequence(query, key, value, rules)
    attended: Tensor = functional.scaled_dot_product_attention(
        query, key, value,
        attn_mask=causal_lower_right(queries, keys), scale=rules.scaling, enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return attended
