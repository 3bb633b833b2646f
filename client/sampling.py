"""The sampling arguments of a swarm's methods, checked into a `SamplingParams`."""

from collections.abc import Sequence
from typing import TypedDict

from molink.client.errors import InvalidRequest
from molink.shards.spec import SamplingParams


class Sampling(TypedDict, total=False):
    """Keyword arguments of `generate` and its kin; meanings, ranges and defaults are those of `SamplingParams`."""

    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    logit_bias: Sequence[tuple[int, float]]


def checked_params(params: SamplingParams | None, sampling: Sampling) -> SamplingParams:
    """The one that is given.

    Raises:
        InvalidRequest: both are given, or a value is out of range.
    """
    if params is not None and sampling:
        raise InvalidRequest(f"give either params or {', '.join(sampling)}, not both", "params")
    if params is not None:
        return params
    given = dict(sampling)
    stop = sampling.get("stop")
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    given["stop_token_ids"] = tuple(sampling.get("stop_token_ids", ()))
    given["logit_bias"] = tuple(sampling.get("logit_bias", ()))
    try:
        return SamplingParams(**given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling: {error}") from error
