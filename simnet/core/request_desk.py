"""Requests of a simulated circuit: who comes, who waits for memory, and what became of each."""

from collections import deque
from collections.abc import Callable, Iterable

from molink.simnet.core.request_load import Request, RequestOutcome
from molink.simnet.core.room import reserved_tokens
from molink.simnet.core.timeline import Timeline

NOT_ENDED = "it had not ended when the run did"


class RequestDesk:
    """Owner of the requests. First come, first served; nobody overtakes."""

    def __init__(
        self, timeline: Timeline, kv_tokens: int, most_sessions: int, start: Callable[[Request], None]
    ) -> None:
        """`start` is called with each request as soon as there is room for all of its tokens."""
        self._timeline = timeline
        self._kv_tokens = self._free_tokens = kv_tokens
        self._most_sessions = self._free_sessions = most_sessions
        self._start = start
        self._waiting: deque[Request] = deque()
        self._served: dict[int, tuple[Request, list[float]]] = {}
        self._outcomes: dict[int, RequestOutcome] = {}
        self._came = 0
        self.tokens = 0
        """That all requests have got."""
        self.to_client_s = 0.0
        """How long a token is on its way to its client."""

    @property
    def present(self) -> int:
        """Requests that have come and not ended."""
        return len(self._served) + len(self._waiting)

    @property
    def ended(self) -> set[int]:
        """The numbers of requests that have ended."""
        return set(self._outcomes)

    def arrive(self, requests: Iterable[Request]) -> None:
        """They will come at their times, which ascend."""
        coming = iter(requests)

        def next_one() -> None:
            request = next(coming, None)
            if request is not None:
                self._timeline.call_at(request.arrival_s, lambda: come(request))

        def come(request: Request) -> None:
            self._come(request)
            next_one()

        next_one()

    def token(self, number: int) -> bool:
        """A token of the request is on its way to its client. Whether it was the last: others have room then."""
        request, token_s = self._served[number]
        token_s.append(self._timeline.now_s + self.to_client_s)
        self.tokens += 1
        if len(token_s) < request.new_tokens:
            return False
        del self._served[number]
        self._outcomes[number] = RequestOutcome(request, (0,) * len(token_s), tuple(token_s), ())
        self._free_sessions += 1
        self._free_tokens += _tokens(request)
        return True

    def let_in(self) -> None:
        """Starts whoever has room now."""
        while self._waiting and self._free_sessions and _tokens(self._waiting[0]) <= self._free_tokens:
            request = self._waiting.popleft()
            self._free_sessions -= 1
            self._free_tokens -= _tokens(request)
            self._served[request.number] = (request, [])
            self._start(request)

    def outcome(self, number: int) -> RequestOutcome:
        """What became of a request that has come, up to now."""
        if number in self._outcomes:
            return self._outcomes[number]
        if number in self._served:
            request, token_s = self._served[number]
            return RequestOutcome(request, (0,) * len(token_s), tuple(token_s), (), NOT_ENDED)
        request = next(one for one in self._waiting if one.number == number)
        return RequestOutcome(request, (), (), (), NOT_ENDED)

    def check(self) -> None:
        """Raises AssertionError where requests or memory were lost or made."""
        reserved = sum(_tokens(request) for request, _ in self._served.values())
        accounts = {
            "requests": self._came == len(self._outcomes) + len(self._served) + len(self._waiting),
            "KV memory": reserved + self._free_tokens == self._kv_tokens and self._free_tokens >= 0,
            "sessions": len(self._served) + self._free_sessions == self._most_sessions,
        }
        wrong = [what for what, right in accounts.items() if not right]
        if wrong:
            raise AssertionError(f"{', '.join(wrong)} are not conserved")

    def _come(self, request: Request) -> None:
        self._came += 1
        if _tokens(request) > self._kv_tokens:
            tokens = request.prompt_tokens + request.new_tokens
            error = f"{tokens} tokens do not fit the circuit's KV cache of {self._kv_tokens}"
            self._outcomes[request.number] = RequestOutcome(request, (), (), (), error)
            return
        self._waiting.append(request)
        self.let_in()


def _tokens(request: Request) -> int:
    """In the KV cache, all that it will ever have."""
    return reserved_tokens(request.prompt_tokens + request.new_tokens)
