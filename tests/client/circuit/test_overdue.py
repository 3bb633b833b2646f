"""Whom a client blames where a token is overdue."""

import math
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from molink.client.circuit import overdue
from molink.client.circuit.overdue import SignOfLife, answers_until_s, ask_after_s, hop_at_fault

seconds = st.floats(0.0, 100.0)
answers = st.lists(st.tuples(st.none() | st.floats(0.0, 2.0), seconds), min_size=1, max_size=6).map(
    lambda drawn: [SignOfLife(f"hop {at}", *one) for at, one in enumerate(drawn)]
)


@given(seconds, seconds, st.booleans())
def test_hops_are_asked_after_what_a_token_takes_and_then_ever_more_rarely(
    predicted_s: float, measured_s: float, is_first: bool
) -> None:
    times_s = [ask_after_s(predicted_s, measured_s, asked, is_first=is_first) for asked in range(8)]
    if not is_first:
        assert times_s[0] >= min(overdue.LONGEST_S, overdue.MARGIN * max(predicted_s, measured_s))
    assert times_s[0] >= min(overdue.LEAST_NEXT_S, overdue.FIRST_S)
    pauses_s = [after - before for before, after in pairwise(times_s)]
    assert all(0 < pause_s <= overdue.LONGEST_S + 1e-9 for pause_s in pauses_s)
    assert all(after >= before - 1e-9 for before, after in pairwise(pauses_s))


@given(answers, st.floats(0.0, 5.0))
def test_nobody_is_waited_for_longer_than_the_most_nor_left_before_the_others_took_a_part_of_it(
    signs: list[SignOfLife], most_s: float
) -> None:
    until_s = answers_until_s(signs, most_s)
    came_s = [sign.after_s for sign in signs if sign.after_s is not None]
    assert until_s <= most_s
    if until_s < most_s:
        assert len(came_s) >= len(signs) - 1
        assert until_s >= max(overdue.LEAST_ANSWER_S, *came_s)


@given(answers, seconds)
def test_who_has_answered_and_computes_nothing_long_is_never_at_fault(
    signs: list[SignOfLife], token_s: float
) -> None:
    fault = hop_at_fault(signs, token_s)
    if fault is None:
        return
    assert fault in signs
    if fault.after_s is None:
        assert any(sign.after_s is not None for sign in signs)
    else:
        assert all(sign.after_s is not None for sign in signs)
        assert fault.computing_s > max(overdue.LEAST_STUCK_S, overdue.STUCK * token_s)


def test_one_silent_hop_among_others_is_at_fault_and_silence_all_around_is_nobodys() -> None:
    heard, silent = SignOfLife("heard", 0.01), SignOfLife("silent", None)
    assert hop_at_fault([heard, silent, heard], 0.1) == silent
    assert hop_at_fault([silent, silent], 0.1) is None
    assert hop_at_fault([silent], 0.1) is None
    assert hop_at_fault([silent, silent], 0.1, is_over=True) == silent


def test_a_stuck_engine_is_at_fault_unless_several_say_that_theirs_is() -> None:
    idle, stuck = SignOfLife("idle", 0.01), SignOfLife("stuck", 0.01, math.inf)
    assert hop_at_fault([idle, stuck], 0.1) == stuck
    assert hop_at_fault([stuck, stuck], 0.1) is None
