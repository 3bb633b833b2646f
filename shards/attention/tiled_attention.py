"""Attention of many positions to all that comes before them as plain matrix products, of several heads at a time.

Torch's fused kernel for CPUs takes few queries against few keys in each of its products, and the fewer the queries the
fewer it takes. Here thousands of keys are multiplied by all queries: keys by queries, not queries by keys, for a
product with few rows and thousands of columns takes up to twice as long as one with thousands of rows. What the softmax
of such a tile would need is left out as far as it can be: powers of two are taken of the logits as they are, and only
where those are too large or too small for that they are lowered first by what the queries' own keys weigh, or by the
largest of them. All three are softmax, up to rounding.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

TILE_BYTES = 4 * 1024 * 1024
"""Of logits at a time: they are written once and read three times, and are to stay in the processor's cache."""
PLAIN_EXPONENT = 40.0
"""Powers of two are taken of logits as they are where the queries' own keys weigh between 2 to this and 2 to minus
this; what float32 cannot hold of the others is then too little to count."""
LARGEST_WEIGHT = 2.0**64
"""What all keys of a query may weigh: with values of any sensible size far from what float32 can hold."""

Keys = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [1, key heads, keys, dim] that lie together, in any order."""


def attended_with(
    query: Tensor, before: Keys, scaling: float | None, attended: Tensor, weight: Tensor
) -> Tensor:
    """Attention [1, heads, queries, dim] of the queries over keys that come `before` all of them, and over those whose
    result `attended` and logarithm `weight` [1, heads, queries] of what they weigh are known. float32; shapes as in
    `attend_sequence`."""
    _, heads, queries, dim = query.shape
    key_heads = before[0][0].shape[1]
    scaled = query * ((dim**-0.5 if scaling is None else scaling) * math.log2(math.e))
    columns = scaled.reshape(key_heads, heads // key_heads * queries, dim).transpose(1, 2).contiguous()
    known = attended.contiguous().view(key_heads, columns.shape[2], -1)
    exponent = weight.reshape(key_heads, 1, -1) * math.log2(math.e)
    plain = bool(exponent.abs().max() < PLAIN_EXPONENT)
    total, mass = _summed(columns, before, known, exponent, None if plain else exponent)
    if not bool(mass.max() < LARGEST_WEIGHT):
        lowered = _largest(columns, before, exponent)
        total, mass = _summed(columns, before, known, exponent, lowered)
    return total.div_(mass.transpose(1, 2)).view(1, heads, queries, -1)


def _summed(
    columns: Tensor, before: Keys, known: Tensor, exponent: Tensor, lowered: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values [key heads, queries, dim], each as often as its key weighs, and what all keys weigh [key heads, 1,
    queries]: powers of two, `lowered` by so much in the exponent."""
    mass = torch.exp2(exponent if lowered is None else exponent - lowered)
    total = known * mass.transpose(1, 2)
    for part, key, value, tile in _tiles(columns, before):
        logits = torch.bmm(key, columns[part], out=tile)
        weights = (logits if lowered is None else logits.sub_(lowered[part])).exp2_()
        mass[part] += weights.sum(1, keepdim=True)
        total[part].baddbmm_(weights.transpose(1, 2), value)
    return total, mass


def _largest(columns: Tensor, before: Keys, least: Tensor) -> Tensor:
    """[key heads, 1, queries]: of all logits, and `least`."""
    largest = least.clone()
    for part, key, _, logits in _tiles(columns, before):
        torch.bmm(key, columns[part], out=logits)
        torch.maximum(largest[part], logits.amax(1, keepdim=True), out=largest[part])
    return largest


def _tiles(columns: Tensor, before: Keys) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """Some heads, so many of their keys and values [heads, keys, dim], and memory for a tile [heads, keys, queries]."""
    key_heads, _, rows = columns.shape
    threads = min(key_heads, torch.get_num_threads())
    most = max(1, TILE_BYTES // (4 * rows * threads))
    longest = min(most, max(key.shape[2] for key, _ in before))
    each = min(key_heads, max(1, TILE_BYTES // (4 * rows * longest * threads)) * threads)
    memory = columns.new_empty(each * longest * rows)
    for first, stop in _cuts(key_heads, each):
        for key, value in before:
            for start, end in _cuts(key.shape[2], most):
                tile = memory[: (stop - first) * (end - start) * rows].view(stop - first, -1, rows)
                yield slice(first, stop), key[0, first:stop, start:end], value[0, first:stop, start:end], tile


def _cuts(count: int, most: int) -> Iterable[tuple[int, int]]:
    """From and to, in as few equal parts as there can be of at most `most`."""
    parts = -(-count // most)
    return pairwise(count * part // max(1, parts) for part in range(parts + 1))
