"""Tokens drawn row by row, as the definition reads: what drawing all rows at once is compared with."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from molink.shards.sampling.race import race_key
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import BrokenLogits, Sampled
from molink.shards.spec import SamplingParams

_NUCLEUS_CANDIDATES = 1024
"""Most likely tokens looked at before the whole vocabulary is sorted for top_p."""


def sample_by_row(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled | Exception]:
    """As `sample_each`, one row after the other."""
    return [_sample_row(logits, row, request) for row, request in enumerate(requests)]


def _sample_row(logits: Tensor, row: int, request: SampleRequest) -> Sampled | Exception:
    biased = logits[row].clone() if request.params.logit_bias else logits[row]
    for token, bias in request.params.logit_bias:
        if not 0 <= token < len(biased):
            return ValueError(f"logit_bias names token {token}")
        biased[token] += bias
    constrained = _constrained(biased.clone(), request) if request.is_constrained else biased
    best = int(constrained.argmax())
    if not math.isfinite(float(constrained[best])):
        return BrokenLogits(row)
    return _finish(biased, constrained, request, best if request.params.temperature == 0 else None)


def _constrained(logits: Tensor, request: SampleRequest) -> Tensor:
    """Penalties token by token, then masks, then min_p by probabilities."""
    params, seen = request.params, request.seen
    for token, in_sequence, generated in (
        [] if seen is None else zip(*(part.tolist() for part in seen.parts), strict=True)
    ):
        if in_sequence:
            logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
        logits[token] -= generated * params.frequency_penalty + (generated > 0) * params.presence_penalty
    for token in range(len(logits)):
        bits = request.allowed
        is_allowed = bits is None or (token // 8 < len(bits) and bool(bits[token // 8] >> token % 8 & 1))
        if token in request.left_out or not is_allowed:
            logits[token] = -math.inf
    if params.min_p and params.temperature:
        probabilities = torch.softmax(logits.double() / params.temperature, -1)
        logits[probabilities < params.min_p * probabilities.max() * (1 - 1e-6)] = -math.inf
    return logits


def _finish(logits: Tensor, constrained: Tensor, request: SampleRequest, greedy: int | None) -> Sampled:
    """Log-probabilities are of the `logits`, the token is drawn from the `constrained` ones."""
    params = request.params
    key = race_key(request.seed, request.position)
    token = _draw(constrained, params, key) if greedy is None else greedy
    if params.logprobs is None:
        return Sampled(token, None, ())
    logprobs = torch.log_softmax(logits.double(), -1)
    ids = _most_likely(logits, params.logprobs)
    top = tuple(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return Sampled(token, float(logprobs[token]), top)


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, largest first, the lowest id first among equals."""
    if count >= logits.shape[0]:
        return torch.sort(logits, descending=True, stable=True).indices
    if count == 0:
        return torch.empty(0, dtype=torch.long, device=logits.device)
    smallest = torch.topk(logits, count, sorted=False).values.min()
    candidates = (logits >= smallest).nonzero()[:, 0]
    order = torch.sort(logits[candidates], descending=True, stable=True).indices
    return candidates[order[:count]]


def _draw(logits: Tensor, params: SamplingParams, key: int) -> int:
    """The winner of the race in float64, among the tokens that top_k and top_p leave."""
    vocabulary = logits.shape[0]
    ids = _most_likely(logits, params.top_k) if 0 < params.top_k < vocabulary else None
    if params.top_p < 1.0:
        ids = _nucleus(logits, params, ids)
    ids = torch.arange(vocabulary) if ids is None else ids
    weights = _weights(logits[ids], params.temperature).tolist()
    shares = [weight / runs_with(key, token) for weight, token in zip(weights, ids.tolist(), strict=True)]
    return int(ids[shares.index(max(shares))])


def runs_with(key: int, token: int) -> float:
    """SplitMix64 in whole numbers, and the exponentially distributed number of its 52 highest bits."""
    mixed = (key + token * 0x9E3779B97F4A7C15) % 2**64
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % 2**64
    mixed ^= mixed >> 31
    return -math.log1p(-((mixed >> 12) + 0.5) / 2**52)


def _weights(logits: Tensor, temperature: float) -> Tensor:
    """Unnormalised float64 probabilities; subtracting first keeps tiny temperatures finite."""
    exact = logits.double()
    return torch.exp((exact - exact.max()) / temperature)


def _nucleus(logits: Tensor, params: SamplingParams, ids: Tensor | None) -> Tensor:
    """The smallest set of most likely tokens whose probability, among `ids` or all, reaches top_p (Holtzman
    et al. 2020, The Curious Case of Neural Text Degeneration, section 3.1)."""
    if ids is not None:
        weights = _weights(logits[ids], params.temperature)
        return ids[: _reaching(weights.cumsum(0), params.top_p * float(weights.sum()))]
    total = float(_weights(logits, params.temperature).sum())
    ids = _most_likely(logits, _NUCLEUS_CANDIDATES)
    cumulative = _weights(logits[ids], params.temperature).cumsum(0)
    if float(cumulative[-1]) < params.top_p * total:
        ids = _most_likely(logits, logits.shape[0])
        cumulative = _weights(logits[ids], params.temperature).cumsum(0)
    return ids[: _reaching(cumulative, params.top_p * total)]


def _reaching(cumulative: Tensor, target: float) -> int:
    """How many entries it takes to reach the target; at least one, at most all."""
    return min(int(torch.searchsorted(cumulative, target)) + 1, cumulative.shape[0])
