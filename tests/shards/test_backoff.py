"""Waits grow up to their longest, and are spread around that."""

from hypothesis import given
from hypothesis import strategies as st

from molink.shards.backoff import Backoff

BACKOFFS = st.builds(
    Backoff,
    first_s=st.floats(0.01, 10.0),
    longest_s=st.floats(10.0, 1000.0),
    factor=st.floats(1.0, 4.0),
    jitter=st.floats(0.0, 0.9),
)


def test_each_wait_is_the_one_before_times_the_factor_up_to_the_longest() -> None:
    backoff = Backoff(first_s=2.0, longest_s=300.0, factor=3.0)
    assert [backoff.after(failures) for failures in range(1, 8)] == [
        2.0,
        6.0,
        18.0,
        54.0,
        162.0,
        300.0,
        300.0,
    ]


def test_a_draw_spreads_a_wait_to_both_sides() -> None:
    backoff = Backoff(first_s=4.0, longest_s=100.0, jitter=0.25)
    assert [backoff.after(1, draw) for draw in (0.0, 0.5, 1.0)] == [3.0, 4.0, 5.0]


@given(BACKOFFS, st.integers(1, 10**6), st.floats(0.0, 1.0))
def test_no_wait_is_longer_than_the_longest_nor_shorter_than_the_first_one_can_be(
    backoff: Backoff, failures: int, draw: float
) -> None:
    assert (
        backoff.first_s * (1 - backoff.jitter) * 0.999 <= backoff.after(failures, draw) <= backoff.longest_s
    )
