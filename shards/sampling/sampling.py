"""The next token of each session from its logits. What is drawn depends on (seed, position) and the logits
alone."""

import hashlib
import struct
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from molink.shards.sampling.drawing import CANDIDATES, Pick, draw, most_told, on_device
from molink.shards.sampling.weights import weighing_dtype
from molink.shards.spec import SamplingParams

_WHOLE_ROWS = 8
"""Rows whose whole vocabulary is put in order at a time."""


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


Outcome = Sampled | Exception
"""What came of drawing a row: its token, or why there is none."""


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


def sample_each(
    logits: Tensor, requests: Sequence[SampleRequest], dtype: torch.dtype | None = None
) -> list[Outcome]:
    """For each row of float32 logits [rows, vocabulary] one token, or why there is none.

    All rows are drawn together, and the device is waited for once; a second time if rows need more of their
    vocabulary's order than its likeliest tokens (top_p over a flat distribution). A row's result does not depend on the
    other rows: BrokenLogits where it holds NaN or nothing finite, ValueError where its request is not of this
    vocabulary. Greedy takes the lowest id among equals. Probabilities are computed in `dtype`, by default as exactly as
    the device can. Raises ValueError where rows and requests differ in number.
    """
    if logits.ndim != 2 or logits.shape[0] != len(requests):
        raise ValueError(f"{len(requests)} requests need as many rows of logits, got {tuple(logits.shape)}")
    if not requests:
        return []
    dtype = dtype or weighing_dtype(logits.device)
    vocabulary = logits.shape[1]
    wanted = [_pick(request, vocabulary) for request in requests]
    picks = [one if isinstance(one, Pick) else Pick() for one in wanted]
    refused = {row: one for row, one in enumerate(wanted) if not isinstance(one, Pick)}
    large = [row for row, pick in enumerate(picks) if CANDIDATES < pick.top_k < vocabulary]
    others = sorted(set(range(len(picks))) - set(large))
    biased = _with_bias(logits, requests, refused)
    candidates = [_Part(others, CANDIDATES)] if others else []
    read = _read(biased, picks, candidates + _whole(large, vocabulary), dtype)
    unsettled = [row for row, outcome in read.items() if outcome is None]
    if unsettled:
        read |= _read(biased, picks, _whole(unsettled, vocabulary), dtype)
    outcomes = {row: outcome for row, outcome in read.items() if outcome is not None} | refused
    return [outcomes[row] for row in range(len(picks))]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, a hash of (seed, position): the same on every machine."""
    digest = hashlib.blake2b(
        struct.pack("<QQ", seed, position), digest_size=8, person=b"molink.sample"
    ).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are drawn together, with so many candidates put in order."""

    rows: Sequence[int]
    candidates: int


def _whole(rows: Sequence[int], vocabulary: int) -> list[_Part]:
    """In which parts these are drawn if all of the vocabulary is put in order; that takes some memory."""
    firsts = range(0, len(rows), _WHOLE_ROWS)
    return [_Part(rows[first : first + _WHOLE_ROWS], vocabulary) for first in firsts]


def _pick(request: SampleRequest, vocabulary: int) -> Pick | Exception:
    """How the row is drawn, or why it cannot be."""
    params = request.params
    for token, _ in params.logit_bias:
        if not 0 <= token < vocabulary:
            return ValueError(f"logit_bias names token {token}, but the vocabulary has {vocabulary} tokens")
    if params.temperature == 0:
        return Pick(logprobs=params.logprobs)
    try:
        number = uniform(request.seed, request.position)
    except Exception as error:  # noqa: BLE001 - a session's boundary: the other rows are not its
        return error
    return Pick(params.temperature, params.top_k, params.top_p, params.logprobs, number)


def _with_bias(logits: Tensor, requests: Sequence[SampleRequest], without: Container[int]) -> Tensor:
    """The logits that each row draws from; rows in `without` stay as they are."""
    biases = [
        (row, token, bias)
        for row, request in enumerate(requests)
        if row not in without
        for token, bias in request.params.logit_bias
    ]
    if not biases:
        return logits
    rows, tokens, added = zip(*biases, strict=True)
    at = on_device((rows, tokens), torch.long, logits)
    (values,) = on_device((added,), logits.dtype, logits)
    return logits.index_put(at, values, accumulate=True)


def _read(
    logits: Tensor, picks: Sequence[Pick], parts: Sequence[_Part], dtype: torch.dtype
) -> dict[int, Sampled | Exception | None]:
    """Draws all parts and reads them at once: by row what came of it, None where its candidates were not enough."""
    drawn = []
    for part in parts:
        among = logits
        if len(part.rows) < len(logits):
            among = logits.index_select(0, *on_device((part.rows,), torch.long, logits))
        drawn.append(draw(among, [picks[row] for row in part.rows], part.candidates, dtype).packed(dtype))
    read: dict[int, Sampled | Exception | None] = {}
    numbers = iter(torch.cat(drawn).tolist())  # the device is waited for here and nowhere else
    for part in parts:
        most = most_told((picks[row] for row in part.rows), logits.shape[1])
        tokens, peaks, unsettled = ([*islice(numbers, len(part.rows))] for _ in range(3))
        for row, token, peak, again in zip(part.rows, tokens, peaks, unsettled, strict=True):
            count = picks[row].logprobs
            told = [] if count is None else [*islice(numbers, 1 + 2 * most)]
            if not -float("inf") < peak < float("inf"):  # argmax takes NaN for the largest
                read[row] = BrokenLogits(row)
            elif again:
                read[row] = None
            elif count is None:
                read[row] = Sampled(int(token), None, ())
            else:
                top = zip(map(int, told[1 : 1 + most]), told[1 + most :], strict=True)
                read[row] = Sampled(int(token), told[0], tuple(islice(top, count)))
    return read
