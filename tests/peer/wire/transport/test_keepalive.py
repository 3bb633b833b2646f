"""When a link asks for a sign of life, when its connection seems dead, and when it is given up."""

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.wire.transport.keepalive import (
    BUSY_LOST_AFTER_S,
    IDLE_LOST_AFTER_S,
    LATE_S,
    SILENT_S,
    TICK_S,
    KeepAlive,
    KeepAliveAction,
)

RTT_S = 0.04


def silent_from(alive: KeepAlive, began_s: float, *, owed: bool) -> tuple[float, float]:
    """For how long nothing has come when the connection first seems dead, and when the link is given up."""
    dead_s: float | None = None
    for tick in count(1):
        now_s = began_s + tick * TICK_S
        action = alive.tick(now_s, owed=owed, measured_s=began_s)
        for part in range(10):
            look_s = now_s + part * TICK_S / 10
            if dead_s is None and alive.seems_dead_s(look_s, RTT_S) <= look_s:
                dead_s = look_s - began_s
        if action is KeepAliveAction.LOST:
            assert dead_s is not None
            return dead_s, now_s - began_s
    raise AssertionError


def test_a_busy_links_connection_seems_dead_a_second_and_a_half_before_it_is_given_up() -> None:
    dead_s, lost_s = silent_from(KeepAlive(0.0), 0.0, owed=True)
    assert SILENT_S <= dead_s <= SILENT_S + LATE_S + 2 * RTT_S
    assert BUSY_LOST_AFTER_S <= lost_s <= BUSY_LOST_AFTER_S + TICK_S


def test_an_idle_links_connection_seems_dead_when_a_ping_is_not_answered() -> None:
    alive = KeepAlive(0.0)
    alive.used_s = -100.0
    dead_s, lost_s = silent_from(alive, 0.0, owed=False)
    assert dead_s < 5.0
    assert lost_s > IDLE_LOST_AFTER_S


def test_what_was_not_asked_or_has_answered_does_not_seem_dead() -> None:
    alive = KeepAlive(0.0)
    assert alive.seems_dead_s(10.0, RTT_S) > 10.0, "nobody has asked"
    assert alive.tick(TICK_S, owed=True, measured_s=0.0) is KeepAliveAction.PING
    assert alive.seems_dead_s(TICK_S + RTT_S, RTT_S) > TICK_S + RTT_S, "an answer takes a round trip"
    alive.heard_s = TICK_S + RTT_S
    assert alive.seems_dead_s(10.0, RTT_S) > 10.0, "the ping was answered"


@given(
    st.lists(st.sampled_from(("heard", "used", "tick", "excused")), max_size=20),
    st.floats(0.0, 2.0),
    st.booleans(),
)
def test_nobody_who_looks_when_he_is_told_to_is_late(events: list[str], rtt_s: float, owed: bool) -> None:
    """What is found dead is so since it was asked, or since the time that was said: nothing hastens that but a ping,
    which leaves time for its answer."""
    alive, now_s = KeepAlive(0.0), 0.0
    for event in events:
        now_s += 0.4
        look_s = alive.seems_dead_s(now_s, rtt_s)
        match event:
            case "heard":
                alive.heard_s = now_s
            case "used":
                alive.used(now_s)
            case "tick":
                alive.tick(now_s, owed=owed, measured_s=now_s)
            case _:
                alive.excuse(now_s)
        assert alive.seems_dead_s(now_s, rtt_s) >= min(look_s, now_s + LATE_S)


def test_an_end_that_was_itself_held_up_begins_to_count_anew() -> None:
    alive = KeepAlive(0.0)
    alive.tick(TICK_S, owed=True, measured_s=0.0)
    alive.excuse(5.0)
    assert alive.seems_dead_s(5.5, RTT_S) == 5.0 + SILENT_S
