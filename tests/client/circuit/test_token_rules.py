"""What a head may send, and what ends its circuit."""

import math
from dataclasses import replace

import numpy as np
import pytest

from molink.client.circuit.token_rules import (
    MOST_AHEAD,
    MOST_OUT_OF_PLACE,
    HeadAtFault,
    TokenRules,
    TokenStream,
)
from molink.client.epochs import patience
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.prompt_logprobs import PromptLogprobs
from molink.shards.spec import MOST_GUESSED_TOKENS

RULES = TokenRules(last_position=12, vocabulary=384, stop_ids=frozenset({1}), logprobs=None)
SCORED = TokenRules(last_position=12, vocabulary=384, stop_ids=frozenset({1}), logprobs=2)
TOP = (pb.TopLogprob(token_id=5, logprob=-0.5), pb.TopLogprob(token_id=6, logprob=-80.0))


def intake(rules: TokenRules = RULES) -> TokenStream:
    return TokenStream(rules, expected=3, hops=2)


def token(position: int = 3, token_id: int = 5, **fields: object) -> pb.Token:
    return pb.Token(position=position, token_id=token_id, **fields)  # type: ignore[arg-type]


def test_an_honest_generation_passes() -> None:
    taking = intake()
    for position in range(3, 12):
        assert taking.takes(token(position))
    assert taking.takes(token(12, finish=pb.LENGTH))
    assert taking.ended
    assert not taking.takes(token(13))


def test_a_stop_token_before_as_many_tokens_as_were_asked_for_is_the_heads_fault() -> None:
    rules = replace(RULES, first_stop=5)
    taking = intake(rules)
    assert taking.takes(token(3))
    assert taking.takes(token(4))
    assert taking.takes(token(5, 1, finish=pb.STOP))
    with pytest.raises(HeadAtFault, match="before as many tokens"):
        intake(rules).takes(token(3, 1, finish=pb.STOP))


def test_a_stop_token_ends_it_and_so_do_scores_that_were_asked_for() -> None:
    assert intake().takes(token(3, 1, finish=pb.STOP))
    assert intake(SCORED).takes(token(3, logprob=-0.5, top=TOP))


@pytest.mark.parametrize(
    "wrong",
    [
        token(token_id=384),
        token(token_id=2**32 - 1),
        token(finish=pb.LENGTH),
        token(guessed=MOST_GUESSED_TOKENS + 1),
        token(guessed=1, guess_sources=b"\1\1"),
        token(finish=pb.STOP),
        token(token_id=1),
        token(finish=7),
        token(logprob=-0.5),
        token(top=TOP),
        token(position=4 + MOST_AHEAD),
        token(position=2**32 - 1),
        token(timings=[pb.HopTiming()] * 3),
    ],
    ids=str,
)
def test_what_no_honest_circuit_sends_is_the_heads_fault(wrong: pb.Token) -> None:
    with pytest.raises(HeadAtFault):
        intake().takes(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        token(),
        token(logprob=-0.5),
        token(logprob=math.nan, top=TOP),
        token(logprob=-math.inf, top=TOP),
        token(logprob=0.5, top=TOP),
        token(logprob=-0.5, top=TOP[:1]),
        token(logprob=-0.5, top=[TOP[0], pb.TopLogprob(token_id=384, logprob=-1.0)]),
        token(logprob=-0.5, top=[TOP[0], pb.TopLogprob(token_id=6, logprob=math.nan)]),
        token(logprob=-0.5, top=[TOP[0], pb.TopLogprob(token_id=6, logprob=-math.inf)]),
    ],
    ids=str,
)
def test_scores_that_cannot_be_are_the_heads_fault(wrong: pb.Token) -> None:
    with pytest.raises(HeadAtFault):
        intake(SCORED).takes(wrong)


def told(logprobs: list[float], ids: list[int], likeliest: list[float]) -> bytes:
    """Of a prompt of three tokens, with the likeliest one at each place."""
    places = np.array(ids, np.uint32)[:, None], np.array(likeliest, np.float32)[:, None]
    return PromptLogprobs(np.array(logprobs, np.float32), *places).packed()


SOUND = told([-2.0, -0.5], [7, 8], [-1.0, -0.25])
OF_PROMPT = replace(RULES, prompt_tokens=3, prompt_logprobs=1)


def test_log_probabilities_of_the_prompt_come_with_the_first_token_behind_it_alone() -> None:
    taking = intake(OF_PROMPT)
    assert taking.takes(token(3, prompt_logprobs=SOUND))
    assert taking.takes(token(4))
    for rules, position in ((OF_PROMPT, 4), (RULES, 3)):
        taking = intake(rules)
        taking.expected = position
        with pytest.raises(HeadAtFault, match="not asked for"):
            taking.takes(token(position, prompt_logprobs=SOUND))


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        SOUND[:-1],
        SOUND + b"\0" * 12,
        told([0.5, -0.5], [7, 8], [-1.0, -0.25]),
        told([math.nan, -0.5], [7, 8], [-1.0, -0.25]),
        told([-math.inf, -0.5], [7, 8], [-1.0, -0.25]),
        told([-2.0, -0.5], [384, 8], [-1.0, -0.25]),
        told([-2.0, -0.5], [7, 8], [-1.0, math.nan]),
        told([-2.0, -0.5], [7, 8], [-1.0, -math.inf]),
        told([-2.0, -0.5], [7, 8], [-1.0, 0.5]),
    ],
)
def test_log_probabilities_of_the_prompt_that_cannot_be_are_the_heads_fault(wrong: bytes) -> None:
    with pytest.raises(HeadAtFault):
        intake(OF_PROMPT).takes(token(3, prompt_logprobs=wrong))


def test_going_on_behind_the_last_token_is_the_heads_fault() -> None:
    taking = intake()
    taking.expected = 12
    with pytest.raises(HeadAtFault):
        taking.takes(token(12))
    taking.expected = 13
    with pytest.raises(HeadAtFault):
        taking.takes(token(13))


def test_a_few_tokens_out_of_place_do_no_harm_and_many_are_a_fault() -> None:
    taking = intake()
    for _ in range(MOST_OUT_OF_PLACE):
        assert not taking.takes(token(2))
    assert taking.takes(token(3))
    with pytest.raises(HeadAtFault):
        taking.takes(token(3))


def test_patience_follows_the_prediction_within_bounds_and_grows_with_circuits_that_yield_nothing() -> None:
    assert patience.next_token_s(0.001, 0.0) == patience.LEAST_NEXT_S
    assert patience.next_token_s(1.0, 0.0) == patience.next_token_s(0.1, 1.0) == 8.0
    assert patience.next_token_s(1000.0, 0.0) == patience.MOST_NEXT_S
    assert patience.first_token_s(0.1) == patience.LEAST_FIRST_S
    assert patience.first_token_s(0.1, 2) == 4 * patience.LEAST_FIRST_S
    assert patience.first_token_s(10.0) == 80.0
    assert patience.first_token_s(300.0) == 600.0
    assert patience.first_token_s(0.1, 100) == patience.MOST_FIRST_S
    assert patience.step_s(10.0) == patience.STEP_S
