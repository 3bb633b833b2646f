"""Attention of many positions as plain matrix products, of several heads at a time.

Torch's fused kernel for CPUs takes few queries against few keys in each of its products, and the fewer the queries the
fewer it takes: behind a long context, 50 to 200 queries cost it a fifth to a third more than products do of all these
queries against thousands of keys, one head to each thread.
"""

import torch
from torch import Tensor

TILE_BYTES = 8 * 1024 * 1024
"""Of logits at a time: they are written once and read four times, and are to stay in the processor's cache."""


def most_keys(query: Tensor, key_heads: int) -> int:
    """How many keys fit a tile with all queries [1, heads, queries, dim], where each thread has a key head."""
    rows = query.shape[1] // key_heads * query.shape[2]
    return max(1, TILE_BYTES // (4 * rows * min(key_heads, torch.get_num_threads())))


def weighed_in_tiles(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, *, fresh: bool
) -> tuple[Tensor, Tensor]:
    """Attention [1, heads, queries, dim] over keys, float32, and the logarithm [1, heads, queries] of what they weigh.
    Shapes as in `attend_sequence`. `fresh`: the last of them are the queries' own; else all come before the queries."""
    _, heads, queries, dim = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    scaled = query * (dim**-0.5 if scaling is None else scaling)
    rows = scaled.reshape(key_heads, heads // key_heads * queries, dim)
    attended = query.new_empty(key_heads, rows.shape[1], value.shape[3])
    weights = query.new_empty(key_heads, rows.shape[1])
    each = _heads_at_once(key_heads, 4 * rows.shape[1] * keys)
    later = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu_(1)
    tile = query.new_empty(each, rows.shape[1], keys)
    for first in range(0, key_heads, each):
        part = slice(first, min(first + each, key_heads))
        logits = tile[: part.stop - first]
        torch.bmm(rows[part], key[0, part].transpose(1, 2), out=logits)
        if fresh:
            own = logits.view(len(logits), -1, queries, keys)[..., keys - queries :]
            own.masked_fill_(later, -torch.inf)
        largest = logits.amax(-1)
        torch.softmax(logits, -1, out=logits)
        # the largest share is exp(largest - weight), and at least one over the keys: its logarithm is finite
        torch.sub(largest, logits.amax(-1).log_(), out=weights[part])
        torch.bmm(logits, value[0, part], out=attended[part])
    return attended.view(1, heads, queries, -1), weights.view(1, heads, queries)


def _heads_at_once(key_heads: int, head_bytes: int) -> int:
    """As many as fit a tile; as many for each thread, where there are so many."""
    threads = min(key_heads, torch.get_num_threads())
    fit = min(key_heads, TILE_BYTES // head_bytes)
    return max(threads, fit // threads * threads)
