"""Which decode micro-batch is the first of an iteration."""

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.memory.leases import LeaseKey
from molink.peer.scheduling.decode_watch import IterationDetector


def keys(*sessions: int) -> set[LeaseKey]:
    return {LeaseKey(session.to_bytes(16), 1) for session in sessions}


def test_an_iteration_ends_when_a_session_steps_again() -> None:
    iterations = IterationDetector()
    batches = [keys(1, 2), keys(3), keys(4), keys(1, 2), keys(3), keys(5), keys(4), keys(2), keys(1)]
    firsts = [iterations.is_first(batch) for batch in batches]
    assert firsts == [True, False, False, True, False, False, False, True, False]


def test_who_has_ended_is_forgotten() -> None:
    iterations = IterationDetector()
    assert iterations.is_first(keys(1))
    for key in keys(1):
        iterations.forget_session(key)
    assert iterations.is_first(keys(2))
    assert not iterations.is_first(keys(1))


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8, unique=True), st.integers(1, 5))
def test_there_is_one_first_for_each_time_round(batches: list[int], rounds: int) -> None:
    iterations = IterationDetector()
    firsts = [iterations.is_first(keys(batch)) for _ in range(rounds) for batch in batches]
    assert firsts == [number % len(batches) == 0 for number in range(rounds * len(batches))]
