"""The sampling arguments of a swarm's methods, checked into a `SamplingParams`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from molink.client.errors import InvalidRequest
from molink.shards.grammar import Grammar, GrammarError
from molink.shards.spec import SamplingError, SamplingParams


class Sampling(TypedDict, total=False):
    """Keyword arguments of `generate` and its kin; meanings, ranges and defaults are those of `SamplingParams`. A
    grammar may be asked for as OpenAI's `response_format` too."""

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
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_p: float
    min_tokens: int
    grammar: Grammar | None
    response_format: Mapping[str, object] | None


def checked_params(params: SamplingParams | None, sampling: Sampling) -> SamplingParams:
    """The one that is given.

    Raises:
        InvalidRequest: both are given, or an argument is unknown, of another type or out of range: `parameter` says
            which.
    """
    if params is not None and sampling:
        raise InvalidRequest(f"give either params or {', '.join(sampling)}, not both", "params")
    if params is not None:
        return params
    for name in sampling:
        if name not in Sampling.__annotations__:
            raise InvalidRequest(
                f"there is no {name}: choose from {', '.join(Sampling.__annotations__)}", name
            )
    given = {name: _as_tuple(value) for name, value in sampling.items() if name != "response_format"}
    if sampling.get("response_format") is not None:
        if sampling.get("grammar") is not None:
            raise InvalidRequest("give either grammar or response_format, not both", "response_format")
        given["grammar"] = read_response_format(sampling["response_format"])
    stop = sampling.get("stop")
    if stop is None or isinstance(stop, str):
        given["stop"] = () if stop is None else (stop,)
    try:
        return SamplingParams(**given)  # type: ignore[arg-type]
    except SamplingError as error:
        raise InvalidRequest(str(error), error.parameter) from error


def read_response_format(response_format: object) -> Grammar | None:
    """The grammar that OpenAI's `response_format` asks for; None: none.

    Raises:
        InvalidRequest: it is not of that form.
    """
    try:
        return Grammar.from_response_format(response_format)
    except GrammarError as error:
        raise InvalidRequest(f"response_format: {error}", "response_format") from error


def _as_tuple(value: object) -> object:
    """Any sequence of ids, strings or pairs as the tuple that `SamplingParams` takes; everything else as it is."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, (str, Mapping)) else value
