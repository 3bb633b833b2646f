"""What became of requests. Pure."""

from dataclasses import dataclass

from molink.simnet.core.request_load import Request


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
