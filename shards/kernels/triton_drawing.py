"""Exponential races and nucleus sampling in Triton, one launch over all rows each.

Weights, sums and what tokens run with are computed in float64, as `molink.shards.sampling` computes them operation by
operation: results differ by the order of a sum and by last bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from molink.shards.sampling import race
from molink.shards.sampling.drawing import Asked, LikelyTokens

_BLOCK = 512
"""Tokens of a vocabulary that one program weighs."""
_STEP = tl.constexpr(race.SPLITMIX_STEP)
_FIRST = tl.constexpr(race.SPLITMIX_FIRST)
_SECOND = tl.constexpr(race.SPLITMIX_SECOND)
_SHIFT = tl.constexpr(64 - race.NUMBER_BITS)
_NUMBER_MASK = tl.constexpr(2**race.NUMBER_BITS - 1)
_NUMBER_STEP = tl.constexpr(race.NUMBER_STEP)


class TritonDrawing:
    """`drawing.DrawingKernels` on a CUDA device."""

    def race(self, logits: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        blocks = triton.cdiv(vocabulary, _BLOCK)
        weights, shares = (asked.peaks.new_empty(rows, blocks) for _ in range(2))
        leaders = torch.empty(rows, blocks, dtype=torch.long, device=logits.device)
        _race[(rows, blocks)](
            logits, asked.peaks, asked.temperature, asked.key, weights, shares, leaders,
            logits.stride(0), asked.peaks.stride(0), asked.temperature.stride(0), asked.key.stride(0),
            vocabulary, blocks, TOKENS=_BLOCK, num_warps=4,
        )  # fmt: skip
        return weights.sum(-1, keepdim=True), leaders.gather(1, shares.argmax(-1, keepdim=True))

    def race_of_likeliest(
        self, order: LikelyTokens, asked: Asked, totals: Tensor, vocabulary: int
    ) -> tuple[Tensor, Tensor]:
        rows, count = order.logits.shape
        tokens = torch.empty(rows, 1, dtype=torch.long, device=totals.device)
        short = torch.empty(rows, 1, dtype=torch.bool, device=totals.device)
        padded = triton.next_power_of_2(count)
        _race_of_likeliest[(rows,)](
            order.logits, order.ids, order.tied, asked.peaks, asked.temperature, asked.top_p, asked.top_k,
            asked.key, totals, tokens, short,
            order.logits.stride(0), order.ids.stride(0), asked.peaks.stride(0), asked.temperature.stride(0),
            asked.top_p.stride(0), asked.top_k.stride(0), asked.key.stride(0), totals.stride(0),
            vocabulary, COUNT=count, PADDED=padded, PARTIAL=order.partial, num_warps=16 if padded >= 4096 else 4,
        )  # fmt: skip
        return tokens, short


@triton.jit
def _runs_with(key, token_ids):
    """`race.race_numbers`, as what a token's weight is divided by: -log1p(x) for x in (-1, 0), exact where x is small
    (Kahan's way, by the rounding of 1 + x)."""
    mixed = token_ids * _STEP + key
    mixed ^= (mixed >> 30) & 0x3FFFFFFFF
    mixed *= _FIRST
    mixed ^= (mixed >> 27) & 0x1FFFFFFFFF
    mixed *= _SECOND
    mixed ^= (mixed >> 31) & 0x1FFFFFFFF
    number = (mixed >> _SHIFT) & _NUMBER_MASK
    x = (number.to(tl.float64) + 0.5) * -_NUMBER_STEP
    near = 1.0 + x
    return tl.where(near == 1.0, -x, -tl.log(near) * (x / (near - 1.0)))


@triton.jit
def _race(
    logits, peaks, temperatures, keys, weights, shares, leaders,
    logits_row, peaks_row, temperatures_row, keys_row, vocabulary, blocks, TOKENS: tl.constexpr,
):  # fmt: skip
    """A part of one row's vocabulary: the sum of its weights, its largest share in the race, and whose that is."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    real = tokens < vocabulary
    peak = tl.load(peaks + row * peaks_row)
    temperature = tl.load(temperatures + row * temperatures_row)
    key = tl.load(keys + row * keys_row)
    own = tl.load(logits + row * logits_row + tokens, mask=real, other=float("-inf")).to(tl.float64)
    weight = tl.where(real, tl.exp((own - peak) / temperature), 0.0)
    share = tl.where(real, weight / _runs_with(key, tokens.to(tl.int64)), -1.0)
    largest, leader = tl.max(share, 0, return_indices=True)
    at = row * blocks + block
    tl.store(weights + at, tl.sum(weight, 0))
    tl.store(shares + at, largest)
    tl.store(leaders + at, (block * TOKENS + leader).to(tl.int64))


@triton.jit
def _race_of_likeliest(
    values, ids, tied, peaks, temperatures, top_p, top_k, keys, totals, tokens, short,
    values_row, ids_row, peaks_row, temperatures_row, top_p_row, top_k_row, keys_row, totals_row,
    vocabulary, COUNT: tl.constexpr, PADDED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """One row: the race among the likeliest tokens whose weights reach top_p, and whether these are too few."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, PADDED)
    real = places < COUNT
    peak = tl.load(peaks + row * peaks_row)
    temperature = tl.load(temperatures + row * temperatures_row)
    limit = tl.load(top_k + row * top_k_row)
    own = tl.load(values + row * values_row + places, mask=real, other=float("-inf"))
    weight = tl.where(real & (places < limit), tl.exp((own.to(tl.float64) - peak) / temperature), 0.0)
    kept = tl.sum(weight, 0)
    among = tl.where(limit < vocabulary, kept, tl.load(totals + row * totals_row))
    target = tl.load(top_p + row * top_p_row) * among
    reached = (tl.cumsum(weight, 0) >= target) & (weight > 0)
    first = tl.min(tl.where(reached, places, PADDED), 0)
    last = tl.minimum(first, tl.max(tl.where(weight > 0, places, 0), 0))
    token_ids = tl.load(ids + row * ids_row + places, mask=real, other=0)
    share = weight / _runs_with(tl.load(keys + row * keys_row), token_ids)
    share = tl.where(places <= last, share, tl.where(real, 0.0, -1.0))
    _, winner = tl.max(share, 0, return_indices=True)
    tl.store(tokens + row, tl.sum(tl.where(places == winner, token_ids, 0), 0))
    lasts = tl.max(tl.where(places == last, own, float("-inf")), 0)
    edge = tl.max(tl.where(places == COUNT - 1, own, float("-inf")), 0)
    too_few = (tl.load(tied + row).to(tl.int1)) & (lasts == edge)
    if PARTIAL:
        too_few = too_few | (kept < target)
    tl.store(short + row, too_few)
