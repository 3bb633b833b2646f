"""What a request is counted for, however far its generations have come when it ends."""

from typing import cast

import pytest
from support.swarms.fake_swarm import MODEL

from molink.client.api.generation import TextPiece
from molink.client.errors import InvalidRequest, SwarmUnavailable
from molink.client.gateway.accounts.admitted import AdmittedRequest
from molink.client.gateway.accounts.quotas import TakenQuota
from molink.client.gateway.accounts.usage_ledger import UsageLedger


class Taken:
    """A quota, and what was settled."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def settle(self, tokens: int) -> None:
        self.tokens.append(tokens)


class Request:
    """A request of two choices of one prompt and one of another, of about 700 and 50 tokens."""

    def __init__(self) -> None:
        self.taken = Taken()
        taken = cast("TakenQuota", self.taken)
        self.admitted = AdmittedRequest(UsageLedger(), "k", MODEL, taken, (700, 0, 50))

    def settled(self) -> int:
        self.admitted.end()
        [tokens] = self.taken.tokens
        return tokens


@pytest.fixture
def request_() -> Request:
    return Request()


def test_what_has_not_begun_costs_no_tokens(request_: Request) -> None:
    assert request_.settled() == 0


def test_prompts_that_have_begun_cost_their_estimates_until_they_are_counted(request_: Request) -> None:
    for generation in range(3):
        request_.admitted.begin(generation)
    for generation in range(2):
        request_.admitted.count_prompt(generation, 611)
    assert request_.settled() == 611 + 50


@pytest.mark.parametrize("error", [SwarmUnavailable("nobody"), RuntimeError()])
@pytest.mark.parametrize("of", [None, 0, 1])
def test_where_the_swarm_fails_prompts_cost_nothing_unless_something_of_them_came(
    error: Exception, of: int | None, request_: Request
) -> None:
    for generation in range(3):
        request_.admitted.begin(generation)
    request_.admitted.note(2, TextPiece("a", (1,)))
    request_.admitted.fail(error, of)
    assert request_.settled() == 50 + 1


def test_a_callers_mistake_in_one_prompt_gives_him_no_other_one_for_nothing(request_: Request) -> None:
    for generation in range(3):
        request_.admitted.begin(generation)
    request_.admitted.fail(InvalidRequest("no such token"), 2)
    request_.admitted.fail(InvalidRequest("no such token"))
    assert request_.settled() == 700
