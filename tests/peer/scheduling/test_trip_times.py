"""What guesses lengthen trips by is what trips took, and what was predicted where these say little."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.scheduling.trip_times import MOST, TripTimes

trips_ms = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e6)), max_size=200)


def after(measured: TripTimes, slope: float, noise_ms: float, most_ms: float, trips: int = 200) -> float:
    rng = random.Random(5)
    for _ in range(trips):
        predicted_ms = rng.uniform(0, most_ms)
        taken_ms = 100 + slope * predicted_ms + rng.gauss(0, noise_ms)
        measured.record(100 + predicted_ms, predicted_ms, taken_ms)
    return measured.lengthens


@given(trips_ms)
def test_whatever_trips_took_it_is_between_what_was_predicted_and_a_bound(
    trips: list[tuple[float, float]],
) -> None:
    times = TripTimes()
    assert times.lengthens == 1
    for predicted_ms, taken_ms in trips:
        times.record(100.0, predicted_ms, taken_ms)
        assert 1 <= times.lengthens <= MOST
        assert times.waited_ms >= 0


def test_rows_that_cost_three_times_as_much_are_found_to_and_so_is_that_they_do_no_longer() -> None:
    times = TripTimes()
    assert after(times, 3.0, 4.0, 20.0) == pytest.approx(3.0, abs=0.5)
    assert after(times, 1.0, 4.0, 20.0) < 1.5


def test_where_guesses_lengthen_trips_by_less_than_trips_differ_the_prediction_stays() -> None:
    assert after(TripTimes(), 1.0, 20.0, 1.0) < 1.7
    alike = TripTimes()
    for taken_ms in (100, 900, 110, 80, 2000):
        alike.record(100.0, 5.0, taken_ms)
    assert alike.lengthens == 1, "all trips have as many guesses"


def test_a_trip_that_took_very_long_once_does_not_decide() -> None:
    times = TripTimes()
    before = after(times, 1.0, 2.0, 20.0)
    times.record(120.0, 20.0, 60_000.0)
    assert times.lengthens < before + 1
