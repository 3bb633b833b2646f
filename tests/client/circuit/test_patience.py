"""Whom a client blames where a token is overdue, and when it goes on without that peer."""

import asyncio
import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.generating import Generating, rest
from support.links.data_plane import DEADLINE_S, asynchronous, soon, until

from molink.client.epochs import patience
from molink.client.epochs.patience import SignOfLife, answers_until_s, ask_after_s, hop_at_fault, usual_s
from molink.peer.wire.protocol import molink_pb2 as pb

seconds = st.floats(0.0, 100.0)
answers = st.lists(st.tuples(st.none() | st.floats(0.0, 2.0), seconds, seconds), min_size=1, max_size=6).map(
    lambda drawn: [SignOfLife(f"hop {at}", *one) for at, one in enumerate(drawn)]
)


@given(seconds, st.booleans())
def test_hops_are_asked_after_what_a_token_takes_and_then_ever_more_rarely(
    token_s: float, is_first: bool
) -> None:
    times_s = [ask_after_s(token_s, asked, is_first=is_first) for asked in range(8)]
    if not is_first:
        assert times_s[0] >= min(patience.ASK_LONGEST_S, patience.ASK_MARGIN * token_s)
    assert times_s[0] >= min(patience.ASK_NEXT_S, patience.ASK_FIRST_S)
    pauses_s = [after - before for before, after in pairwise(times_s)]
    assert all(0 < pause_s <= patience.ASK_LONGEST_S + 1e-9 for pause_s in pauses_s)
    assert all(after >= before - 1e-9 for before, after in pairwise(pauses_s))


@given(seconds, seconds, st.lists(seconds, max_size=patience.SEEN_TOKENS))
def test_what_tokens_take_is_what_they_have_taken_and_before_enough_have_come_what_was_predicted(
    predicted_s: float, measured_s: float, latest_s: list[float]
) -> None:
    found_s = usual_s(predicted_s, measured_s, latest_s)
    if len(latest_s) < patience.SEEN_TOKENS:
        assert found_s == max(predicted_s, measured_s)
    else:
        assert sum(one_s > found_s for one_s in latest_s) <= 1, "one may be an accident"
        assert found_s in latest_s


@given(answers, st.floats(0.0, 5.0))
def test_nobody_is_waited_for_longer_than_the_most_nor_left_before_the_others_took_a_part_of_it(
    signs: list[SignOfLife], most_s: float
) -> None:
    until_s = answers_until_s(signs, most_s)
    came_s = [sign.after_s for sign in signs if sign.after_s is not None]
    assert until_s <= most_s
    if until_s < most_s:
        assert len(came_s) >= len(signs) - 1
        assert until_s >= max(patience.LEAST_ANSWER_S, *came_s)


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
        assert fault.computing_s > max(patience.LEAST_STUCK_S, patience.STUCK * token_s)
        assert fault.computing_s > patience.STUCK * fault.expected_s
        assert fault.expected_s or fault.computing_s > patience.LEAST_UNPREDICTED_S


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


def test_an_engine_is_stuck_sooner_where_its_peer_says_what_its_work_should_take() -> None:
    idle, quick = SignOfLife("idle", 0.01), SignOfLife("quick", 0.01, 1.5, 0.02)
    assert hop_at_fault([idle, quick], 0.1) == quick
    assert hop_at_fault([idle, SignOfLife("an older peer", 0.01, 1.5)], 0.1) is None
    assert hop_at_fault([idle, SignOfLife("at a long prompt", 0.01, 1.5, 0.5)], 0.1) is None


def test_rows_wait_their_turn_where_all_hops_answer_and_one_computes() -> None:
    idle, queued = SignOfLife("idle", 0.01), SignOfLife("queued", 0.01, 0.2, 0.3, waits=True)
    held_up, busy = SignOfLife("no room behind it", 0.01, waits=True), SignOfLife("busy", 0.01, 0.2, 0.3)
    assert patience.waits_its_turn([idle, queued])
    assert patience.waits_its_turn([held_up, busy])
    assert not patience.waits_its_turn([idle, held_up])
    assert not patience.waits_its_turn([idle, busy])
    assert not patience.waits_its_turn([SignOfLife("silent", None), queued])


def test_who_waits_in_a_queue_has_as_many_times_as_there_are_sessions_and_no_more_than_the_most() -> None:
    queued, at_rest = [SignOfLife("queued", 0.01, 0.2, 0.3, waits=True)], [SignOfLife("at rest", 0.01)]
    times = [patience.queued_times(queued, sessions) for sessions in (0, 1, 5, 1000)]
    assert times == [1, 1, 5, patience.MOST_QUEUED]
    assert patience.queued_times(at_rest, 5) == 1


@asynchronous
@pytest.mark.parametrize(("waits", "sessions"), [(True, 1000), (True, 1), (False, 1000)])
async def test_rows_that_wait_behind_those_of_other_sessions_have_longer_before_they_go_elsewhere(
    waits: bool, sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "ASK_FIRST_S", 0.01)
    monkeypatch.setattr(patience, "LEAST_FIRST_S", 0.3)
    monkeypatch.setattr(patience, "MARGIN", 0.0)
    monkeypatch.setattr(patience, "MOST_QUEUED", 1000)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    run.high.waits, run.high.computing_ms, run.high.expected_ms = waits, 20, 300
    await run.started()
    view = run.high.view
    run.high.view = replace(view, state=replace(view.state, sessions=sessions))
    if waits and sessions > 1:
        over_s = asyncio.get_running_loop().time() + 0.6
        await until(lambda: asyncio.get_running_loop().time() > over_s)
        assert run.session.log.losses == []
    else:
        await run.started(2)
        assert [loss.code for loss in run.session.log.losses] == ["stalled"]
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]


@asynchronous
@pytest.mark.parametrize("how", ["silent", "stuck"])
async def test_who_holds_up_a_token_is_left_long_before_the_circuits_time_is_over(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "ASK_FIRST_S", 0.05)
    run = Generating(spare=True)
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    if how == "silent":
        run.high.silent.add("await_ready")
    else:
        run.high.computing_ms = 3_600_000
    await run.started(2)
    assert [(loss.peer_id, loss.code) for loss in run.session.log.losses] == [(run.high.peer_id, "stalled")]
    assert len(run.spare.reserved) == 1
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]


@asynchronous
@pytest.mark.parametrize("how", ["silent", "stuck", "all silent"])
async def test_the_only_circuit_that_there_is_and_one_that_is_slow_as_a_whole_are_waited_for(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "ASK_FIRST_S", 0.01)
    run = Generating(spare=how == "all silent")
    got = asyncio.create_task(rest(run.session.tokens(DEADLINE_S)))
    await run.started()
    if how == "stuck":
        run.high.computing_ms = 3_600_000
    else:
        run.high.silent.add("await_ready")
    if how == "all silent":
        run.low.silent.add("await_ready")
    asked = len(run.high.asked)
    await until(lambda: len(run.high.asked) >= asked + 3)
    run.token(3, 1, finish=pb.STOP)
    assert await soon(got) == [1]
    assert run.session.log.losses == []
