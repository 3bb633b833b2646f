"""Paged attention of decode rows on a GPU: three kernels in Triton, which torch for CUDA brings along on Linux.
Imported only where there is such a device.

A row attends to its blocks in several splits that run side by side and are merged by their log-sum-exp (Dao et al.,
"Flash-Decoding for long-context inference", 2023): one row alone would keep few of the device's processors busy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.paged import Places
from molink.shards.paged_rows import NotPaged
from molink.shards.paged_tiles import LEAST_SHARED_BYTES, query_rows, tile_for
from molink.shards.spec import KV_BLOCK_TOKENS

_MOST_SPLITS = 32
_PROGRAMS_PER_PROCESSOR = 2
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def shared_bytes_of(device: int) -> int:
    """Shared memory that a program may have on the CUDA device of this number: what Triton itself holds kernels to."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


class TritonAttention:
    """`paged.PagedAttention` on a CUDA device."""

    def __init__(self, processors: int, shared_bytes: int = LEAST_SHARED_BYTES) -> None:
        """`processors`: the device's streaming multiprocessors; `shared_bytes`: what it gives one program at most."""
        self._processors = processors
        self._shared_bytes = shared_bytes

    def store(self, keys: Tensor, values: Tensor, places: Places, slot: int) -> None:
        _, heads, rows, dim = keys.shape
        _store[(rows, heads)](
            keys, values, places.blocks, places.bounds, slot,
            keys.stride(2), keys.stride(1), values.stride(2), values.stride(1),
            places.blocks.stride(0), places.bounds.stride(0),
            HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), BLOCK=KV_BLOCK_TOKENS,
            TYPE=_TYPES[keys.dtype], num_warps=1,
        )  # fmt: skip

    def attend(self, query: Tensor, places: Places, slot: int, key_heads: int, scaling: float) -> Tensor:
        _, heads, rows, dim = query.shape
        group = heads // key_heads
        tile = tile_for(dim, group, query.itemsize, self._shared_bytes)
        if tile is None:
            raise NotPaged(
                f"heads of {dim} in {query.dtype} do not fit the card's {self._shared_bytes} bytes of shared memory"
            )
        splits = self._splits(rows * key_heads)
        out = query.new_empty(rows, heads, dim)
        parts = query.new_empty((rows, heads, splits, dim), dtype=torch.float32) if splits > 1 else out
        weights = query.new_empty((rows, heads, splits), dtype=torch.float32)
        padded = triton.next_power_of_2(dim)
        _attend[(rows, key_heads, splits)](
            query, parts, weights, places.blocks, places.bounds, slot, scaling,
            query.stride(2), query.stride(1), places.blocks.stride(0), places.bounds.stride(0),
            HEADS=key_heads, GROUP=group, QUERIES=query_rows(group),
            DIM=dim, PADDED_DIM=padded, BLOCK=KV_BLOCK_TOKENS, TILE=tile.tokens, SPLITS=splits,
            TYPE=_TYPES[query.dtype], num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
        if splits > 1:
            _merge[(rows, heads)](parts, weights, out, DIM=dim, PADDED_DIM=padded, SPLITS=splits, num_warps=2)
        return out.transpose(0, 1)[None]

    def _splits(self, programs: int) -> int:
        """Into how many parts each row's keys are cut: a power of two, so that the device is full."""
        wanted = self._processors * _PROGRAMS_PER_PROCESSOR // programs
        return min(_MOST_SPLITS, 1 << max(0, wanted.bit_length() - 1))


@triton.jit
def _vectors(
    blocks, row, width, slot, head, tokens, seen,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """For each of a table's `tokens` where its key (or, in an odd slot, its value) of one head begins."""
    entries = blocks + (row * width + tokens // BLOCK * 2)
    addresses = tl.load(entries, mask=seen, other=0)
    extent_tokens = tl.load(entries + 1, mask=seen, other=0)
    origin = blocks.to(tl.pointer_type(TYPE), bitcast=True)
    from_origin = (addresses - blocks.to(tl.int64)) // (TYPE.primitive_bitwidth // 8)
    within = ((slot * HEADS + head) * extent_tokens + tokens % BLOCK) * DIM
    return origin + tl.multiple_of(from_origin, 16) + within


@triton.jit(do_not_specialize=["slot"])
def _store(
    keys, values, blocks, bounds, slot,
    key_row, key_head, value_row, value_head, width, columns,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One row's key and value of one head; of a row that sees nothing, nothing."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.load(bounds + columns + row) - 1
    if token >= 0:
        dims = tl.arange(0, PADDED_DIM)
        real = dims < DIM
        one = tl.zeros([1], tl.int64) + token
        key = tl.load(keys + row * key_row + head * key_head + dims, mask=real)
        value = tl.load(values + row * value_row + head * value_head + dims, mask=real)
        there = _vectors(blocks, row, width, slot, head, one, one >= 0, HEADS, DIM, BLOCK, TYPE)
        tl.store(there[:, None] + dims[None], key[None], mask=real[None])
        there = _vectors(blocks, row, width, slot + 1, head, one, one >= 0, HEADS, DIM, BLOCK, TYPE)
        tl.store(there[:, None] + dims[None], value[None], mask=real[None])


@triton.jit(do_not_specialize=["slot"])
def _attend(
    query, parts, weights, blocks, bounds, slot, scaling,
    query_row, query_head, width, columns,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The query heads of one row that share a key head, over one split of its keys."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(bounds + row), tl.load(bounds + columns + row)
    share = tl.cdiv(tl.cdiv(stop - start, SPLITS), TILE) * TILE
    first = start + split * share
    last = tl.minimum(first + share, stop)

    group, dims = tl.arange(0, QUERIES), tl.arange(0, PADDED_DIM)
    real = dims < DIM
    wanted = group < GROUP
    heads = head * GROUP + group
    asked = query + row * query_row + heads[:, None] * query_head + dims[None]
    queries = tl.load(asked, mask=wanted[:, None] & real[None], other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    for begin in range(first, last, TILE):
        tokens = begin + tl.arange(0, TILE)
        seen = tokens < last
        mask = seen[:, None] & real[None]
        there = _vectors(blocks, row, width, slot, head, tokens, seen, HEADS, DIM, BLOCK, TYPE)
        keys = tl.load(there[:, None] + dims[None], mask=mask, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        logits = tl.where(seen[None], logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        fading = tl.exp(highest - higher)
        shares = tl.exp(logits - higher[:, None])
        there = _vectors(blocks, row, width, slot + 1, head, tokens, seen, HEADS, DIM, BLOCK, TYPE)
        values = tl.load(there[:, None] + dims[None], mask=mask, other=0.0)
        attended = attended * fading[:, None]
        attended += tl.dot(shares.to(values.dtype), values, input_precision="ieee")
        total = total * fading + tl.sum(shares, 1)
        highest = higher
    some = total > 0
    attended = attended / tl.where(some, total, 1.0)[:, None]
    place = (row * HEADS * GROUP + heads) * SPLITS + split
    tl.store(
        parts + place[:, None] * DIM + dims[None],
        attended.to(parts.dtype.element_ty),
        mask=wanted[:, None] & real[None],
    )
    tl.store(
        weights + place,
        tl.where(some, highest + tl.log(tl.where(some, total, 1.0)), float("-inf")),
        mask=wanted,
    )


@triton.jit
def _merge(
    parts, weights, out, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """The splits of one row and query head together."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits, dims = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    real = dims < DIM
    weight = tl.load(weights + place * SPLITS + splits)
    highest = tl.max(weight, 0)
    weight = tl.exp(weight - tl.where(highest > float("-inf"), highest, 0.0))
    there = parts + (place * SPLITS + splits)[:, None] * DIM + dims[None]
    attended = tl.sum(tl.load(there, mask=real[None], other=0.0) * weight[:, None], 0)
    total = tl.sum(weight, 0)
    attended = attended / tl.where(total > 0, total, 1.0)
    tl.store(out + place * DIM + dims, attended.to(out.dtype.element_ty), mask=real)
