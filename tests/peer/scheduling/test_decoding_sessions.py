"""Who decodes: sessions with a step here, and those that come back after about as long as they always take."""

import pytest

from molink.peer.scheduling.decoding_sessions import LATE, DecodingSession


def stepping(interval_s: float, steps: int = 5) -> DecodingSession:
    """What is known of a session that takes so long from step to step, after the last at 0."""
    session = DecodingSession()
    for step in range(steps):
        session.waits = True
        session.record_decode((step - steps + 1) * interval_s)
    return session


def test_a_session_with_a_step_here_decodes_however_long_ago_it_did_so_last() -> None:
    session = stepping(0.1)
    session.waits = True
    assert session.is_near(1000.0)
    assert DecodingSession(waits=True).is_near(1000.0)


@pytest.mark.parametrize("interval_s", [0.01, 3.0])
def test_a_session_is_expected_back_as_long_as_its_steps_usually_take(interval_s: float) -> None:
    session = stepping(interval_s)
    assert session.is_near(0.99 * LATE * interval_s)
    assert not session.is_near(1.01 * LATE * interval_s)


def test_a_session_whose_steps_take_longer_now_is_expected_later() -> None:
    session = stepping(0.1)
    for step in range(1, 20):
        session.record_decode(0.5 * step)
    assert session.is_near(19 * 0.5 + 1.5)


def test_before_its_second_step_a_session_is_expected_when_its_circuit_is_predicted_to_be_through() -> None:
    session = DecodingSession.after_prompt(0.0, ())
    assert not session.is_near(0.01), "a circuit of which nothing is known"
    session.record_decode(1.0)
    assert session.is_near(1.0 + 0.99 * LATE), "the first round took a second"


def test_a_session_that_has_had_no_step_does_not_decode() -> None:
    assert not DecodingSession().is_near(0.0)
