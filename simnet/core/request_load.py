"""The requests of a run, when each comes, and what became of each. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.shards.spec import ModelSpec
from molink.simnet.core.traces import TraceRequest

MOST_PROMPT_TOKENS, MOST_NEW_TOKENS = 2048, 1024
"""The transmission paper's limits (section 5)."""
AFTERMATH_S = 1800.0
"""So long after the last measured arrival, what has not ended has failed."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run."""

    number: int
    arrival_s: float
    """Since the start of the run."""
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """Longer requests of a trace are left out."""

    prompt_tokens: int = MOST_PROMPT_TOKENS
    new_tokens: int = MOST_NEW_TOKENS


def kept(trace: Sequence[TraceRequest], limits: LengthLimits, spec: ModelSpec) -> tuple[TraceRequest, ...]:
    """The requests that are within the limits and the model's context.

    Raises:
        ValueError: there is none.
    """
    left = tuple(
        request
        for request in trace
        if request.prompt_tokens <= limits.prompt_tokens
        and request.generated_tokens <= limits.new_tokens
        and request.prompt_tokens + request.generated_tokens <= spec.context_length
    )
    if not left:
        raise ValueError(
            f"no request of the trace has at most {limits.prompt_tokens} tokens of prompt and {limits.new_tokens} "
            f"of output, and fits the context of {spec.name}, {spec.context_length} tokens"
        )
    return left


def arrivals(
    trace: Sequence[TraceRequest], rate_rps: float, lasting_s: float, first: int = 0
) -> Iterator[Request]:
    """Requests without end, from the trace's request `first` on; after its last it begins anew.

    Gaps between arrivals are the trace's, all times one factor, such that within `lasting_s` come as many requests as
    `rate_rps` says: a trace has busy and quiet hours.

    Raises:
        ValueError: rate or time is not positive, or `first` is no request of the trace.
    """
    if not min(rate_rps, lasting_s) > 0 or not 0 <= first < len(trace):
        raise ValueError(
            f"rate {rate_rps:g} and time {lasting_s:g} must be above 0, and request {first} one of {len(trace)}"
        )
    between_s = (trace[-1].arrival_s - trace[0].arrival_s) / max(1, len(trace) - 1)
    if between_s == 0:
        between_s = 1.0

    def since_first_s(number: int) -> float:
        rounds, place = divmod(first + number, len(trace))
        return trace[place].arrival_s - trace[first].arrival_s + rounds * len(trace) * between_s

    count = max(1, round(rate_rps * lasting_s))
    factor = count / rate_rps / since_first_s(count) if since_first_s(count) > 0 else 0.0
    for number in itertools.count():
        request = trace[(first + number) % len(trace)]
        yield Request(number, since_first_s(number) * factor, request.prompt_tokens, request.generated_tokens)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """The outcome of a request. Times are seconds since the start of the run."""

    request: Request
    token_ids: tuple[int, ...]
    token_s: tuple[float, ...]
    """When each token came."""
    one_way_s: tuple[float, ...]
    """If it was traced, for each token but the first: the mean way of its messages from hop to hop."""
    error: str | None = None
    """None: it has all its tokens."""
