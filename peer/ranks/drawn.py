"""How the first rank is to draw tokens, and what came of it, as JSON values: floats keep all their digits."""

from collections.abc import Sequence
from typing import Any

from molink.shards.sampling.sampling import BrokenLogits, Outcome, Sampled, SampleRequest
from molink.shards.spec import SamplingParams


def described_request(request: SampleRequest) -> list[object]:
    """What a row's draw depends on, and nothing else of the generation."""
    params = request.params
    return [
        params.temperature, params.top_k, params.top_p, params.logprobs, params.logit_bias,
        request.seed, request.position,
    ]  # fmt: skip


def request_of(description: Sequence[Any]) -> SampleRequest:
    """The reverse."""
    temperature, top_k, top_p, logprobs, logit_bias, seed, position = description
    bias = tuple((token, added) for token, added in logit_bias)
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, logprobs=logprobs, logit_bias=bias
    )
    return SampleRequest(params, seed, position)


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
