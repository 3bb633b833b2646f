"""Where the keys and values of sessions with few new tokens lie, as the compiled library reads them."""

from array import array
from collections.abc import Sequence

import torch

from molink.shards.kv.kv_cache import SequenceCache

_RUN_FIELDS = 5
"""Of `run` in `few_rows.c`: address, bytes of a slot, of a head, of a token, and tokens."""


class TokenContexts:
    """`context` and `run` of `few_rows.c` for the layers of one table: for each new token all of its session up to
    it. Valid until blocks move, as a step's views are."""

    __slots__ = ("_contexts", "_runs", "address", "dim", "dtype", "heads")

    def __init__(self, runs: "array[int]", counts: Sequence[tuple[int, int]], like: torch.Tensor) -> None:
        """`runs` of all new tokens, one after the other; `counts`: how many runs and tokens each has. `like` is memory
        [slots, 1, heads, tokens, dim] of one of them."""
        self._runs = runs
        self._contexts = array("q")
        at = runs.buffer_info()[0]
        for count, tokens in counts:
            self._contexts.extend((at, count, tokens))
            at += count * _RUN_FIELDS * runs.itemsize
        self.address = self._contexts.buffer_info()[0]
        self.heads, self.dim, self.dtype = like.shape[2], like.shape[4], like.dtype


def token_contexts(
    caches: Sequence[SequenceCache], new_tokens: Sequence[int], table: int
) -> TokenContexts | None:
    """Of the sessions' tables of this number; None where keys and values are of several shapes."""
    runs, counts, like = array("q"), [], None
    rows = [
        (cache, cache.length + at + 1)
        for cache, count in zip(caches, new_tokens, strict=True)
        for at in range(count)
    ]
    for cache, length in rows:
        found = cache.runs(table, length)
        for memory, start, tokens in found:
            if len(memory.buffers) > 1:
                return None
            like = memory.buffers[0]
            _, _, heads, held, dim = like.shape
            token_bytes = dim * like.itemsize
            head_bytes = held * token_bytes
            first = like.data_ptr() + start * token_bytes
            runs.extend((first, heads * head_bytes, head_bytes, token_bytes, tokens))
        counts.append((len(found), sum(tokens for _, _, tokens in found)))
    return None if like is None else TokenContexts(runs, counts, like)
