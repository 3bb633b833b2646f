"""A peer steps aside when its owner needs the machine, comes back when not, and does not flap in between."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.host_policy.rules import (
    BUSY_SHARE,
    CALM_SHARE,
    LEAST_BATTERY_PERCENT,
    MINUTES_OF_DAY,
    PAUSE_AFTER_S,
    RESUME_AFTER_S,
    HostPolicy,
    PauseState,
    QuietHours,
    Readings,
    next_pause_state,
    parse_quiet_hours,
    reason_to_pause,
)

GPU = "cuda:0"
NOON = 12 * 60
CALM = Readings(NOON)
PLAIN = HostPolicy()

minutes = st.integers(0, MINUTES_OF_DAY - 1)
hours = st.builds(QuietHours, minutes, minutes)
readings = st.builds(
    Readings,
    minute_of_day=minutes,
    gpu_share_of_others=st.none() | st.floats(0, 1),
    full_screen=st.none() | st.booleans(),
    on_battery=st.none() | st.booleans(),
    battery_percent=st.none() | st.floats(0, 100),
)
rules = st.builds(
    HostPolicy,
    pause_when_busy=st.sampled_from(["auto", "on", "off"]),
    quiet_hours=st.lists(hours, max_size=2).map(tuple),
    on_battery=st.sampled_from(["pause", "serve"]),
)
devices = st.sampled_from(["cpu", GPU, "mps"])


def why(now: Readings, given_rules: HostPolicy = PLAIN, device: str = GPU) -> str | None:
    return reason_to_pause(now, given_rules, device, paused=False)


# -- quiet hours


@given(hours)
def test_quiet_hours_are_read_as_they_are_written(quiet: QuietHours) -> None:
    assert parse_quiet_hours(f" {quiet} ") == quiet


@given(hours, minutes)
def test_quiet_hours_begin_with_their_start_and_end_before_their_stop(quiet: QuietHours, minute: int) -> None:
    assert quiet.start in quiet
    assert (quiet.stop in quiet) == (quiet.start == quiet.stop)
    if quiet.start < quiet.stop:
        assert (minute in quiet) == (quiet.start <= minute < quiet.stop)
    elif quiet.start > quiet.stop:
        assert (minute in quiet) == (minute >= quiet.start or minute < quiet.stop)


@given(minutes, minutes, minutes)
def test_of_two_halves_of_a_day_each_minute_is_in_one(start: int, stop: int, minute: int) -> None:
    if start != stop:
        assert (minute in QuietHours(start, stop)) != (minute in QuietHours(stop, start))


@pytest.mark.parametrize(
    "text", ["", "22:00", "22-07", "24:00-07:00", "22:60-07:00", "22:00-07:99", "a-b", "-"]
)
def test_what_is_no_part_of_the_day_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a part of the day"):
        parse_quiet_hours(text)


@given(st.text(max_size=20))
def test_any_text_is_quiet_hours_or_a_value_error(text: str) -> None:
    try:
        quiet = parse_quiet_hours(text)
    except ValueError:
        return
    assert parse_quiet_hours(str(quiet)) == quiet


# -- reasons


@given(rules, minutes, devices)
def test_what_cannot_be_read_is_no_reason(some_rules: HostPolicy, minute: int, device: str) -> None:
    assert why(Readings(minute), replace(some_rules, quiet_hours=()), device) is None


def test_quiet_hours_hold_on_every_device() -> None:
    night = HostPolicy("off", (parse_quiet_hours("08:00-09:00"), parse_quiet_hours("22:00-13:00")), "serve")
    assert why(CALM, night, "cpu") == "quiet hours 22:00-13:00"
    assert why(Readings(15 * 60), night, "cpu") is None


def test_on_battery_a_peer_pauses_unless_its_owner_lets_it_serve_and_then_until_it_is_low() -> None:
    on_battery = Readings(NOON, on_battery=True, battery_percent=LEAST_BATTERY_PERCENT)
    low = replace(on_battery, battery_percent=LEAST_BATTERY_PERCENT - 1)
    serve = HostPolicy(on_battery="serve")
    assert why(on_battery) == "on battery"
    assert why(on_battery, serve) is None
    assert why(low, serve) == "the battery is below 20 %"
    assert why(replace(low, on_battery=False), serve) is None


@pytest.mark.parametrize(
    ("setting", "device", "heeds"),
    [
        ("auto", GPU, True),
        ("auto", "mps", True),
        ("auto", "cpu", False),
        ("on", "cpu", True),
        ("off", GPU, False),
    ],
)
def test_other_programs_count_where_they_share_the_device_or_the_owner_says_so(
    setting: str, device: str, heeds: bool
) -> None:
    given_rules = HostPolicy(setting)  # type: ignore[arg-type]
    assert given_rules.heeds_programs(device) == heeds
    assert (why(Readings(NOON, full_screen=True), given_rules, device) is not None) == heeds
    assert (why(Readings(NOON, BUSY_SHARE), given_rules, device) is not None) == heeds


@given(st.floats(0, 1))
def test_a_paused_peer_comes_back_at_less_gpu_use_than_it_went_at(share: float) -> None:
    now = Readings(NOON, share)
    assert (reason_to_pause(now, HostPolicy(), GPU, paused=False) is not None) == (share >= BUSY_SHARE)
    assert (reason_to_pause(now, HostPolicy(), GPU, paused=True) is not None) == (share >= CALM_SHARE)


# -- over time


def run(
    seen: list[tuple[float, Readings]], given_rules: HostPolicy, device: str = GPU
) -> list[tuple[float, PauseState]]:
    """What becomes of a serving peer that reads these, each so many seconds after the one before."""
    now, at_s, states = PauseState(), 0.0, []
    for gap_s, reading in seen:
        at_s += gap_s
        now = next_pause_state(now, reading, given_rules, device, at_s)
        states.append((at_s, now))
    return states


@given(st.lists(st.tuples(st.floats(0.1, 20), readings), max_size=40), rules, devices)
def test_between_two_changes_the_other_side_has_always_stood_for_its_time(
    seen: list[tuple[float, Readings]], some_rules: HostPolicy, device: str
) -> None:
    states = [(0.0, PauseState()), *run(seen, some_rules, device)]
    changed_s = 0.0
    for (_, before), (at_s, after) in pairwise(states):
        if (before.paused_for is None) != (after.paused_for is None):
            wait_s = PAUSE_AFTER_S if after.paused_for is not None else RESUME_AFTER_S
            assert at_s - changed_s >= min(wait_s, at_s)
            assert before.since_s is not None
            assert at_s - before.since_s >= wait_s
            assert after.since_s is None
            changed_s = at_s


@given(st.lists(st.tuples(st.floats(0.1, 20), readings), max_size=40), rules, devices, readings)
def test_a_lasting_situation_decides_whatever_came_before(
    seen: list[tuple[float, Readings]], some_rules: HostPolicy, device: str, lasting: Readings
) -> None:
    share = lasting.gpu_share_of_others
    if share is not None and CALM_SHARE <= share < BUSY_SHARE:
        return  # in between what was stays
    wait_s = max(PAUSE_AFTER_S, RESUME_AFTER_S)
    _, last = run([*seen, (0.1, lasting), (wait_s, lasting), (wait_s, lasting)], some_rules, device)[-1]
    assert last.paused_for == reason_to_pause(lasting, some_rules, device, paused=False)


def test_a_short_peak_of_the_gpu_pauses_nobody() -> None:
    busy = replace(CALM, gpu_share_of_others=1.0)
    gap_s = PAUSE_AFTER_S * 0.75
    states = run([(gap_s, busy), (gap_s, CALM), (gap_s, busy), (gap_s, CALM)], HostPolicy())
    assert [state.paused_for for _, state in states] == [None] * 4


def test_a_pause_that_began_for_one_reason_names_the_one_that_keeps_it() -> None:
    plugged_in_at_night = [
        (0.0, replace(CALM, on_battery=True)),
        (PAUSE_AFTER_S, replace(CALM, on_battery=True)),
        (1.0, replace(CALM, full_screen=True)),
    ]
    states = run(plugged_in_at_night, HostPolicy())
    assert [state.paused_for for _, state in states] == [
        None,
        "on battery",
        "a full-screen program is in front",
    ]
