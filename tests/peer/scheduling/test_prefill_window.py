"""Prefill windows of one session: what waits at a hop is bounded. How hops use them: `tests/peer/hop/`."""

import pytest

from molink.peer.scheduling.microbatch import BatchLimits, MicroBatchQueue, PendingStep
from molink.peer.scheduling.prefill_window import WINDOW_BYTES, WINDOW_STEPS, ReceiveWindow, SendWindow
from molink.shards.spec import Span

SPAN = Span(0, 4)


def test_a_window_takes_steps_until_it_is_full_and_opens_when_they_are_said_to_be_stepped() -> None:
    sent = SendWindow(window_bytes=100)
    assert sent.is_open
    sent.record_sent(0, 99)
    assert sent.is_open
    sent.record_sent(1, 500)
    assert not sent.is_open
    sent.apply_window_update(0)
    assert not sent.is_open
    sent.apply_window_update(1)
    assert sent.is_open


def test_many_small_steps_fill_a_window_too() -> None:
    sent, received = SendWindow(), ReceiveWindow()
    for step in range(WINDOW_STEPS):
        assert sent.is_open
        assert received.admit(step, 1)
        sent.record_sent(step, 1)
    assert not sent.is_open
    assert not received.admit(WINDOW_STEPS, 1)


def test_who_sends_into_a_full_window_is_refused_and_nothing_of_it_is_kept() -> None:
    received = ReceiveWindow(window_bytes=100)
    assert received.admit(0, 100)
    assert not received.admit(1, 1)
    assert received.record_computed(0)
    assert received.admit(1, 1)


def test_the_sender_is_told_each_half_window_and_not_of_each_step() -> None:
    received = ReceiveWindow(window_bytes=100)
    told = []
    for step in range(12):
        assert received.admit(step, 10)
        told.append(received.record_computed(step))
    assert told == [False, False, False, False, True] * 2 + [False, False]


def test_the_longest_prompt_of_one_step_fits_a_window() -> None:
    sent, received = SendWindow(), ReceiveWindow()
    assert sent.is_open
    sent.record_sent(0, 2 * WINDOW_BYTES)
    assert received.admit(0, 2 * WINDOW_BYTES)
    assert received.record_computed(0)


@pytest.mark.parametrize("blocked", [{1}, {1, 2}])
def test_decode_goes_on_beside_prefill_that_may_not_and_that_keeps_its_place(blocked: set[int]) -> None:
    queue: MicroBatchQueue[PendingStep[int]] = MicroBatchQueue(BatchLimits(max_tokens=10, max_sessions=4))
    waiting = [PendingStep(session, 0, SPAN, 6, 0.0, prefill=True) for session in (1, 2)]
    decode = PendingStep(3, 0, SPAN, 1, 9.0, prefill=False)
    for pending in (*waiting, decode):
        assert queue.push(pending)
    may = [one for one in waiting if one.session not in blocked]
    first = queue.next_batch(lambda session: session not in blocked)
    assert first == (decode, *may)
    assert queue.next_batch(lambda session: session not in blocked) == ()
    assert len(queue) == len(blocked)
    assert queue.next_batch()[0] == waiting[0]
