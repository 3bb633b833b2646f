"""The keyword arguments of a swarm's methods: how to draw, checked into a `SamplingParams`, and what to guess from."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

from molink.client.epochs.shared_prompt import SharedPrompt
from molink.client.errors import InvalidRequest
from molink.shards.grammar import Grammar, GrammarError
from molink.shards.spec import SamplingError, SamplingParams


class SpeedHints(TypedDict, total=False):
    """Keyword arguments that change how fast tokens come, and no token: `speculation` (`auto`, `off`); `prediction`,
    text or token ids that are likely to be generated; `shared_prompt`, which generations of one prompt have in common
    so that it is computed once."""

    speculation: str | None
    prediction: str | Sequence[int] | None
    shared_prompt: SharedPrompt | None


class Sampling(SpeedHints, total=False):
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
    prompt_logprobs: int | None
    logit_bias: Sequence[tuple[int, float]]
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_p: float
    min_tokens: int
    grammar: Grammar | None
    response_format: Mapping[str, object] | None


MOST_PREDICTION_BYTES: Final = 64 * 1024
MOST_PREDICTION_TOKENS: Final = MOST_PREDICTION_BYTES // 4


def checked_params(params: SamplingParams | None, sampling: Sampling) -> SamplingParams:
    """The one that is given.

    Raises:
        InvalidRequest: both are given, or an argument is unknown, of another type or out of range: `parameter` says
            which.
    """
    drawing = [name for name in sampling if name not in SpeedHints.__annotations__]
    if params is not None and drawing:
        raise InvalidRequest(f"give either params or {', '.join(drawing)}, not both", "params")
    if params is not None:
        return params
    for name in drawing:
        if name not in Sampling.__annotations__:
            hints = SpeedHints.__annotations__
            known = [*(one for one in Sampling.__annotations__ if one not in hints), *hints]
            raise InvalidRequest(f"there is no {name}: choose from {', '.join(known)}", name)
    given = {
        name: _as_tuple(value)
        for name, value in sampling.items()
        if name != "response_format" and name not in SpeedHints.__annotations__
    }
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


def checked_speculation(speculation: str | None) -> bool:
    """Whether tokens are guessed; None: they are.

    Raises:
        InvalidRequest: it is neither `auto` nor `off`.
    """
    if speculation not in (None, "auto", "off"):
        raise InvalidRequest(f"speculation must be auto or off, got {speculation!r}", "speculation")
    return speculation != "off"


def checked_prediction(prediction: object) -> str | tuple[int, ...]:
    """The prediction, without one that says nothing.

    Raises:
        InvalidRequest: it is neither text nor token ids, or larger than MOST_PREDICTION_BYTES.
    """
    if prediction is None:
        return ()
    if isinstance(prediction, str):
        size = len(prediction.encode(errors="replace"))
    elif isinstance(prediction, Sequence) and all(type(one) is int for one in prediction):
        size = 4 * len(prediction)
    else:
        raise InvalidRequest("a prediction is text or token ids", "prediction")
    if size > MOST_PREDICTION_BYTES:
        raise InvalidRequest(
            f"a prediction of {size} bytes is more than the {MOST_PREDICTION_BYTES} that a generation takes, or "
            f"{MOST_PREDICTION_TOKENS} token ids: send the part that is likely to come first",
            "prediction",
        )
    return prediction if isinstance(prediction, str) else tuple(prediction)


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
