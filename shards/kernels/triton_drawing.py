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
_ROUND_BLOCK = 2048
"""The same in further rounds, in which most rows have been settled and most programs have nothing to do."""
_ROUNDS = 5
"""Of what wins a race, until a row is given up and its vocabulary put in order. What is left to race in falls by a
uniform factor each time, so that rows of a top_p of 0.5 need more rounds in one of a thousand cases."""
_STEP = tl.constexpr(race.SPLITMIX_STEP)
_FIRST = tl.constexpr(race.SPLITMIX_FIRST)
_SECOND = tl.constexpr(race.SPLITMIX_SECOND)
_SHIFT = tl.constexpr(64 - race.NUMBER_BITS)
_NUMBER_MASK = tl.constexpr(2**race.NUMBER_BITS - 1)
_NUMBER_STEP = tl.constexpr(race.NUMBER_STEP)


class TritonDrawing:
    """`drawing.DrawingKernels` on a CUDA device."""

    def likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, vocabulary = logits.shape
        blocks = triton.cdiv(vocabulary, _ROUND_BLOCK)
        largest = logits.new_empty(rows, blocks)
        leaders = torch.empty(rows, blocks, dtype=torch.long, device=logits.device)
        _largest[(rows, blocks)](
            logits, largest, leaders, logits.stride(0), vocabulary, blocks, TOKENS=_ROUND_BLOCK, num_warps=4
        )
        return _led(largest, leaders, None)

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
        winners, totals = _led(shares, leaders, weights)
        return totals, winners

    def race_in_nucleus(
        self, logits: Tensor, asked: Asked, totals: Tensor, winners: Tensor
    ) -> tuple[Tensor, Tensor]:
        """By rejection ("Sorting-Free GPU Kernels for LLM Sampling", FlashInfer, 2025): what wins among all tokens and
        is one of the nucleus wins in the nucleus. What is not leaves the likelier tokens to race on, among which the
        whole nucleus is. A token is one of the nucleus if what is likelier does not reach top_p."""
        rows, vocabulary = logits.shape
        blocks = triton.cdiv(vocabulary, _ROUND_BLOCK)
        weights, shares = (asked.peaks.new_empty(rows, blocks) for _ in range(2))
        leaders = torch.empty(rows, blocks, dtype=torch.long, device=logits.device)
        tokens, open_ = winners.clone(), torch.ones(rows, 1, dtype=torch.int32, device=logits.device)
        for number in range(_ROUNDS):
            _race_above[(rows, blocks)](
                logits, asked.peaks, asked.temperature, asked.key, tokens, open_, weights, shares, leaders,
                logits.stride(0), asked.peaks.stride(0), asked.temperature.stride(0), asked.key.stride(0),
                vocabulary, blocks, TOKENS=_ROUND_BLOCK, RACES=number > 0, num_warps=8,
            )  # fmt: skip
            _settle[(rows,)](
                weights, shares, leaders, totals, asked.top_p, tokens, open_,
                totals.stride(0), asked.top_p.stride(0),
                BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), RACES=number > 0, num_warps=1,
            )  # fmt: skip
        return tokens, open_ > 0

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


def _led(shares: Tensor, leaders: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each row's parts [rows, parts] the leader of them all, and its share, or else the weight of all: [rows, 1]."""
    rows, blocks = shares.shape
    winners, results = leaders.new_empty(rows, 1), shares.new_empty(rows, 1)
    _lead[(rows,)](
        shares, leaders, shares if weights is None else weights, winners, results,
        BLOCKS=blocks, PADDED=triton.next_power_of_2(blocks), SUMS=weights is not None, num_warps=1,
    )  # fmt: skip
    return winners, results


@triton.jit
def _share(weight, key, token_ids):
    """The weight over what the token runs with, of `race.race_numbers`: -log1p(x) for x in (-1, 0), exact where x is
    small (Kahan's way, by the rounding of 1 + x, which multiplies the weight: one division in float64 takes as long as
    the logarithm)."""
    mixed = token_ids * _STEP + key
    mixed ^= (mixed >> 30) & 0x3FFFFFFFF
    mixed *= _FIRST
    mixed ^= (mixed >> 27) & 0x1FFFFFFFFF
    mixed *= _SECOND
    mixed ^= (mixed >> 31) & 0x1FFFFFFFF
    number = (mixed >> _SHIFT) & _NUMBER_MASK
    x = (number.to(tl.float64) + 0.5) * -_NUMBER_STEP
    near = 1.0 + x
    exact = near == 1.0
    return tl.where(exact, weight, weight * (near - 1.0)) / tl.where(exact, -x, -tl.log(near) * x)


@triton.jit
def _largest(logits, largest, leaders, logits_row, vocabulary, blocks, TOKENS: tl.constexpr):
    """A part of one row's vocabulary: its largest logit, and the lowest token that has it. What is no number counts as
    the largest, an infinity."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    own = tl.load(logits + row * logits_row + tokens, mask=tokens < vocabulary, other=float("-inf"))
    most, leader = tl.max(tl.where(own == own, own, float("inf")), 0, return_indices=True)
    tl.store(largest + row * blocks + block, most)
    tl.store(leaders + row * blocks + block, (block * TOKENS + leader).to(tl.int64))


@triton.jit
def _lead(
    shares, leaders, weights, winners, results, BLOCKS: tl.constexpr, PADDED: tl.constexpr, SUMS: tl.constexpr
):  # fmt: skip
    """The leader of all parts of one row, and with SUMS the weight of all parts, otherwise the leader's share."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PADDED)
    real = parts < BLOCKS
    at = row * BLOCKS + parts
    share = tl.load(shares + at, mask=real, other=float("-inf"))
    largest, first = tl.max(share, 0, return_indices=True)
    tl.store(winners + row, tl.load(leaders + row * BLOCKS + first))
    if SUMS:
        tl.store(results + row, tl.sum(tl.load(weights + at, mask=real, other=0.0), 0))
    else:
        tl.store(results + row, largest)


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
    share = tl.where(real, _share(weight, key, tokens.to(tl.int64)), -1.0)
    largest, leader = tl.max(share, 0, return_indices=True)
    at = row * blocks + block
    tl.store(weights + at, tl.sum(weight, 0))
    tl.store(shares + at, largest)
    tl.store(leaders + at, (block * TOKENS + leader).to(tl.int64))


@triton.jit
def _race_above(
    logits, peaks, temperatures, keys, winners, unsettled, weights, shares, leaders,
    logits_row, peaks_row, temperatures_row, keys_row, vocabulary, blocks,
    TOKENS: tl.constexpr, RACES: tl.constexpr,
):  # fmt: skip
    """As `_race`, of the tokens that are likelier than the row's last winner; without RACES their weight alone.
    Nothing of a settled row."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(unsettled + row) == 0:
        return
    winner = tl.load(winners + row)
    bound = tl.load(logits + row * logits_row + winner)
    tokens = block * TOKENS + tl.arange(0, TOKENS)
    raw = tl.load(logits + row * logits_row + tokens, mask=tokens < vocabulary, other=float("-inf"))
    above = (tokens < vocabulary) & ((raw > bound) | ((raw == bound) & (tokens < winner)))
    own = raw.to(tl.float64)
    peak = tl.load(peaks + row * peaks_row)
    temperature = tl.load(temperatures + row * temperatures_row)
    weight = tl.where(above, tl.exp((own - peak) / temperature), 0.0)
    at = row * blocks + block
    tl.store(weights + at, tl.sum(weight, 0))
    if RACES:
        key = tl.load(keys + row * keys_row)
        share = tl.where(above, _share(weight, key, tokens.to(tl.int64)), -1.0)
        largest, leader = tl.max(share, 0, return_indices=True)
        tl.store(shares + at, largest)
        tl.store(leaders + at, (block * TOKENS + leader).to(tl.int64))


@triton.jit
def _settle(
    weights, shares, leaders, totals, top_p, winners, unsettled, totals_row, top_p_row,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, RACES: tl.constexpr,
):  # fmt: skip
    """Settles a row whose winner is one of the nucleus; the winner of another is that of the tokens above it."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(unsettled + row) == 0:
        return
    parts = tl.arange(0, PADDED)
    real = parts < BLOCKS
    above = tl.sum(tl.load(weights + row * BLOCKS + parts, mask=real, other=0.0), 0)
    within = above < tl.load(top_p + row * top_p_row) * tl.load(totals + row * totals_row)
    if within:
        tl.store(unsettled + row, 0)
    elif RACES:
        share = tl.load(shares + row * BLOCKS + parts, mask=real, other=-2.0)
        _, first = tl.max(share, 0, return_indices=True)
        tl.store(winners + row, tl.load(leaders + row * BLOCKS + first))


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
    share = _share(weight, tl.load(keys + row * keys_row), token_ids)
    share = tl.where(places <= last, share, tl.where(real, 0.0, -1.0))
    _, winner = tl.max(share, 0, return_indices=True)
    tl.store(tokens + row, tl.sum(tl.where(places == winner, token_ids, 0), 0))
    lasts = tl.max(tl.where(places == last, own, float("-inf")), 0)
    edge = tl.max(tl.where(places == COUNT - 1, own, float("-inf")), 0)
    too_few = (tl.load(tied + row).to(tl.int1)) & (lasts == edge)
    if PARTIAL:
        too_few = too_few | (kept < target)
    tl.store(short + row, too_few)
