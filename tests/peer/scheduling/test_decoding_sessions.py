"""Who decodes: sessions with a step here, and those that come back after about as long as they always take."""

import pytest

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decoding_sessions import LATE, DecodingSessions

ONE, OTHER = (LeaseKey(bytes([session]) * 16, 1) for session in (1, 2))


def stepping(interval_s: float, steps: int = 5) -> DecodingSessions:
    """What is known of a session that takes so long from step to step, after the last at 0."""
    sessions = DecodingSessions()
    for step in range(steps):
        sessions.record_waiting(ONE)
        sessions.record_decode(ONE, (step - steps + 1) * interval_s)
    return sessions


def test_a_session_with_a_step_here_decodes_however_long_ago_it_did_so_last() -> None:
    sessions = stepping(0.1)
    sessions.record_waiting(ONE)
    sessions.record_waiting(OTHER)
    assert sessions.count(1000.0) == 2


@pytest.mark.parametrize("interval_s", [0.01, 3.0])
def test_a_session_is_expected_back_as_long_as_its_steps_usually_take(interval_s: float) -> None:
    sessions = stepping(interval_s)
    assert sessions.count(0.99 * LATE * interval_s) == 1
    assert sessions.count(1.01 * LATE * interval_s) == 0


def test_a_session_whose_steps_take_longer_now_is_expected_later() -> None:
    sessions = stepping(0.1)
    for step in range(1, 20):
        sessions.record_decode(ONE, 0.5 * step)
    assert sessions.count(19 * 0.5 + 1.5) == 1


def test_before_its_second_step_a_session_is_expected_when_its_circuit_is_predicted_to_be_through() -> None:
    sessions = DecodingSessions()
    sessions.record_first_token(ONE, 0.0, ())
    assert sessions.count(0.01) == 0, "a circuit of which nothing is known"
    sessions.record_decode(ONE, 1.0)
    assert sessions.count(1.0 + 0.99 * LATE) == 1, "the first round took a second"


def test_a_session_that_has_ended_does_not_decode() -> None:
    sessions = stepping(0.1)
    sessions.record_waiting(ONE)
    sessions.forget_session(ONE)
    assert sessions.count(0.0) == 0
