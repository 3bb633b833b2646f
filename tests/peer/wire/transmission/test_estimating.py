"""What is learnt of a line: rate, delay, queue, and the spacing of decodes. Whatever comes, it stays sensible."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.wire.estimation.bottleneck_model import BottleneckModel
from molink.peer.wire.estimation.decode_intervals import (
    KNOWN,
    LONGEST_GAP_S,
    PASSED_S,
    DecodeIntervalPredictor,
)
from molink.peer.wire.estimation.estimator import (
    LEAST_RUN_BYTES,
    DelayEstimator,
    RateEstimator,
    WindowedMinimum,
)
from molink.peer.wire.estimation.slow_start import SlowStart

GAPS_S = st.floats(1e-4, 0.1)
SIZES = st.integers(100, 256 * 1024)
ARRIVALS = st.lists(st.tuples(GAPS_S, SIZES, st.booleans()), max_size=200)


@given(arrivals=ARRIVALS, idle=st.sets(st.integers(0, 199)))
def test_the_rate_lies_between_the_slowest_and_the_fastest_that_was_seen(
    arrivals: list[tuple[float, int, bool]], idle: set[int]
) -> None:
    estimator, now_s = RateEstimator(), 5.0
    for number, (gap_s, size_bytes, more) in enumerate(arrivals):
        now_s += gap_s
        estimator.record_arrival(now_s, now_s, size_bytes, more)
        if number in idle:
            estimator.idle()
        rate = estimator.bytes_per_s
        if rate is not None:
            seen = [size / gap for gap, size, _ in arrivals[: number + 1]]
            assert 0.999 * min(seen) <= rate <= 1.001 * max(seen)


@given(bursts=st.lists(st.integers(1024, LEAST_RUN_BYTES - 1024), max_size=60), gap_s=GAPS_S)
def test_bursts_that_are_over_before_they_fill_a_line_never_lower_the_rate(
    bursts: list[int], gap_s: float
) -> None:
    """As copies of a few tokens are: what is measured of them is a window that would follow that down."""
    estimator, now_s = RateEstimator(), 0.0
    estimator.found(1e6)
    for size_bytes in bursts:
        for left in range(size_bytes, 0, -1024):
            now_s += gap_s
            estimator.record_arrival(now_s, now_s, min(left, 1024), left > 1024)
        assert estimator.bytes_per_s is not None
        assert estimator.bytes_per_s >= 1e6


@given(
    messages=st.lists(st.tuples(st.floats(0.0, 3.0), st.integers(1, 8)), min_size=1, max_size=40),
    rate=st.floats(1e4, 1e9),
)
def test_pauses_between_messages_never_make_a_new_line_slow(
    messages: list[tuple[float, int]], rate: float
) -> None:
    """As copies come: a few chunks, and nothing for half a second. The line did not need that for the next chunk."""
    start, now_s, chunk_bytes = SlowStart(), 5.0, 16 * 1024
    for pause_s, chunks in messages:
        now_s += pause_s
        for left in reversed(range(chunks)):
            now_s += chunk_bytes / rate
            found = start.record_arrival(now_s, chunk_bytes, 0.0, left > 0, 0.001)
            assert found is None or found == pytest.approx(rate, rel=1e-3)


@given(
    busy=st.lists(st.tuples(GAPS_S, SIZES), min_size=20, max_size=60),
    alone=st.lists(st.tuples(st.floats(1e-4, 2.0), SIZES), max_size=100),
)
def test_messages_behind_which_nothing_waits_never_lower_the_rate(
    busy: list[tuple[float, int]], alone: list[tuple[float, int]]
) -> None:
    estimator, now_s = RateEstimator(), 0.0
    for gap_s, size_bytes in busy:
        now_s += gap_s
        estimator.record_arrival(now_s, now_s, size_bytes, True)
    estimator.record_arrival(now_s + 0.001, now_s + 0.001, 1000, False)
    now_s += 0.001
    least = estimator.bytes_per_s
    for gap_s, size_bytes in alone:
        now_s += gap_s
        estimator.record_arrival(now_s, now_s, size_bytes, False)
        if least is not None:
            assert estimator.bytes_per_s is not None
            assert estimator.bytes_per_s >= least
        least = estimator.bytes_per_s


@given(
    rate=st.floats(2e5, 1e8),
    change=st.sampled_from([0.5, 2.0]),
    jitter_s=st.floats(0.0, 0.002),
    seed=st.integers(0, 1000),
)
def test_the_rate_follows_a_line_that_halves_or_doubles_within_two_seconds(
    rate: float, change: float, jitter_s: float, seed: int
) -> None:
    estimator, rng = RateEstimator(), random.Random(seed)
    served_s = stamp_s = 0.0
    for now_rate, until_s in ((rate, 1.0), (change * rate, 3.0)):
        while served_s < until_s:
            served_s += 0.002 * rate / now_rate
            stamp_s = max(stamp_s, served_s + rng.uniform(0.0, jitter_s))
            estimator.record_arrival(stamp_s, served_s, round(0.002 * rate), True)
    assert estimator.bytes_per_s == pytest.approx(change * rate, rel=0.15)


@given(values=st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(-1e3, 1e3)), min_size=1, max_size=60))
def test_the_least_of_a_window_is_one_of_its_values_and_none_of_the_last_window_is_less(
    values: list[tuple[float, float]],
) -> None:
    window, now_s = WindowedMinimum(5.0), 0.0
    seen: list[tuple[float, float]] = []
    for gap_s, value in values:
        now_s += gap_s
        seen.append((now_s, value))
        least = window.update(value, now_s)
        assert least == window.least
        assert least in [one for at_s, one in seen if now_s - at_s <= 15.0 + 1e-9]
        assert all(least <= one for at_s, one in seen if now_s - at_s < 5.0)


@given(
    ways=st.lists(st.tuples(st.floats(0.001, 0.05), st.floats(0.0, 0.3), st.booleans()), max_size=80),
    offset_s=st.floats(-1e5, 1e5),
)
def test_queueing_is_what_was_waited_above_the_least_whatever_the_other_clock_says(
    ways: list[tuple[float, float, bool]], offset_s: float
) -> None:
    estimator, now_s = DelayEstimator(), 0.0
    waits_s = []
    for gap_s, waited_s, more in ways:
        now_s += gap_s
        waits_s.append(waited_s)
        queueing_s = estimator.record_arrival(
            now_s, now_s + 0.015 + waited_s + offset_s, now_s + 0.04 + waited_s, more, False
        )
        assert queueing_s == pytest.approx(waited_s - min(waits_s), abs=1e-6)
        assert 0.0 <= estimator.queueing_s <= max(waits_s) + 1e-6
        assert 0.04 - 1e-9 <= estimator.base_rtt_s <= 0.07 + max(waits_s)


@given(sent=st.lists(st.tuples(st.floats(0.0, 0.02), st.integers(1, 64 * 1024)), max_size=80))
def test_a_line_of_the_estimated_rate_needs_no_correction(sent: list[tuple[float, int]]) -> None:
    line, now_s, free_s, rate = BottleneckModel(), 0.0, 0.0, 1e6
    for gap_s, size_bytes in sent:
        now_s += gap_s
        waits_s = max(0.0, free_s - now_s)
        assert line.queued_s(now_s) == pytest.approx(waits_s, abs=1e-9)
        predicted = line.record_sent(size_bytes, rate, now_s)
        free_s = max(free_s, now_s) + size_bytes / rate
        line.record_arrival(predicted, waits_s, now_s, 10.0, waits_s)
        assert line.queued_s(now_s) == pytest.approx(free_s - now_s, abs=1e-6)


@given(
    steps=st.lists(
        st.tuples(st.floats(0.0, 0.05), st.integers(1, 64 * 1024), st.floats(0.0, 2.0), st.floats(0.0, 1.0)),
        max_size=80,
    )
)
def test_a_lines_queue_is_never_negative_and_a_measurement_makes_it_no_longer_than_what_is_in_flight(
    steps: list[tuple[float, int, float, float]],
) -> None:
    line, now_s = BottleneckModel(), 0.0
    for gap_s, size_bytes, waited_s, most_s in steps:
        now_s += gap_s
        predicted = line.record_sent(size_bytes, 1e6, now_s)
        before_s = line.queued_s(now_s)
        line.record_arrival(predicted, waited_s, now_s, most_s, waited_s)
        assert 0.0 <= line.queued_s(now_s) <= max(before_s, most_s) + 1e-9


def test_a_line_that_is_slower_than_estimated_is_soon_known_to_be_full() -> None:
    line, free_s = BottleneckModel(), 0.0
    for number in range(200):
        now_s = 0.01 * number
        predicted = line.record_sent(10_000, 1.25e6, now_s)
        waited_s = max(0.0, free_s - now_s)
        free_s = max(free_s, now_s) + 10_000 / 0.9e6
        line.record_arrival(predicted, waited_s, now_s, 10.0, waited_s)
    assert line.queued_s(now_s) == pytest.approx(free_s - now_s, rel=0.25)


@given(gap_s=st.floats(0.01, 1.0), jitter=st.floats(0.0, 0.1), seed=st.integers(0, 100))
def test_a_regular_decode_is_expected_a_gap_after_the_last(gap_s: float, jitter: float, seed: int) -> None:
    spacing, rng = DecodeIntervalPredictor(), random.Random(seed)
    for number in range(20):
        now_s = gap_s * (number + rng.uniform(0, jitter))
        spacing.record_decode((b"a",), now_s)
    assert spacing.next_s(now_s) == pytest.approx(now_s + gap_s, abs=(2 * jitter + 1e-6) * gap_s)
    assert spacing.next_s(now_s + 3 * gap_s) == math.inf


@given(
    pushes=st.lists(
        st.tuples(st.floats(0.0, 3.0), st.lists(st.binary(min_size=1, max_size=1), max_size=2)), max_size=200
    )
)
def test_whatever_is_pushed_no_decode_is_expected_in_the_past_or_far_away(
    pushes: list[tuple[float, list[bytes]]],
) -> None:
    spacing, now_s = DecodeIntervalPredictor(), 0.0
    for gap_s, sessions in pushes:
        now_s += gap_s
        spacing.record_decode(tuple(sessions), now_s)
        next_s = spacing.next_s(now_s)
        assert next_s == math.inf or now_s - PASSED_S <= next_s <= now_s + LONGEST_GAP_S
        assert spacing.streams <= KNOWN
