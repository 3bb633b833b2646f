"""Attention of decode rows to latents, in Triton: each is read once and is key and value of all heads.

Rows are cut into splits and merged as in `paged_triton.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.paged_attention.paged import BlockAddresses, NotPaged
from molink.shards.paged_attention.paged_tiles import LEAST_QUERIES, latent_tile_for
from molink.shards.paged_attention.paged_triton import (
    MERGED_TOGETHER,
    PROGRAMS_PER_PROCESSOR,
    TYPES,
    _cut,
    _merge,
    _vectors,
    counted,
)
from molink.shards.spec import KV_BLOCK_TOKENS


class TritonLatents:
    """`paged.PagedLatentAttention` on a CUDA device."""

    def __init__(self, processors: int, shared_bytes: int) -> None:
        """As `paged_triton.TritonAttention`."""
        self._processors = processors
        self._shared_bytes = shared_bytes

    def store(self, latents: Tensor, keys: Tensor, places: BlockAddresses, slot: int) -> None:
        rows, rank, dim = latents.shape[2], latents.shape[3], keys.shape[3]
        _store_latents[(rows,)](
            latents, keys, places.blocks, places.bounds, slot, latents.stride(2), keys.stride(2),
            places.blocks.stride(0), places.bounds.stride(0),
            RANK=rank, PADDED_RANK=triton.next_power_of_2(rank), DIM=dim, PADDED_DIM=triton.next_power_of_2(dim),
            BLOCK=KV_BLOCK_TOKENS, TYPE=TYPES[keys.dtype], num_warps=1,
        )  # fmt: skip

    def attend(
        self, query: Tensor, turned: Tensor, places: BlockAddresses, slot: int, scaling: float
    ) -> Tensor:
        heads, rows, rank = query.shape
        dim = turned.shape[2]
        tile = latent_tile_for(rank, dim, query.itemsize, self._shared_bytes)
        if tile is None:
            raise NotPaged(
                f"latents of {rank} in {query.dtype} do not fit the card's {self._shared_bytes} bytes of shared memory"
            )
        parts_of_heads = triton.cdiv(heads, tile.heads)
        wanted = max(1, rows, self._processors * PROGRAMS_PER_PROCESSOR // parts_of_heads)
        splits = rows + wanted
        out = query.new_empty(rows, heads, rank)
        parts = query.new_empty((splits, heads, rank), dtype=torch.float32)
        weights = query.new_empty((splits, heads), dtype=torch.float32)
        padded = triton.next_power_of_2(rank)
        _attend_latents[(splits, parts_of_heads)](
            query, turned, out, parts, weights, places.blocks, places.bounds, slot, rows, wanted, scaling,
            query.stride(1), query.stride(0), turned.stride(1), turned.stride(0),
            places.blocks.stride(0), places.bounds.stride(0),
            HEADS=heads, QUERIES=tile.heads, RANK=rank, PADDED_RANK=padded,
            DIM=dim, PADDED_DIM=max(LEAST_QUERIES, triton.next_power_of_2(dim)), BLOCK=KV_BLOCK_TOKENS,
            TILE=tile.tokens, ROWS=counted(rows), PIECE=min(tile.piece, padded), TYPE=TYPES[query.dtype],
            num_warps=8, num_stages=tile.stages,
        )  # fmt: skip
        _merge[(rows, heads)](
            out, parts, weights, places.bounds, rows, wanted, places.bounds.stride(0),
            DIM=rank, PADDED_DIM=padded, TILE=tile.tokens, ROWS=counted(rows), PARTS=MERGED_TOGETHER, num_warps=4,
        )  # fmt: skip
        return out.transpose(0, 1)


@triton.jit(do_not_specialize=["slot"])
def _store_latents(
    latents, keys, blocks, bounds, slot, latent_row, key_row, width, columns,
    RANK: tl.constexpr, PADDED_RANK: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One row's latent and key; of a row that sees nothing, nothing."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(bounds + columns + row) - 1
    if token < 0:
        return
    one = tl.zeros([1], tl.int64) + token
    ranks, dims = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_DIM)
    latent = tl.load(latents + row * latent_row + ranks, mask=ranks < RANK)
    key = tl.load(keys + row * key_row + dims, mask=dims < DIM)
    there = _vectors(blocks, row, width, slot, 0, one, one >= 0, 1, RANK, BLOCK, TYPE, 4, 0)
    tl.store(there[:, None] + ranks[None], latent[None], mask=(ranks < RANK)[None])
    there = _vectors(blocks, row, width, slot, 0, one, one >= 0, 1, DIM, BLOCK, TYPE, 4, 2)
    tl.store(there[:, None] + dims[None], key[None], mask=(dims < DIM)[None])


@triton.jit(do_not_specialize=["slot", "rows", "wanted"])
def _attend_latents(
    query, turned, out, parts, weights, blocks, bounds, slot, rows, wanted, scaling,
    query_row, query_head, turned_row, turned_head, width, columns,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, RANK: tl.constexpr, PADDED_RANK: tl.constexpr,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    PIECE: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Some heads of one row, over one split of its latents. Products with latents are summed PIECE by PIECE where
    they are made out of registers, which do not hold whole latents."""
    place = tl.program_id(0)
    share, splits = _cut(bounds, columns, rows, wanted, TILE, ROWS)
    ends = tl.cumsum(splits, 0)
    row = tl.sum((ends <= place).to(tl.int32), 0).to(tl.int64)
    if row >= rows:
        return
    numbers = tl.arange(0, ROWS)
    split = place - tl.sum(tl.where(numbers < row, splits, 0), 0)
    alone = tl.sum(tl.where(numbers == row, splits, 0), 0) == 1
    start, stop = tl.load(bounds + row), tl.load(bounds + columns + row)
    first = start + split * share
    last = tl.minimum(first + share, stop)

    heads = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    ours = heads < HEADS
    ranks, dims = tl.arange(0, PADDED_RANK), tl.arange(0, PADDED_DIM)
    asked_of = query + row * query_row + heads[:, None] * query_head
    if PIECE == PADDED_RANK:
        queries = tl.load(asked_of + ranks[None], mask=ours[:, None] & (ranks < RANK)[None], other=0.0)
    asked = turned + row * turned_row + heads[:, None] * turned_head + dims[None]
    others = tl.load(asked, mask=ours[:, None] & (dims < DIM)[None], other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    attended = tl.zeros([QUERIES, PADDED_RANK], tl.float32)
    for begin in range(first, last, TILE):
        tokens = begin + tl.arange(0, TILE)
        seen = tokens < last
        there = _vectors(blocks, row, width, slot, 0, tokens, seen, 1, DIM, BLOCK, TYPE, 4, 2)
        keys = tl.load(there[:, None] + dims[None], mask=seen[:, None] & (dims < DIM)[None], other=0.0)
        logits = tl.dot(others, tl.trans(keys), input_precision="ieee")
        there = _vectors(blocks, row, width, slot, 0, tokens, seen, 1, RANK, BLOCK, TYPE, 4, 0)
        if PIECE < PADDED_RANK:
            for low in tl.static_range(0, PADDED_RANK, PIECE):
                some = low + tl.arange(0, PIECE)
                piece = tl.load(asked_of + some[None], mask=ours[:, None] & (some < RANK)[None], other=0.0)
                part = tl.load(
                    there[:, None] + some[None], mask=seen[:, None] & (some < RANK)[None], other=0.0
                )
                logits += tl.dot(piece, tl.trans(part), input_precision="ieee")
        latents = tl.load(there[:, None] + ranks[None], mask=seen[:, None] & (ranks < RANK)[None], other=0.0)
        if PIECE == PADDED_RANK:
            logits += tl.dot(queries, tl.trans(latents), input_precision="ieee")
        logits = tl.where(seen[None], logits * scaling, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        fading = tl.exp(highest - higher)
        shares = tl.exp(logits - higher[:, None])
        attended = attended * fading[:, None]
        attended += tl.dot(shares.to(latents.dtype), latents, input_precision="ieee")
        total = total * fading + tl.sum(shares, 1)
        highest = higher
    attended = attended / total[:, None]
    mask = ours[:, None] & (ranks < RANK)[None]
    there = (row * HEADS + heads)[:, None] * RANK + ranks[None]
    tl.store(out + there, attended.to(out.dtype.element_ty), mask=mask & alone)
    part = place.to(tl.int64) * HEADS + heads
    tl.store(parts + part[:, None] * RANK + ranks[None], attended, mask=mask & ~alone)
    tl.store(weights + part, highest + tl.log(total), mask=ours & ~alone)
