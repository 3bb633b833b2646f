"""A session's guesses come from whichever source has been right, and never from another client's text."""

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from support.swarms.pipelines import stage

from molink.peer.scheduling.trip_load import BatchLoad, TripLoad
from molink.peer.speculation.acceptance import SAMPLED, TABLE, Acceptance
from molink.peer.speculation.ngram_tables import LONGEST_CONTEXT, ClientTables, NgramTable
from molink.peer.speculation.session_guesses import (
    ASKED_EVERY,
    ASKED_SELDOM,
    MOST_GUESSES,
    RESTS_AFTER,
    SessionGuesses,
)

texts = st.lists(st.integers(0, 5), min_size=1, max_size=80)


def generate(guesses: SessionGuesses, prompt: Sequence[int], text: Sequence[int], most: int) -> int:
    """The trips that it takes until the text is generated."""
    guesses.extend(prompt)
    at = trips = 0
    while at < len(text):
        proposed = guesses.propose(min(most, len(text) - at - 1))
        right = 0
        while right < len(proposed) and proposed[right] == text[at + right]:
            right += 1
        guesses.record(len(proposed), right)
        guesses.extend(text[at : at + right + 1])
        at += right + 1
        trips += 1
    return trips


@given(texts, texts, st.integers(0, 20))
def test_whatever_is_guessed_the_text_is_generated_in_no_more_trips_than_it_has_tokens(
    prompt: list[int], text: list[int], most: int
) -> None:
    guesses = SessionGuesses(NgramTable(), prompt)
    trips = generate(guesses, prompt, text, most)
    assert trips == len(text) - sum(guesses.counts.accepted.values())
    assert sum(guesses.counts.guessed.values()) >= sum(guesses.counts.accepted.values())
    assert set(guesses.counts.accepted) <= set(guesses.counts.guessed)


@given(texts, st.integers(0, 20))
def test_no_more_is_guessed_than_was_asked_for(prompt: list[int], most: int) -> None:
    guesses = SessionGuesses(prediction=prompt)
    guesses.extend(prompt)
    assert len(guesses.propose(most)) <= min(most, MOST_GUESSES)


def test_a_text_that_repeats_itself_takes_few_trips() -> None:
    assert generate(SessionGuesses(), [1, 2, 3, 4, 5, 6, 7] * 3, [1, 2, 3, 4, 5, 6, 7] * 20, 8) < 25


def test_a_client_that_generates_the_same_again_takes_few_trips() -> None:
    text = [at * at % 101 for at in range(80)]
    table = NgramTable()
    assert generate(SessionGuesses(table), [200], text, 8) > 60
    assert generate(SessionGuesses(table), [200], text, 8) < 20


def test_of_two_clients_with_the_same_text_neither_guesses_from_the_others() -> None:
    text = [at * at % 101 for at in range(40)]
    tables = ClientTables()
    generate(SessionGuesses(tables.of_client("one")), [200], text, 8)
    of_other = SessionGuesses(tables.of_client("other"))
    of_other.extend([200, *text[:20]])
    before = SessionGuesses()
    before.extend([200, *text[:20]])
    assert of_other.propose(8) == before.propose(8)


def test_a_prediction_that_is_nine_tenths_right_brings_more_than_three_tokens_a_trip() -> None:
    text = [at * 7919 % 4001 for at in range(200)]
    predicted = [5000 if at % 10 == 7 else token for at, token in enumerate(text)]
    assert generate(SessionGuesses(prediction=predicted), [1], text, 8) < 200 / 3.4


def test_what_did_not_travel_is_scored_too() -> None:
    text = [1, 2, 3, 4, 5, 6, 7] * 20
    guesses = SessionGuesses()
    guesses.extend(text)
    before = guesses.candidates(1)[0].chance
    for token in text:
        guesses.candidates(4)
        guesses.record(0, 0)
        guesses.extend([token])
    assert guesses.candidates(1)[0].chance > before
    assert not sum(guesses.counts.guessed.values())


class CountedTable(NgramTable):
    """A table that counts the trips for which it is asked."""

    asked = 0

    def find(self, context: tuple[int, ...]) -> tuple[int, int] | None:
        self.asked += 1
        return super().find(context)


def test_where_no_guess_pays_sources_are_asked_at_every_fourth_trip_until_one_does() -> None:
    full, table = [stage(1.0, 1.0, link_ms=0.1)] * 3, CountedTable()
    crowd = TripLoad(BatchLoad(7, 7), (BatchLoad(8, 8),) * 3)
    guesses = SessionGuesses(table, stages=full)
    guesses.extend([at * at % 101 for at in range(LONGEST_CONTEXT + 40)])
    for token in range(RESTS_AFTER + 10 * ASKED_EVERY):
        assert guesses.propose(8, crowd) == ()
        guesses.extend([1000 + token])
    assert table.asked == RESTS_AFTER + 10
    repeated = [7, 8, 9] * 8
    guesses.extend(repeated)
    assert any(guesses.propose(8) for _ in range(ASKED_EVERY))


def test_the_longer_guesses_are_there_that_do_not_pay_the_more_seldom_sources_are_asked() -> None:
    full, table, rng = [stage(1.0, 1.0, link_ms=0.1)] * 3, CountedTable(), random.Random(1)
    crowd = TripLoad(BatchLoad(7, 7), (BatchLoad(8, 8),) * 3)
    guesses = SessionGuesses(table, stages=full)
    text = [rng.randrange(8) for _ in range(2000)]
    guesses.extend(text[:500])
    for token in text[500:1800]:
        guesses.propose(8, crowd)
        guesses.extend([token])
    asked = sum(trips_asked(guesses, token, crowd) for token in text[1800:1960])
    assert asked == 160 // ASKED_SELDOM
    guesses.extend([7, 8, 9] * 8)
    assert any(guesses.propose(8) for _ in range(ASKED_SELDOM)), "and where they pay they travel again"


def trips_asked(guesses: SessionGuesses, token: int, load: TripLoad) -> bool:
    """Plays one trip, which brings that token; whether sources were asked for it."""
    is_asked = not guesses.rests()
    assert guesses.propose(8, load) == ()
    guesses.extend([token])
    return is_asked


def test_by_a_grammar_nothing_is_guessed_but_what_the_tail_expects() -> None:
    guesses = SessionGuesses.of_grammar()
    guesses.extend([1, 2, 3] * 9)
    assert guesses.propose(8) == ()
    guesses.extend([1])
    guesses.expect([7, 8, 9])
    assert guesses.propose(2) == (7, 8)
    guesses.record(2, 1)
    guesses.extend([7, 2])
    assert guesses.propose(8) == ()
    assert (guesses.counts.guessed, guesses.counts.accepted) == ({"grammar": 2}, {"grammar": 1})


def test_a_source_that_has_been_wrong_is_passed_over_for_one_that_has_been_right() -> None:
    table = NgramTable()
    generate(SessionGuesses(table), [0], [3, 1, 2, 3, 1, 2, 3, 1, 2] * 4, 0)
    guesses = SessionGuesses(table)
    guesses.extend([9])
    for _ in range(12):  # the client's table says 1 after 3; this text says 4
        guesses.candidates(1)
        guesses.extend([3])
        guesses.candidates(1)
        guesses.extend([4])
    guesses.extend([3])
    assert guesses.propose(1) == (4,)


@given(st.lists(st.booleans(), max_size=100))
def test_a_chance_stays_one_and_follows_what_happens(outcomes: list[bool]) -> None:
    acceptance = Acceptance(SAMPLED)
    for right in outcomes:
        acceptance.record((TABLE, 5), right=right)
        assert 0 <= acceptance.chance((TABLE, 5)) <= 1
    for _ in range(100):
        acceptance.record((TABLE, 5), right=True)
    assert acceptance.chance((TABLE, 5)) > 0.9
