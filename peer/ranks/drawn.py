"""How the first rank is to draw tokens, and what came of it, as JSON values: floats keep all their digits."""

from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import BrokenLogits, Outcome, Sampled
from molink.shards.sampling.token_history import SeenTokens
from molink.shards.spec import SamplingParams


def described_request(request: SampleRequest) -> list[object]:
    """What a row's draw depends on, and nothing else of the generation."""
    params = request.params
    described: list[object] = [
        params.temperature, params.top_k, params.top_p, params.logprobs, params.logit_bias,
        request.seed, request.position,
    ]  # fmt: skip
    return [*described, _described_constraints(request)] if request.is_constrained else described


def request_of(description: Sequence[Any]) -> SampleRequest:
    """The reverse."""
    temperature, top_k, top_p, logprobs, logit_bias, seed, position, *constraints = description
    bias = tuple((token, added) for token, added in logit_bias)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, logprobs=logprobs, logit_bias=bias
    )
    request = SampleRequest(params, seed, position)
    return _constrained(request, constraints[0]) if constraints else request


def _described_constraints(request: SampleRequest) -> dict[str, object]:
    params, seen, allowed = request.params, request.seen, request.allowed
    return {
        "penalties": [params.frequency_penalty, params.presence_penalty, params.repetition_penalty],
        "min_p": params.min_p,
        "seen": None if seen is None else [part.tolist() for part in seen.parts],
        "left_out": request.left_out,
        "allowed": None if allowed is None else b64encode(allowed).decode(),
    }


def _constrained(request: SampleRequest, described: Mapping[str, Any]) -> SampleRequest:
    frequency, presence, repetition = described["penalties"]
    seen, allowed = described["seen"], described["allowed"]
    params = replace(
        request.params,
        frequency_penalty=frequency,
        presence_penalty=presence,
        repetition_penalty=repetition,
        min_p=described["min_p"],
    )
    return replace(
        request,
        params=params,
        seen=None
        if seen is None
        else SeenTokens(
            np.array(seen[0], dtype=np.int64),
            np.array(seen[1], dtype=np.int32),
            np.array(seen[2], dtype=np.int32),
        ),
        left_out=tuple(described["left_out"]),
        allowed=None if allowed is None else b64decode(allowed),
    )


def described_outcome(outcome: Outcome) -> list[object]:
    """A token, or the class and the words of what is wrong with its row."""
    if isinstance(outcome, Sampled):
        return [outcome.token_id, outcome.logprob, outcome.top]
    return [type(outcome).__name__, outcome.row if isinstance(outcome, BrokenLogits) else str(outcome)]


def outcome_of(description: Sequence[Any]) -> Outcome:
    """The reverse; of unknown errors the words stay."""
    match description:
        case [int(token_id), logprob, top]:
            return Sampled(token_id, logprob, tuple((token, its) for token, its in top))
        case ["BrokenLogits", row]:
            return BrokenLogits(row)
        case ["ValueError", words]:
            return ValueError(words)
        case _:
            return RuntimeError(": ".join(map(str, description)))
