"""One step's batch: what a model sees as its cache while it runs the packed new tokens of many sessions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from molink.shards.attention import Rules, attend_sequence, layer_number
from molink.shards.kv_cache import SequenceCache


class PackedBatch(Cache):  # type: ignore[misc] # transformers has no types
    """Stores each session's fresh keys and values in its own cache and attends session by session.

    All caches are of one span. `counts` are the new tokens of each session, packed in this order. What is
    written lies beyond each cache's length until `commit`, so that a failed step leaves the caches as they
    were.
    """

    def __init__(self, caches: Sequence[SequenceCache], counts: Sequence[int]) -> None:
        super().__init__(layers=[])
        self.caches = caches
        self.counts = list(counts)
        self._first_layer = caches[0].span.start
        self._layouts = caches[0].layouts
        self._fresh = [cache.slots(cache.length, count) for cache, count in zip(caches, counts, strict=True)]
        self._past = [
            cache.slots(0, cache.length + count) for cache, count in zip(caches, counts, strict=True)
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the fresh keys and values [1, heads, tokens, dim] of one layer.

        Returns what the layer attends to: of a single session all of it, of several the fresh ones untouched,
        which `attend` replaces; a layer that transforms what it gets receives all sessions' tokens one after
        the other.
        """
        slot = 2 * (layer_idx - self._first_layer)
        if len(self.counts) == 1:
            fresh, past = self._fresh[0], self._past[0]
            fresh[slot].copy_(key_states)
            fresh[slot + 1].copy_(value_states)
            return past[slot], past[slot + 1]
        for views, keys, values in zip(
            self._fresh,
            key_states.split_with_sizes(self.counts, 2),
            value_states.split_with_sizes(self.counts, 2),
            strict=True,
        ):
            views[slot].copy_(keys)
            views[slot + 1].copy_(values)
        if self._layouts[slot // 2].expands:
            return (
                torch.cat([past[slot] for past in self._past], 2),
                torch.cat([past[slot + 1] for past in self._past], 2),
            )
        return key_states, value_states

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: Rules) -> Tensor:
        """Each session's queries over its own keys and values; shapes as in `attend_sequence`, tokens
        packed."""
        if len(self.counts) == 1:
            return attend_sequence(query, key, value, rules)
        index = layer_number(module) - self._first_layer
        if self._layouts[index].expands:
            lengths = [past[0].shape[2] for past in self._past]
            pairs = list(
                zip(key.split_with_sizes(lengths, 2), value.split_with_sizes(lengths, 2), strict=True)
            )
        else:
            pairs = [(past[2 * index], past[2 * index + 1]) for past in self._past]
        queries = query.split_with_sizes(self.counts, 2)
        attended = [attend_sequence(part, *pair, rules) for part, pair in zip(queries, pairs, strict=True)]
        return torch.cat(attended, 2)

    def commit(self) -> None:
        """The step succeeded: the new tokens count."""
        for cache, count in zip(self.caches, self.counts, strict=True):
            cache.length += count

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return query_length, 0
