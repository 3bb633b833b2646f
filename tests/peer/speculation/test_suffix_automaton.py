"""The automaton finds what a naive search of the text finds."""

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.speculation.suffix_automaton import NO_MATCH, SuffixAutomaton

tokens = st.integers(0, 3)
texts = st.lists(tokens, max_size=60)


def occurs(needle: list[int], text: list[int]) -> bool:
    """Whether the text contains the needle."""
    return any(text[at : at + len(needle)] == needle for at in range(len(text) - len(needle) + 1))


def longest_end(sequence: list[int], text: list[int]) -> int:
    """How many of the sequence's last tokens the text contains, side by side."""
    return next(
        size for size in range(len(sequence), -1, -1) if occurs(sequence[len(sequence) - size :], text)
    )


@given(texts, texts)
def test_what_is_followed_is_the_longest_end_that_the_text_contains(
    text: list[int], sequence: list[int]
) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    match = NO_MATCH
    for at, token in enumerate(sequence, 1):
        match = automaton.follow(match, token)
        assert match.length == longest_end(sequence[:at], text)
        end = automaton.end_of(match)
        assert text[end + 1 - match.length : end + 1] == sequence[at - match.length : at]


@given(texts)
def test_the_longest_end_of_a_growing_text_is_found_in_the_text_before_it(text: list[int]) -> None:
    automaton, match = SuffixAutomaton(), NO_MATCH
    for at, token in enumerate(text):
        automaton.remember_end(match, at - 1)
        match = automaton.follow(match, token)
        automaton.append(token)
        match = automaton.settle(match)
        assert match.length == longest_end(text[: at + 1], text[:at])
        end = automaton.end_of(match)
        assert end < at
        assert text[end + 1 - match.length : end + 1] == text[at + 1 - match.length : at + 1]


@given(texts)
def test_an_automaton_has_at_most_two_states_for_each_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(text)
    assert len(automaton) == len(text)
    assert automaton.states <= 2 * len(text) + 1
