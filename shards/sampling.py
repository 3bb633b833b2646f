"""The next token of each session from its logits. What is drawn depends on (seed, position) and the logits
alone."""

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from molink.shards.spec import SamplingParams

_NUCLEUS_CANDIDATES = 1024
"""Most likely tokens looked at before the whole vocabulary is sorted for top_p."""


class BrokenLogits(ValueError):
    """Logits that are not numbers: the model or its weights are broken, or its dtype is too narrow for it."""

    def __init__(self, row: int) -> None:
        super().__init__(
            f"the logits in row {row} hold values that are not finite numbers: check the weights, "
            "or serve the model in float32 or bfloat16"
        )
        self.row = row


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """How to choose the token at `position` of a session's sequence, the prompt counted."""

    params: SamplingParams
    seed: int
    """In [0, 2**64)."""
    position: int
    """In [0, 2**64)."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """The chosen token. Log-probabilities are natural, of the biased logits before temperature, top_k and
    top_p."""

    token_id: int
    logprob: float | None
    """None where the request wants no log-probabilities."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, as many as requested, in order."""


def sample(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled]:
    """One token for each row of float32 logits [rows, vocabulary], if all rows are sound.

    Raises as `sample_each` does, and what that returns of the first row that is not sound.
    """
    drawn: list[Sampled] = []
    for one in sample_each(logits, requests):
        if isinstance(one, Exception):
            raise one
        drawn.append(one)
    return drawn


def sample_each(logits: Tensor, requests: Sequence[SampleRequest]) -> list[Sampled | Exception]:
    """For each row of float32 logits [rows, vocabulary] one token, or why there is none.

    A row's result does not depend on the other rows: BrokenLogits where it holds NaN or nothing finite, ValueError
    where its request is not of this vocabulary. Greedy takes the lowest id among equals. Raises ValueError where rows
    and requests differ in number.
    """
    if logits.ndim != 2 or logits.shape[0] != len(requests):
        raise ValueError(f"{len(requests)} requests need as many rows of logits, got {tuple(logits.shape)}")
    if not requests:
        return []
    biased, unknown = _with_bias(logits, requests)
    best = biased.argmax(-1, keepdim=True)
    found = torch.cat(
        [best.double(), biased.gather(-1, best).double()], -1
    ).tolist()  # a device is waited for once
    drawn: list[Sampled | Exception] = []
    for row, (request, (token, peak)) in enumerate(zip(requests, found, strict=True)):
        if row in unknown:
            drawn.append(unknown[row])
        elif not -float("inf") < peak < float("inf"):  # argmax takes NaN for the largest
            drawn.append(BrokenLogits(row))
        else:
            greedy = int(token) if request.params.temperature == 0 else None
            try:
                drawn.append(_finish(biased[row], request, greedy))
            except Exception as error:  # noqa: BLE001 - a session's boundary: the other rows are not its
                drawn.append(error)
    return drawn


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a hash of (seed, position): the same on every machine."""
    digest = hashlib.blake2b(
        struct.pack("<QQ", seed, position), digest_size=8, person=b"molink.sample"
    ).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _with_bias(logits: Tensor, requests: Sequence[SampleRequest]) -> tuple[Tensor, Mapping[int, ValueError]]:
    """The logits that each row draws from, and the rows whose bias names tokens that there are not."""
    unknown: dict[int, ValueError] = {}
    if not any(request.params.logit_bias for request in requests):
        return logits, unknown
    biased = logits.clone()
    for row, request in enumerate(requests):
        for token, bias in request.params.logit_bias:
            if 0 <= token < logits.shape[1]:
                biased[row, token] += bias
            else:
                unknown[row] = ValueError(
                    f"logit_bias names token {token}, but the vocabulary has {logits.shape[1]} tokens"
                )
    return biased, unknown


def _finish(logits: Tensor, request: SampleRequest, greedy: int | None) -> Sampled:
    params = request.params
    token = _draw(logits, params, uniform(request.seed, request.position)) if greedy is None else greedy
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


def _draw(logits: Tensor, params: SamplingParams, number: float) -> int:
    """Inverse transform sampling in float64, over the tokens that top_k and top_p leave, in an order that
    depends on the logits alone."""
    vocabulary = logits.shape[0]
    ids: Tensor | None = _most_likely(logits, params.top_k) if 0 < params.top_k < vocabulary else None
    if params.top_p < 1.0:
        ids = _nucleus(logits, params, ids)
    weights = _weights(logits if ids is None else logits[ids], params.temperature)
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    if index >= weights.shape[0]:  # rounding of the product may reach the total
        index = int(weights.nonzero()[-1, 0])
    return index if ids is None else int(ids[index])


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
