"""Which requests an emulation serves, and when each comes. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from molink.shards.spec import ModelSpec
from molink.simnet.traces import TraceRequest


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
    """Longer requests of a trace are left out; the defaults are the transmission paper's (section 5)."""

    prompt_tokens: int = 2048
    new_tokens: int = 1024


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


def arrivals(trace: Sequence[TraceRequest], rate_rps: float, first: int = 0) -> Iterator[Request]:
    """Requests without end, `rate_rps` a second on average, from the trace's request `first` on.

    Gaps between arrivals are the trace's, all times one factor; after its last request it begins anew.

    Raises:
        ValueError: the rate is not positive, or `first` is no request of the trace.
    """
    if not rate_rps > 0 or not 0 <= first < len(trace):
        raise ValueError(f"rate {rate_rps:g} must be above 0, and request {first} one of {len(trace)}")
    span_s = trace[-1].arrival_s - trace[0].arrival_s
    period_s = len(trace) / rate_rps
    factor = (len(trace) - 1) / rate_rps / span_s if span_s > 0 else 0.0
    number = 0
    while True:
        rounds, place = divmod(first + number, len(trace))
        request = trace[place]
        since_s = (request.arrival_s - trace[first].arrival_s) * factor + rounds * period_s
        yield Request(number, since_s, request.prompt_tokens, request.generated_tokens)
        number += 1
