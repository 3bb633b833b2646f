"""The next token of each session from its logits. What is drawn depends on (seed, position), the logits and what the
request says of the sequence before it alone."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from molink.shards.sampling.constraints import constrain, with_bias
from molink.shards.sampling.drawing import Pick, candidates_on, draw, most_told, on_device
from molink.shards.sampling.race import race_key
from molink.shards.sampling.recorded_drawing import RecordedDrawing
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.weights import weighing_dtype

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


class Sampled(NamedTuple):
    """The chosen token; a tuple as `Pick` is. Log-probabilities are natural, of the biased logits before penalties,
    masks, temperature, min_p, top_k and top_p."""

    token_id: int
    logprob: float | None
    """None where the request wants no log-probabilities."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability) of the most likely tokens, as many as requested, in order."""


Outcome = Sampled | Exception
"""What came of drawing a row: its token, or why there is none."""


def sample(
    logits: Tensor, requests: Sequence[SampleRequest], recorded: RecordedDrawing | None = None
) -> list[Sampled]:
    """One token for each row of float32 logits [rows, vocabulary], if all rows are sound.

    Raises as `sample_each` does, and what that returns of the first row that is not sound.
    """
    drawn: list[Sampled] = []
    for one in sample_each(logits, requests, recorded=recorded):
        if isinstance(one, Exception):
            raise one
        drawn.append(one)
    return drawn


def sample_each(
    logits: Tensor,
    requests: Sequence[SampleRequest],
    dtype: torch.dtype | None = None,
    *,
    recorded: RecordedDrawing | None = None,
) -> list[Outcome]:
    """For each row of float32 logits [rows, vocabulary] one token, or why there is none.

    All rows are drawn together, and the device is waited for once; a second time if rows need more of their
    vocabulary's order than its likeliest tokens (top_p over a flat distribution). A row's result does not depend on the
    other rows: BrokenLogits where it holds NaN or nothing finite, ValueError where its request is not of this
    vocabulary. Greedy takes the lowest id among equals. Probabilities are computed in `dtype`, by default as exactly as
    the device can. What has been recorded is not launched
    operation by operation. Raises ValueError where rows and requests differ in number.
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
    sources = _sources(with_bias(logits, requests, refused), requests, refused)
    read = _read(picks, [part for source in sources for part in _parts(source, picks)], dtype, recorded)
    unsettled = {row for row, outcome in read.items() if outcome is None}
    if unsettled:
        again = [
            part
            for source in sources
            for part in _whole(source, [row for row in source.drawn if row in unsettled])
        ]
        read |= _read(picks, again, dtype)
    outcomes = {row: outcome for row, outcome in read.items() if outcome is not None} | refused
    return [outcomes[row] for row in range(len(picks))]


@dataclass(frozen=True, slots=True, eq=False)
class _DrawnLogits:
    """Logits that some rows draw from."""

    rows: Sequence[int]
    """The request of each of them, in order."""
    logits: Tensor
    """[rows, vocabulary]."""
    told_of: Tensor | None = None
    """What log-probabilities are told of; None: the same."""
    is_changed: bool = False
    """Whether they are other logits than the model's."""
    passed_over: frozenset[int] = frozenset()
    """Rows that are drawn from another source: leaving them in costs less than copying the others."""

    @property
    def drawn(self) -> Sequence[int]:
        """The rows that are drawn from it."""
        return [row for row in self.rows if row not in self.passed_over]

    def chosen(self, rows: Sequence[int], picks: Sequence[Pick]) -> Sequence[Pick]:
        """How these rows of this source are drawn."""
        if not self.passed_over and len(rows) == len(picks):
            return picks  # all of them, in order
        return [Pick() if row in self.passed_over else picks[row] for row in rows]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a source that are drawn together, with so many candidates put in order."""

    source: _DrawnLogits
    rows: Sequence[int]
    candidates: int


def _sources(
    logits: Tensor, requests: Sequence[SampleRequest], refused: Container[int]
) -> list[_DrawnLogits]:
    """The rows as they are, and those that penalties or masks change, apart: the others pay nothing for them."""
    rows = range(len(requests))
    changed = [row for row in rows if requests[row].is_constrained and row not in refused]
    if not changed:
        return [_DrawnLogits(rows, logits)]
    before = logits.index_select(0, *on_device((changed,), torch.long, logits))
    told = any(requests[row].params.logprobs is not None for row in changed)
    after = before.clone() if told else before
    constrain(after, [requests[row] for row in changed])
    source = _DrawnLogits(changed, after, before if told else None, is_changed=True)
    if len(changed) == len(rows):
        return [source]
    return [source, _DrawnLogits(rows, logits, passed_over=frozenset(changed))]


def _parts(source: _DrawnLogits, picks: Sequence[Pick]) -> list[_Part]:
    """In which parts the rows are drawn at first: those of a large top_k need all of the vocabulary in order."""
    vocabulary, candidates = source.logits.shape[1], candidates_on(source.logits.device)
    chosen = source.chosen(source.rows, picks)
    large = [
        row for row, pick in zip(source.rows, chosen, strict=True) if candidates < pick.top_k < vocabulary
    ]
    others = [row for row in source.rows if row not in set(large)] if large else source.rows
    return [*([_Part(source, others, candidates)] if others else []), *_whole(source, large)]


def _whole(source: _DrawnLogits, rows: Sequence[int]) -> list[_Part]:
    """In which parts these are drawn if all of the vocabulary is put in order; that takes some memory."""
    firsts, vocabulary = range(0, len(rows), _WHOLE_ROWS), source.logits.shape[1]
    return [_Part(source, rows[first : first + _WHOLE_ROWS], vocabulary) for first in firsts]


def _pick(request: SampleRequest, vocabulary: int) -> Pick | Exception:
    """How the row is drawn, or why it cannot be."""
    params = request.params
    for token, _ in params.logit_bias:
        if not 0 <= token < vocabulary:
            return ValueError(f"logit_bias names token {token}, but the vocabulary has {vocabulary} tokens")
    if params.temperature == 0:
        return Pick(logprobs=params.logprobs)
    try:
        key = race_key(request.seed, request.position)
    except Exception as error:  # noqa: BLE001 - a session's boundary: the other rows are not its
        return error
    return Pick(params.temperature, params.top_k, params.top_p, params.logprobs, key)


def _draw_part(
    part: _Part, picks: Sequence[Pick], dtype: torch.dtype, recorded: RecordedDrawing | None
) -> Tensor:
    source = part.source
    logits, told_of = source.logits, source.told_of
    if len(part.rows) < len(source.rows):
        places = {row: place for place, row in enumerate(source.rows)}
        (at,) = on_device(([places[row] for row in part.rows],), torch.long, logits)
        logits = logits.index_select(0, at)
        told_of = None if told_of is None else told_of.index_select(0, at)
    chosen = source.chosen(part.rows, picks)
    first = part.candidates == candidates_on(logits.device)
    if recorded is not None and first and any(pick.temperature for pick in chosen):
        drawn = recorded.draw(logits, chosen)
        if drawn is not None:
            return drawn
    return draw(logits, chosen, part.candidates, dtype, told_of).packed(dtype)


def _read(
    picks: Sequence[Pick],
    parts: Sequence[_Part],
    dtype: torch.dtype,
    recorded: RecordedDrawing | None = None,
) -> dict[int, Sampled | Exception | None]:
    """Draws all parts and reads them at once: by row what came of it, None where its candidates were not enough."""
    drawn = [_draw_part(part, picks, dtype, recorded) for part in parts]
    read: dict[int, Sampled | Exception | None] = {}
    together = drawn[0] if len(drawn) == 1 else torch.cat(drawn)
    numbers = iter(together.tolist())  # the device is waited for here and nowhere else
    for part in parts:
        source = part.source
        chosen = source.chosen(part.rows, picks)
        most = most_told(chosen, source.logits.shape[1])
        tokens, peaks, unsettled = ([*islice(numbers, len(part.rows))] for _ in range(3))
        passed_over = source.passed_over
        for row, pick, token, peak, again in zip(part.rows, chosen, tokens, peaks, unsettled, strict=True):
            count = pick.logprobs
            told = [] if count is None else [*islice(numbers, 1 + 2 * most)]
            if row in passed_over:
                continue
            if peak == -math.inf and source.is_changed:
                read[row] = ValueError("of all tokens none is left that could be drawn")
            elif not -math.inf < peak < math.inf:  # argmax takes NaN for the largest
                read[row] = BrokenLogits(row)
            elif again:
                read[row] = None
            elif count is None:
                read[row] = Sampled(int(token), None, ())
            else:
                top = zip(map(int, told[1 : 1 + most]), told[1 + most :], strict=True)
                read[row] = Sampled(int(token), told[0], tuple(islice(top, count)))
    return read
