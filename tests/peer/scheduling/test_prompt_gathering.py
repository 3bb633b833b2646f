"""Prompts wait for those that are about to start if that saves time, and no stranger can make them wait for long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.memory.leases import LeaseKey
from molink.peer.profiling.profile import StepWork
from molink.peer.scheduling.prompt_gathering import LONGER, MOST_WAIT_S, REST, PromptGathering, saved_ms
from molink.shards.spec import Span

SPAN, OTHER = Span(0, 16), Span(0, 8)
MOST_TOKENS = 512
SOON_S = MOST_WAIT_S / 10


def key(session: int) -> LeaseKey:
    return LeaseKey(bytes([session]) * 16, 1)


def gathering(pass_ms: float = 1000.0) -> PromptGathering:
    """A pass takes so long whatever is in it, and for each of its tokens a tenth of that."""
    return PromptGathering(lambda work: pass_ms * (1 + 0.1 * work.rows), MOST_TOKENS)


def start(gathered: PromptGathering, session: int, tokens: int = 32, span: Span = SPAN) -> None:
    gathered.add_prompt(key(session), span, tokens)


def expect(
    gathered: PromptGathering, session: int, now_s: float, tokens: int = 32, span: Span = SPAN
) -> None:
    gathered.expect_prompt(key(session), span, tokens, now_s)


def test_a_prompt_that_nobody_follows_does_not_wait() -> None:
    gathered = gathering()
    expect(gathered, 1, 0.0)
    start(gathered, 1)
    assert gathered.due_s(0.0) == 0.0
    assert gathered.release_ready(0.0) == (key(1),)
    assert gathered.due_s(0.0) is None


def test_requests_that_come_at_once_are_released_together_when_the_last_one_has_started() -> None:
    gathered = gathering()
    for session in (1, 2, 3):
        expect(gathered, session, 0.0)
    start(gathered, 2)
    assert gathered.release_ready(0.0) == ()
    expect(gathered, 4, SOON_S)
    for session in (1, 4):
        start(gathered, session)
        assert gathered.release_ready(SOON_S) == ()
    start(gathered, 3)
    assert gathered.release_ready(2 * SOON_S) == (key(2), key(1), key(4), key(3))


def test_nobody_waits_longer_than_what_one_pass_saves() -> None:
    gathered = gathering(pass_ms=4.0)
    expect(gathered, 1, 10.0)
    start(gathered, 2)
    assert gathered.release_ready(10.0) == ()
    until_s = gathered.due_s(10.0)
    assert until_s is not None
    assert 10.0 < until_s <= 10.004
    assert gathered.release_ready(until_s) == (key(2),)
    nothing = gathering(pass_ms=0.0)
    expect(nothing, 1, 10.0)
    start(nothing, 2)
    assert nothing.release_ready(10.0) == (key(2),)


@given(st.integers(1, 80), st.integers(1, 600), st.floats(0, 100), st.floats(0, 10))
def test_one_pass_saves_what_a_pass_takes_beside_its_tokens(
    layers: int, few: int, fixed_ms: float, token_ms: float
) -> None:
    def predicted_ms(work: StepWork) -> float:
        return work.layers * (fixed_ms + token_ms * work.rows)

    saved = saved_ms(predicted_ms, layers, few, MOST_TOKENS)
    assert saved == pytest.approx(layers * fixed_ms * max(0.0, 1 - few / MOST_TOKENS), abs=1e-6)


def test_a_session_that_does_not_start_is_waited_for_until_a_moment_after_it_could_have() -> None:
    gathered = gathering()
    expect(gathered, 1, 0.0)
    start(gathered, 2)
    assert gathered.release_ready(0.9 * MOST_WAIT_S) == ()
    assert gathered.release_ready(MOST_WAIT_S) == (key(2),)
    late = gathering()
    expect(late, 1, 0.0)
    start(late, 2)
    assert late.release_ready(MOST_WAIT_S) == (key(2),)


def test_leases_without_end_do_not_make_a_prompt_wait_longer() -> None:
    gathered = gathering()
    start(gathered, 0)
    now_s = 0.0
    while not gathered.release_ready(now_s):
        expect(gathered, 1 + round(now_s / SOON_S), now_s)
        assert now_s <= MOST_WAIT_S
        now_s += SOON_S


def test_strangers_who_lease_and_never_start_take_no_more_than_their_share_of_the_time() -> None:
    gathered, waited_s, now_s, step_s = gathering(), 0.0, 0.0, MOST_WAIT_S / 50
    for session in range(200):
        start(gathered, session)
        begun_s = now_s
        while True:
            expect(gathered, 201, now_s)
            if gathered.release_ready(now_s):
                break
            now_s += step_s
        waited_s += now_s - begun_s
        now_s += MOST_WAIT_S
    assert 0 < waited_s <= now_s / REST


def test_a_prompt_that_had_to_wait_for_the_engine_waits_for_those_that_could_not_start_meanwhile() -> None:
    gathered = gathering()
    expect(gathered, 2, 0.0)
    start(gathered, 1)
    expect(gathered, 2, 3.0)
    assert gathered.release_ready(3.0) == ()
    start(gathered, 2)
    assert gathered.release_ready(3.0) == (key(1), key(2))


def test_nobody_waits_for_what_would_not_be_computed_with_it() -> None:
    for tokens, span in ((32, OTHER), (round(32 * LONGER) + 1, SPAN)):
        gathered = gathering()
        expect(gathered, 1, 0.0, tokens, span)
        start(gathered, 2)
        assert gathered.release_ready(0.0) == (key(2),)
    full = gathering()
    expect(full, 1, 0.0)
    start(full, 2, MOST_TOKENS)
    assert full.release_ready(0.0) == (key(2),)


def test_a_session_that_has_ended_is_neither_waited_for_nor_released() -> None:
    gathered = gathering()
    expect(gathered, 1, 0.0)
    start(gathered, 2)
    start(gathered, 3)
    assert gathered.release_ready(0.0) == ()
    gathered.forget_session(key(1))
    gathered.forget_session(key(3))
    assert gathered.release_ready(0.0) == (key(2),)
    gathered.forget_session(key(2))
