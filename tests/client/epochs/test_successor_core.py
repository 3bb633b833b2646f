"""What becomes of a session that is begun anew elsewhere, whatever comes in which order."""

from hypothesis import given
from hypothesis import strategies as st

from molink.client.epochs.successor_core import (
    STARTS,
    WITHIN_S,
    FormSuccessor,
    GiveSuccessorUp,
    SuccessorCore,
    SuccessorDrew,
    SuccessorEvent,
    SuccessorFailed,
    SuccessorOverdue,
    TakeOver,
)

LENGTH = 10
DREW = st.builds(SuccessorDrew, st.integers(0, LENGTH + 3), st.just(LENGTH), st.booleans())
EVENTS = st.one_of(DREW, st.just(SuccessorFailed("it is lost")), st.just(SuccessorOverdue()))


def begun() -> SuccessorCore:
    core = SuccessorCore()
    assert core.begin(5.0) == FormSuccessor()
    assert core.deadline_s == 5.0 + WITHIN_S
    return core


def drew(position: int, *, is_same: bool = True) -> SuccessorDrew:
    return SuccessorDrew(position, LENGTH, is_same)


def test_it_is_started_again_with_its_first_token_once_and_taken_with_the_one_that_comes_next() -> None:
    core = begun()
    assert core.handle(drew(LENGTH - 4)) == FormSuccessor()
    assert [core.handle(drew(LENGTH - 2)), core.handle(drew(LENGTH - 1))] == [None, None]
    assert core.handle(drew(LENGTH)) == TakeOver()


def test_one_that_is_level_at_once_is_taken_without_a_second_start() -> None:
    assert begun().handle(drew(LENGTH)) == TakeOver()


@given(st.lists(EVENTS, max_size=12))
def test_it_is_given_up_once_and_never_started_more_often_nor_taken_with_another_token(
    events: list[SuccessorEvent],
) -> None:
    core, starts, is_over = begun(), 1, False
    for event in events:
        effect = core.handle(event)
        if is_over:
            assert effect is None
        elif not isinstance(event, SuccessorDrew) or event.position > LENGTH or not event.is_same:
            assert isinstance(effect, GiveSuccessorUp)
            is_over = True
        else:
            assert isinstance(effect, TakeOver) == (event.position == LENGTH)
            starts += isinstance(effect, FormSuccessor)
    assert starts <= STARTS


def test_who_cannot_be_taken_is_given_up_with_that_reason() -> None:
    core = begun()
    core.handle(drew(LENGTH))
    assert core.handle(SuccessorFailed("no such token")) == GiveSuccessorUp("no such token")
