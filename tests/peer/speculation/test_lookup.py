"""Guesses from texts are what a naive search for the longest match gives."""

from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from molink.peer.speculation.lookup import (
    MOST_READ_TOKENS,
    MOST_TEXT_TOKENS,
    RESUMED,
    LookupChain,
    PredictionLookup,
    TextLookup,
)

texts = st.lists(st.integers(0, 3), max_size=60)
further = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def guesses(chain: LookupChain, most: int) -> list[int]:
    """What the chain guesses if nothing else is."""
    found = []
    while len(found) < most and (guess := chain.guess()) is not None:
        found.append(guess[0])
        chain.follow(guess[0])
    return found


def continuations(text: list[int]) -> tuple[int, set[int]]:
    """The length of the text's longest end that stands in it before, and what came after that there."""
    for size in range(len(text) - 1, 0, -1):
        end = text[len(text) - size :]
        found = {text[at + size] for at in range(len(text) - size) if text[at : at + size] == end}
        if found:
            return size, found
    return 0, set()


@given(texts)
def test_the_first_guess_came_after_the_longest_match(text: list[int]) -> None:
    lookup = TextLookup()
    for token in text:
        lookup.extend([token])
        lookup.begin()
    guess, (size, after) = lookup.begin().guess(), continuations(text)
    assert (guess is None) == (not after)
    if guess is not None:
        assert guess[0] in after
        assert guess[1] == min(size.bit_length(), 5)


@given(texts)
def test_later_guesses_go_on_in_the_same_place_and_a_text_that_repeats_itself_goes_on(
    text: list[int],
) -> None:
    lookup = TextLookup()
    lookup.extend(text)
    found = guesses(lookup.begin(), 12)
    size, after = continuations(text)
    assert len(found) == (12 if after else 0)
    places = [at + size for at in range(len(text) - size) if text[at : at + size] == text[len(text) - size :]]
    whole = [(text + found)[place : place + 12] for place in places]
    assert found in whole or not after


@given(texts, further)
def test_behind_another_sources_guess_the_longest_match_of_both_counts(
    text: list[int], other: list[int]
) -> None:
    lookup = TextLookup()
    lookup.extend(text)
    chain = lookup.begin()
    for token in other:
        chain.follow(token)
    guess = chain.guess()
    if guess is not None:
        whole = text + other
        assert any(whole[at] == guess[0] and whole[at - 1] == whole[-1] for at in range(1, len(whole))), (
            "what is guessed came after the last token before"
        )


@given(texts)
def test_what_is_guessed_does_not_depend_on_how_the_text_came(text: list[int]) -> None:
    at_once, one_by_one = TextLookup(), TextLookup()
    at_once.extend(text)
    for token in text:
        one_by_one.extend([token])
    assert guesses(at_once.begin(), 8) == guesses(one_by_one.begin(), 8)


def test_a_long_prompt_is_read_in_several_turns_before_anything_is_guessed() -> None:
    lookup = TextLookup()
    lookup.extend([1, 2, 3, 4] * MOST_READ_TOKENS)
    turns = [guesses(lookup.begin(), 2) for _ in range(4)]
    assert turns == [[], [], [], [1, 2]]


def test_of_a_sequence_without_end_the_latest_text_is_looked_in() -> None:
    lookup = TextLookup()
    lookup.extend(range(10, 20))
    for _ in range(MOST_TEXT_TOKENS // MOST_READ_TOKENS + 1):
        lookup.extend([1, 2, 3, 4] * (MOST_READ_TOKENS // 4))
        lookup.begin()
    for _ in range(MOST_TEXT_TOKENS // MOST_READ_TOKENS):
        lookup.begin()
    assert guesses(lookup.begin(), 2) == [1, 2]
    lookup.extend([12, 13])
    assert guesses(lookup.begin(), 2) == []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_prediction_that_is_right_is_guessed_from_its_beginning_to_its_end(predicted: list[int]) -> None:
    prediction = PredictionLookup(predicted)
    for at in range(len(predicted)):
        assert guesses(prediction.begin(), 99) == predicted[at:]
        prediction.extend([predicted[at]])
    assert guesses(prediction.begin(), 99) == []


def test_behind_one_token_that_differs_the_prediction_goes_on() -> None:
    prediction = PredictionLookup(range(20))
    prediction.begin()
    prediction.extend([0, 1, 2, 99])
    assert prediction.begin().guess() == (4, RESUMED)
    assert guesses(prediction.begin(), 3) == [4, 5, 6]


def test_text_that_the_prediction_has_not_is_left_behind_when_two_of_its_tokens_come_again() -> None:
    prediction = PredictionLookup(range(20))
    prediction.begin()
    prediction.extend([0, 1, 2, *range(50, 60), 3, 4])
    assert guesses(prediction.begin(), 3) == [5, 6, 7]


def test_text_that_the_prediction_has_more_of_is_passed_over() -> None:
    prediction = PredictionLookup(range(20))
    prediction.begin()
    prediction.extend([0, 1, 2, 9, 10, 11])
    assert guesses(prediction.begin(), 3) == [12, 13, 14]


@given(texts, texts)
def test_guesses_of_a_prediction_are_of_its_text(predicted: list[int], generated: list[int]) -> None:
    prediction = PredictionLookup(predicted)
    prediction.begin()
    prediction.extend(generated)
    found = guesses(prediction.begin(), examples(8))
    assert any(predicted[at : at + len(found)] == found for at in range(len(predicted) + 1))


def test_a_long_prediction_is_read_in_turns_from_its_beginning() -> None:
    prediction = PredictionLookup(range(3 * MOST_READ_TOKENS))
    for at in range(20):
        assert prediction.begin().guess() == (at, min(at.bit_length(), 5))
        prediction.extend([at])
    prediction.extend(range(2 * MOST_READ_TOKENS, 2 * MOST_READ_TOKENS + 3))
    assert guesses(prediction.begin(), 1) == [2 * MOST_READ_TOKENS + 3]
