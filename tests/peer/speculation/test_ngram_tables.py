"""Tables of n-grams guess what came most often, in a memory that does not grow, and each client has his own."""

import pickle
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from molink.peer.speculation.ngram_tables import (
    LONGEST_CONTEXT,
    MOST_TABLES,
    SLOTS,
    ClientTables,
    NgramTable,
    TableLookup,
)

texts = st.lists(st.integers(0, 4), max_size=80)


def learnt(text: list[int], slots: int = 1 << 16) -> NgramTable:
    table = NgramTable(slots)
    lookup = TableLookup(table)
    lookup.extend(text)
    return table


def after(text: list[int], context: tuple[int, ...]) -> Counter[int]:
    """What came after these tokens in the text, and how often."""
    size = len(context)
    return Counter(
        text[at + size] for at in range(len(text) - size) if tuple(text[at : at + size]) == context
    )


def longest_known(text: list[int], context: tuple[int, ...]) -> int:
    return next((size for size in range(min(4, len(context)), 0, -1) if after(text, context[-size:])), 0)


@given(texts, st.lists(st.integers(0, 4), max_size=6).map(tuple))
def test_what_is_guessed_came_after_an_end_of_the_context(text: list[int], context: tuple[int, ...]) -> None:
    found = learnt(text).find(context)
    if found is not None:
        size = found[1] // 3
        assert 1 <= size <= min(LONGEST_CONTEXT, len(context))
        assert after(text, context[-size:])[found[0]] > 0


@given(texts, st.lists(st.integers(0, 4), max_size=6).map(tuple))
def test_a_token_that_came_more_often_than_all_others_together_is_guessed(
    text: list[int], context: tuple[int, ...]
) -> None:
    size = longest_known(text, context)
    counts = after(text, context[-size:]).most_common(1) if size else []
    if counts and 2 * counts[0][1] > after(text, context[-size:]).total():
        found = learnt(text).find(context)
        assert found is not None
        assert found[0] == counts[0][0]
        assert found[1] // 3 == size


@given(texts)
def test_a_table_of_few_slots_forgets_and_still_guesses_tokens_that_it_learnt(text: list[int]) -> None:
    table = learnt(text, slots=4)
    found = [table.find(tuple(text[:at])) for at in range(len(text))]
    assert {one[0] for one in found if one is not None} <= set(text)


def test_two_clients_with_the_same_text_have_tables_of_their_own() -> None:
    tables = ClientTables()
    TableLookup(tables.of_client("one")).extend([1, 2, 3, 4, 5])
    assert tables.of_client("one").find((3, 4)) is not None
    assert tables.of_client("other").find((3, 4)) is None
    assert tables.of_client("one", b"its user").find((3, 4)) is None


def test_the_client_that_was_away_longest_makes_room() -> None:
    tables = ClientTables()
    for number in range(MOST_TABLES):
        TableLookup(tables.of_client(str(number))).extend([1, 2, 3])
    tables.of_client("0")
    tables.of_client("a newcomer")
    assert tables.of_client("0").find((1,)) is not None
    assert tables.of_client("1").find((1,)) is None


def test_scopes_of_one_client_make_room_for_each_other_and_not_another_clients() -> None:
    tables = ClientTables()
    TableLookup(tables.of_client("honest")).extend([1, 2, 3])
    for number in range(2 * MOST_TABLES):
        TableLookup(tables.of_client("stranger", bytes([number]))).extend([1, 2, 3])
    assert tables.of_client("honest").find((1,)) is not None
    assert tables.of_client("stranger", bytes([2 * MOST_TABLES - 1])).find((1,)) is not None
    assert tables.of_client("stranger", bytes([0])).find((1,)) is None


def test_sessions_keep_no_more_tables_than_may_be() -> None:
    """Those of scopes that made room are empty from then on, whoever refers to them still."""
    tables, lookups = ClientTables(), list[TableLookup]()
    for number in range(MOST_TABLES + 8):
        lookups.append(TableLookup(tables.of_client("stranger", bytes([number]))))
    for lookup in lookups:
        lookup.extend([1, 2, 1, 2])
    guessing = [lookup for lookup in lookups if lookup.begin().guess() is not None]
    assert guessing == lookups[8:]
    assert len(pickle.dumps(lookups)) < MOST_TABLES * 10 * SLOTS


def test_a_prompt_is_context_and_is_not_learnt() -> None:
    table = NgramTable()
    lookup = TableLookup(table)
    lookup.begin_with([1, 2, 3])
    assert table.find((2,)) is None
    lookup.extend([4])
    assert table.find((1, 2, 3)) == (4, 9)
