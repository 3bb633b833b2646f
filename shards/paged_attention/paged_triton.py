"""Paged attention of decode rows on a GPU: three kernels in Triton, which torch for CUDA brings along on Linux.
Imported only where there is such a device.

The keys of all rows are cut into splits of about equal length, and each split is attended to by a program of its own:
one long row among short ones, or one row alone, would keep few of the device's processors busy. Splits of a row are
merged by their log-sum-exp (Dao et al., "Flash-Decoding for long-context inference", 2023). How rows are cut follows
from their lengths on the device, so that a recorded step cuts them anew each time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.paged_attention.paged import BlockAddresses, Logits, NotPaged, RotaryAngles
from molink.shards.paged_attention.paged_tiles import LEAST_SHARED_BYTES, query_rows, tile_for
from molink.shards.spec import KV_BLOCK_TOKENS

PROGRAMS_PER_PROCESSOR = 2
_LEAST_ROWS = 64
"""Lengths that are looked at together: as many rows as are recorded at most, so that kernels are compiled once."""
MERGED_TOGETHER = 16
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def shared_bytes_of(device: int) -> int:
    """Shared memory that a program may have on the CUDA device of this number: what Triton itself holds kernels to."""
    return int(triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"])


def counted(rows: int) -> int:
    """How many lengths are looked at together: a power of two."""
    return max(_LEAST_ROWS, int(triton.next_power_of_2(rows)))


class TritonAttention:
    """`paged.PagedAttention` on a CUDA device."""

    def __init__(self, processors: int, shared_bytes: int = LEAST_SHARED_BYTES) -> None:
        """`processors`: the device's streaming multiprocessors; `shared_bytes`: what it gives one program at most."""
        self._processors = processors
        self._shared_bytes = shared_bytes

    def store(self, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int) -> None:
        _, heads, rows, dim = keys.shape
        _store[(rows, heads)](
            keys, values, places.blocks, places.bounds, slot,
            keys.stride(2), keys.stride(1), values.stride(2), values.stride(1),
            places.blocks.stride(0), places.bounds.stride(0),
            HEADS=heads, DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), BLOCK=KV_BLOCK_TOKENS,
            TYPE=TYPES[keys.dtype], num_warps=1,
        )  # fmt: skip

    def rotate_and_store(
        self, turned: RotaryAngles, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int
    ) -> None:
        query, cos, sin = turned
        _, heads, rows, dim = keys.shape
        half = dim // 2
        _rotate_and_store[(rows, query.shape[1] + 2 * heads)](
            query, keys, values, cos, sin, places.blocks, places.bounds, slot,
            query.stride(2), query.stride(1), keys.stride(2), keys.stride(1), values.stride(2), values.stride(1),
            cos.stride(1), sin.stride(1), places.blocks.stride(0), places.bounds.stride(0),
            QUERY_HEADS=query.shape[1], HEADS=heads, DIM=dim, HALF=half, PADDED_HALF=triton.next_power_of_2(half),
            BLOCK=KV_BLOCK_TOKENS, TYPE=TYPES[keys.dtype], num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        _, heads, rows, dim = query.shape
        group = heads // key_heads
        tile = tile_for(dim, group, query.itemsize, self._shared_bytes)
        if tile is None:
            raise NotPaged(
                f"heads of {dim} in {query.dtype} do not fit the card's {self._shared_bytes} bytes of shared memory"
            )
        wanted = self._wanted(rows, key_heads)
        splits = rows + wanted
        out = query.new_empty(rows, heads, dim)
        parts = query.new_empty((splits, heads, dim), dtype=torch.float32)
        weights = query.new_empty((splits, heads), dtype=torch.float32)
        padded = triton.next_power_of_2(dim)
        _attend[(splits, key_heads)](
            query, out, parts, weights, places.blocks, places.bounds,
            query if logits.sinks is None else logits.sinks, slot, rows, wanted, logits.scaling, logits.softcap or 0.0,
            query.stride(2), query.stride(1), places.blocks.stride(0), places.bounds.stride(0),
            HEADS=key_heads, GROUP=group, QUERIES=query_rows(group),
            DIM=dim, PADDED_DIM=padded, BLOCK=KV_BLOCK_TOKENS, TILE=tile.tokens, ROWS=counted(rows),
            SINKS=logits.sinks is not None, CAPPED=logits.softcap is not None,
            TYPE=TYPES[query.dtype], num_warps=4, num_stages=tile.stages,
        )  # fmt: skip
        _merge[(rows, heads)](
            out, parts, weights, places.bounds, rows, wanted, places.bounds.stride(0),
            DIM=dim, PADDED_DIM=padded, TILE=tile.tokens, ROWS=counted(rows), PARTS=MERGED_TOGETHER, num_warps=2,
        )  # fmt: skip
        return out.transpose(0, 1)[None]

    def _wanted(self, rows: int, key_heads: int) -> int:
        """Into how many splits all keys of one head would be cut, if rows did not end: so many that the device is full,
        and that no program has more than the average row."""
        return max(1, rows, self._processors * PROGRAMS_PER_PROCESSOR // key_heads)


@triton.jit
def _cut(bounds, columns, rows, wanted, TILE: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """Tokens of a split, and for each row how many splits it has."""
    numbers = tl.arange(0, ROWS)
    real = numbers < rows
    lengths = tl.load(bounds + columns + numbers, mask=real, other=0) - tl.load(
        bounds + numbers, mask=real, other=0
    )
    share = tl.cdiv(tl.cdiv(tl.sum(lengths, 0), wanted), TILE) * TILE
    share = tl.maximum(share, TILE)
    return share, tl.cdiv(lengths, share)


@triton.jit
def _vectors(
    blocks, row, width, slot, head, tokens, seen,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, TYPE: tl.constexpr,
    ENTRIES: tl.constexpr = 2, FIRST: tl.constexpr = 0,
):  # fmt: skip
    """For each of a table's `tokens` where its key (or, in an odd slot, its value) of one head begins. A block has so
    many ENTRIES in the table, of which those from FIRST on say it."""
    entries = blocks + (row * width + tokens // BLOCK * ENTRIES + FIRST)
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


@triton.jit
def _turned(low, high, cos, sin, dims, real, TYPE: tl.constexpr, HALF: tl.constexpr):  # fmt: skip
    """Both halves of a vector turned, each product rounded before they are added."""
    low, high = low.to(tl.float32), high.to(tl.float32)
    cos_low, cos_high = (
        tl.load(cos + dims, mask=real).to(tl.float32),
        tl.load(cos + HALF + dims, mask=real).to(tl.float32),
    )
    sin_low, sin_high = (
        tl.load(sin + dims, mask=real).to(tl.float32),
        tl.load(sin + HALF + dims, mask=real).to(tl.float32),
    )
    first = (low * cos_low).to(TYPE).to(tl.float32) - (high * sin_low).to(TYPE).to(tl.float32)
    second = (high * cos_high).to(TYPE).to(tl.float32) + (low * sin_high).to(TYPE).to(tl.float32)
    return first.to(TYPE), second.to(TYPE)


@triton.jit(do_not_specialize=["slot"])
def _rotate_and_store(
    query, keys, values, cos, sin, blocks, bounds, slot,
    query_row, query_head, key_row, key_head, value_row, value_head, cos_row, sin_row, width, columns,
    QUERY_HEADS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """One head of one row: a query is turned where it lies, a key turned and stored, a value stored."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, PADDED_HALF)
    real = dims < HALF
    if part < QUERY_HEADS:
        at = query + row * query_row + part * query_head
        low, high = tl.load(at + dims, mask=real), tl.load(at + HALF + dims, mask=real)
        low, high = _turned(low, high, cos + row * cos_row, sin + row * sin_row, dims, real, TYPE, HALF)
        tl.store(at + dims, low, mask=real)
        tl.store(at + HALF + dims, high, mask=real)
        return
    token = tl.load(bounds + columns + row) - 1
    if token < 0:
        return
    one = tl.zeros([1], tl.int64) + token
    if part < QUERY_HEADS + HEADS:
        head = part - QUERY_HEADS
        at = keys + row * key_row + head * key_head
        low, high = tl.load(at + dims, mask=real), tl.load(at + HALF + dims, mask=real)
        low, high = _turned(low, high, cos + row * cos_row, sin + row * sin_row, dims, real, TYPE, HALF)
        there = _vectors(blocks, row, width, slot, head, one, one >= 0, HEADS, DIM, BLOCK, TYPE)
    else:
        head = part - QUERY_HEADS - HEADS
        at = values + row * value_row + head * value_head
        low, high = tl.load(at + dims, mask=real), tl.load(at + HALF + dims, mask=real)
        there = _vectors(blocks, row, width, slot + 1, head, one, one >= 0, HEADS, DIM, BLOCK, TYPE)
    tl.store(there[:, None] + dims[None], low[None], mask=real[None])
    tl.store(there[:, None] + HALF + dims[None], high[None], mask=real[None])


@triton.jit(do_not_specialize=["slot", "rows", "wanted"])
def _attend(
    query, out, parts, weights, blocks, bounds, sinks, slot, rows, wanted, scaling, softcap,
    query_row, query_head, width, columns,
    HEADS: tl.constexpr, GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    """The query heads of one row that share a key head, over one split of its keys."""
    place, head = tl.program_id(0), tl.program_id(1)
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

    group, dims = tl.arange(0, QUERIES), tl.arange(0, PADDED_DIM)
    real = dims < DIM
    wanted_heads = group < GROUP
    heads = head * GROUP + group
    asked = query + row * query_row + heads[:, None] * query_head + dims[None]
    queries = tl.load(asked, mask=wanted_heads[:, None] & real[None], other=0.0)
    highest = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads, mask=wanted_heads, other=0.0).to(tl.float32)
        highest = tl.where(split == 0, sink, highest)
        total = tl.where(split == 0, 1.0, total)
    attended = tl.zeros([QUERIES, PADDED_DIM], tl.float32)
    for begin in range(first, last, TILE):
        tokens = begin + tl.arange(0, TILE)
        seen = tokens < last
        mask = seen[:, None] & real[None]
        there = _vectors(blocks, row, width, slot, head, tokens, seen, HEADS, DIM, BLOCK, TYPE)
        keys = tl.load(there[:, None] + dims[None], mask=mask, other=0.0)
        logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scaling
        if CAPPED:
            logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
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
    attended = attended / total[:, None]
    ours = wanted_heads[:, None] & real[None]
    there = (row * HEADS * GROUP + heads)[:, None] * DIM + dims[None]
    tl.store(out + there, attended.to(out.dtype.element_ty), mask=ours & alone)
    part = place.to(tl.int64) * HEADS * GROUP + heads
    tl.store(parts + part[:, None] * DIM + dims[None], attended, mask=ours & ~alone)
    tl.store(weights + part, highest + tl.log(total), mask=wanted_heads & ~alone)


@triton.jit(do_not_specialize=["rows", "wanted"])
def _merge(
    out, parts, weights, bounds, rows, wanted, columns,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """The splits of one row and query head together; nothing where there is one split, zeros where there is none."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = tl.num_programs(1)
    _, splits = _cut(bounds, columns, rows, wanted, TILE, ROWS)
    numbers = tl.arange(0, ROWS)
    count = tl.sum(tl.where(numbers == row, splits, 0), 0)
    if count == 1:
        return
    before = tl.sum(tl.where(numbers < row, splits, 0), 0)
    dims = tl.arange(0, PADDED_DIM)
    real = dims < DIM
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    attended = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(0, count, PARTS):
        split = first + tl.arange(0, PARTS)
        there = split < count
        place = (before + split) * heads + head
        weight = tl.load(weights + place, mask=there, other=float("-inf"))
        higher = tl.maximum(highest, tl.max(weight, 0))
        fading = tl.exp(highest - higher)
        weight = tl.exp(weight - higher)
        part = tl.load(parts + place[:, None] * DIM + dims[None], mask=there[:, None] & real[None], other=0.0)
        attended = attended * fading + tl.sum(part * weight[:, None], 0)
        total = total * fading + tl.sum(weight, 0)
        highest = higher
    attended = attended / tl.where(total > 0, total, 1.0)
    tl.store(out + (row * heads + head) * DIM + dims, attended.to(out.dtype.element_ty), mask=real)
