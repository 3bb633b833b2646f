"""Which tokens a draft guesses from many rows of logits at once, and how sure each is: on the device, by the races that
the tail draws in.

Where top_p or top_k cut, only the likeliest tokens race: beyond so many a flat distribution is cut otherwise than the
tail cuts it. A guess may be wrong; what is drawn is the tail's.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from molink.shards.sampling.race import race_key
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.weights import raced, weigh, weighing_dtype

CANDIDATES = 1024
"""Likeliest tokens that are put in order where top_k or top_p cut."""


@torch.inference_mode()
def race_leaders(logits: Tensor, requests: Sequence[SampleRequest]) -> list[tuple[int, float]]:
    """For each row of float32 logits [rows, vocabulary] the token that would be drawn by temperature, min_p, top_k and
    top_p alone, and between 0 and 1 how sure that is: the token's probability where the likeliest is taken, else by how
    much of its share in the race it is ahead of the second one."""
    dtype = weighing_dtype(logits.device)
    logits = logits.to(dtype)
    rows: dict[str, list[int]] = {"greedy": [], "whole": [], "cut": []}
    for row, request in enumerate(requests):
        rows[_kind(request, logits.shape[1])].append(row)
    tokens, sure = logits.new_zeros(len(requests)), logits.new_zeros(len(requests))
    if rows["greedy"]:
        likeliest = logits[rows["greedy"]].softmax(-1).max(-1)
        tokens[rows["greedy"]], sure[rows["greedy"]] = likeliest.indices.to(dtype), likeliest.values
    for kind, leaders in (("whole", _leaders_of_all), ("cut", _leaders_of_some)):
        if rows[kind]:
            found = leaders(logits[rows[kind]], [requests[row] for row in rows[kind]])
            tokens[rows[kind]], sure[rows[kind]] = found[0].to(dtype), found[1]
    read = torch.stack((tokens, sure)).tolist()  # the device is waited for here and nowhere else
    return [(int(token), part) for token, part in zip(*read, strict=True)]


def _kind(request: SampleRequest, vocabulary: int) -> str:
    params = request.params
    if params.temperature == 0:
        return "greedy"
    return "cut" if params.top_p < 1 or 0 < params.top_k < vocabulary else "whole"


def _leaders_of_all(logits: Tensor, requests: Sequence[SampleRequest]) -> tuple[Tensor, Tensor]:
    weights = _weights(logits, requests)
    keys = _column([race_key(one.seed, one.position) for one in requests], weights, torch.long)
    return _first_two(raced(weights, keys, torch.arange(weights.shape[1], device=weights.device)))


def _leaders_of_some(logits: Tensor, requests: Sequence[SampleRequest]) -> tuple[Tensor, Tensor]:
    vocabulary = logits.shape[1]
    top_k = [one.params.top_k or vocabulary for one in requests]
    weights = _weights(logits, requests)
    likeliest = weights.topk(min(vocabulary, CANDIDATES))
    kept, ids = likeliest.values, likeliest.indices
    limits = _column(top_k, kept, torch.long)
    kept = kept.masked_fill(torch.arange(kept.shape[1], device=kept.device) >= limits, 0)
    among = torch.where(limits < vocabulary, kept.sum(-1, keepdim=True), weights.sum(-1, keepdim=True))
    reach = among * _column([one.params.top_p for one in requests], kept, kept.dtype)
    is_open = _column([one.params.top_p >= 1 for one in requests], kept, torch.bool)
    kept = kept.masked_fill((kept.cumsum(-1) - kept >= reach) & ~is_open, 0)
    keys = _column([race_key(one.seed, one.position) for one in requests], kept, torch.long)
    places, sure = _first_two(raced(kept, keys, ids))
    return ids.gather(1, places[:, None])[:, 0], sure


def _weights(logits: Tensor, requests: Sequence[SampleRequest]) -> Tensor:
    """Of all tokens, 1 of the likeliest; 0 where min_p leaves one out."""
    least = torch.finfo(logits.dtype).tiny
    temperatures = _column([max(one.params.temperature, least) for one in requests], logits, logits.dtype)
    weights = weigh(logits, logits.amax(-1, keepdim=True), temperatures)
    min_p = _column([one.params.min_p for one in requests], logits, logits.dtype)
    return weights.masked_fill_(weights < min_p, 0)


def _first_two(shares: Tensor) -> tuple[Tensor, Tensor]:
    """Where the largest share of each row is, and how much of it the second one lacks."""
    two = shares.topk(2)
    return two.indices[:, 0], 1 - two.values[:, 1] / two.values[:, 0]


def _column(values: Sequence[float], like: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows, 1]."""
    return torch.tensor(values, dtype=dtype, device=like.device)[:, None]
