"""What a session asks of a draft that somebody else computes, and what it makes of the answers. No torch, no thread."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.swarms.pipelines import stage

from molink.peer.scheduling.trip_load import ALONE, BatchLoad, TripLoad
from molink.peer.speculation.session_guesses import DRAFTED_EVERY, LEAST_PLACES, SessionGuesses
from molink.peer.speculation.told_draft import LEAST_SLOWNESS, MOST_SLOWNESS, DraftTimes, ToldDraft

FAR, NEAR = (stage(1.0, 0.01, link_ms=100),) * 3, (stage(1.0, 1.0, link_ms=0.1),) * 2


class Recorded:
    """Drafts that only note what they are told."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    def feed(self, told: ToldDraft) -> None: ...

    def ask(self, told: ToldDraft, places: int, done: Callable[[], None]) -> None: ...

    def close(self, number: int) -> None:
        self.closed.append(number)


def told_of(times: DraftTimes, seen_tokens: int = 2048) -> ToldDraft:
    return ToldDraft(Recorded(), 3, times, seen_tokens)


def test_a_chain_is_followed_as_long_as_its_own_tokens_are_taken() -> None:
    told = told_of(DraftTimes(1.0))
    told.begin_with([1, 2])
    told.tell([(5, 7), (6, 0), (7, 3)])
    chain = told.begin()
    assert chain.guess() == (5, 7)
    chain.follow(5)
    assert chain.guess() == (6, 0)
    chain.follow(9)
    assert chain.guess() is None
    told.extend([5])
    assert told.begin().guess() is None


@given(st.lists(st.lists(st.integers(0, 9), max_size=30), max_size=12), st.integers(1, 8))
def test_what_is_new_is_told_once_as_far_as_it_is_seen(parts: list[list[int]], seen_tokens: int) -> None:
    told, sequence = told_of(DraftTimes(1.0), seen_tokens), list[int]()
    for number, part in enumerate(parts):
        told.extend(part)
        sequence += part
        if number % 2:
            new = list(told.take_new())
            assert len(new) <= seen_tokens
            assert new == sequence[len(sequence) - len(new) :]
            assert told.take_new() == ()
    assert told.length == len(sequence)


def test_shares_of_those_that_are_guessed_together_are_what_all_wait_for() -> None:
    times = DraftTimes(8.0, 0.5)
    assert times.place_ms(1) == times.share_ms(1) == 8.0
    assert 5 * times.share_ms(5) == pytest.approx(times.place_ms(5)) == pytest.approx(10.0)


@given(st.lists(st.tuples(st.integers(1, 16), st.integers(1, 15), st.floats(0, 1e6)), max_size=60))
def test_what_answers_take_corrects_what_was_measured_within_bounds(
    answers: list[tuple[int, int, float]],
) -> None:
    times = DraftTimes(2.0, 0.25)
    for answer in answers:
        times.record(*answer)
        assert LEAST_SLOWNESS <= times.slowness <= MOST_SLOWNESS
    for _ in range(100):
        times.record(4, 5, 5 * 3 * 2.75)
    assert times.place_ms(4) == pytest.approx(8.25)


def test_as_many_places_are_asked_for_as_pay_and_fewer_where_the_draft_has_become_slow() -> None:
    times = DraftTimes(1.0)
    guesses = SessionGuesses(stages=FAR, draft=told_of(times))
    guesses.extend([1, 2, 3])
    assert guesses.places(15) >= LEAST_PLACES
    assert guesses.places(2) == 2
    times.slowness = MOST_SLOWNESS * 20
    asked = [guesses.places(15) for _ in range(2 * DRAFTED_EVERY)]
    assert sorted(asked) == [*[0] * (len(asked) - 2), LEAST_PLACES, LEAST_PLACES]  # now and then it is tried


def test_one_sequence_more_beside_others_costs_less_than_one_alone() -> None:
    alone, together = (SessionGuesses(stages=FAR, draft=told_of(DraftTimes(12.0, 0.1))) for _ in range(2))
    for guesses in (alone, together):
        guesses.extend([1, 2, 3])
        assert guesses.places(15)
    together.propose(0, TripLoad(BatchLoad(7, 7.0)))
    alone.propose(0, ALONE)
    assert together.places(15) >= alone.places(15)
    assert together.told is not None
    assert together.told.spent_ms < 12.0 * LEAST_PLACES


@pytest.mark.parametrize("state", ["is_late", "is_left_out"])
def test_nobody_asks_a_draft_that_does_not_answer_or_of_a_session_that_has_ended(state: str) -> None:
    times = DraftTimes(1.0)
    told = told_of(times)
    guesses = SessionGuesses(draft=told)
    guesses.extend([1, 2, 3])
    assert guesses.places(8) > 0
    setattr(times, state, True)
    assert guesses.places(8) == 0
    setattr(times, state, False)
    told.close()
    assert guesses.places(8) == 0


def test_told_guesses_travel_are_counted_and_scored() -> None:
    told = told_of(DraftTimes(1.0))
    guesses = SessionGuesses(draft=told)
    guesses.extend([1, 2, 3])
    assert guesses.places(3) == 3
    assert guesses.propose(4) == ()  # nothing has been told, and it is asked again
    guesses.extend([4])
    assert guesses.places(3) == 3
    told.tell([(5, 7), (6, 7), (7, 7)])
    assert guesses.propose(8) == (5, 6, 7)
    assert guesses.begun.guessing_ms == 3.0
    guesses.record(3, 2)
    guesses.extend([5, 6, 9])
    assert (guesses.counts.guessed, guesses.counts.accepted) == ({"draft": 3}, {"draft": 2})
    assert guesses.propose(8) == ()


def test_near_a_full_engine_nothing_is_asked_for() -> None:
    guesses = SessionGuesses(stages=NEAR, draft=told_of(DraftTimes(0.01)))
    guesses.extend([1, 2, 3])
    assert guesses.places(8)
    guesses.propose(8, TripLoad(BatchLoad(7, 7.0), (BatchLoad(8, 8.0),) * 3))
    assert guesses.places(8) == 0
