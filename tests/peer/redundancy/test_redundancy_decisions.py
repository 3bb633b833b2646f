"""Roles, pairs and balance of instances that hold keys and values twice: what must hold, whatever they hold."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from molink.peer.redundancy.pair_balance import UNEVEN_PART, HeldSequence, balanced, is_balanced
from molink.peer.redundancy.partners import UNEVEN_SEQUENCES, PairLoad, PairRoom, next_copy, spread
from molink.peer.redundancy.prompt_pieces import LONGER, next_pieces, piece_tokens, prompt_order
from molink.peer.redundancy.roles import Standing, is_short, keeps_copy, prefiller, prefills_next

PAIR = (0, 1)
FOUR = (0, 1, 2, 3)


@st.composite
def held(draw: st.DrawFn, instances: tuple[int, ...] = FOUR, number: int = 0) -> HeldSequence:
    holders = tuple(draw(st.lists(st.sampled_from(instances), min_size=1, max_size=2, unique=True)))
    tokens = draw(st.integers(1, 2000))
    return HeldSequence(number, tokens, tokens + 500, draw(st.sampled_from(holders)), holders)


@st.composite
def many(draw: st.DrawFn, instances: tuple[int, ...] = FOUR, most: int = 12) -> list[HeldSequence]:
    return [draw(held(instances, number)) for number in range(draw(st.integers(0, most)))]


def copied(tokens: list[int]) -> list[HeldSequence]:
    return [HeldSequence(number, one, one, 0, PAIR) for number, one in enumerate(tokens)]


# -- balance


@settings(max_examples=examples(40))
@given(many(), st.sets(st.sampled_from(FOUR), min_size=1))
def test_a_sequence_is_decoded_where_it_is_held_and_where_someone_decodes_if_there_is_such_a_place(
    sequences: list[HeldSequence], decoding: set[int]
) -> None:
    homes = balanced(sequences, decoding)
    assert set(homes) == {one.number for one in sequences}
    for one in sequences:
        assert homes[one.number] in one.holders
        if decoding & set(one.holders):
            assert homes[one.number] in decoding
        else:
            assert homes[one.number] == one.home


@given(st.lists(st.integers(1, 2000), max_size=60))
def test_a_pair_that_holds_everything_twice_has_equal_counts_and_nearly_equal_totals(
    tokens: list[int],
) -> None:
    sequences = copied(tokens)
    homes = balanced(sequences, PAIR)
    counts = Counter(homes.values())
    assert abs(counts[0] - counts[1]) <= 1
    totals = [sum(one.tokens for one in sequences if homes[one.number] == at) for at in PAIR]
    assert abs(totals[0] - totals[1]) <= max([UNEVEN_PART * sum(tokens) / 2, *tokens])


@settings(max_examples=examples(40))
@given(many(), st.sets(st.sampled_from(FOUR), min_size=2))
def test_counts_differ_by_more_than_one_only_where_nothing_can_go_over(
    sequences: list[HeldSequence], decoding: set[int]
) -> None:
    homes = balanced(sequences, decoding)
    counts = Counter(homes.values())
    for one in sequences:
        for other in set(one.holders) & decoding:
            if homes[one.number] in decoding:
                assert counts[homes[one.number]] - counts[other] <= 1


@settings(max_examples=examples(40))
@given(many(), st.sets(st.sampled_from(FOUR), min_size=1))
def test_what_is_balanced_stays_as_it_is(sequences: list[HeldSequence], decoding: set[int]) -> None:
    homes = balanced(sequences, decoding)
    settled = [
        HeldSequence(one.number, one.tokens, one.room_tokens, homes[one.number], one.holders)
        for one in sequences
    ]
    once_more = balanced(settled, decoding)
    assert Counter(once_more.values()) == Counter(homes.values())


@settings(max_examples=examples(40))
@given(many())
def test_what_looks_balanced_stays_as_it_is(sequences: list[HeldSequence]) -> None:
    own = [[one.tokens for one in sequences if one.home == at] for at in FOUR]
    if is_balanced([(len(tokens), sum(tokens)) for tokens in own]):
        assert balanced(sequences, FOUR) == {one.number: one.home for one in sequences}


@given(st.lists(st.integers(1, 2000), max_size=60))
def test_a_pair_that_holds_everything_twice_looks_balanced_or_has_nothing_to_exchange(
    tokens: list[int],
) -> None:
    sequences = copied(tokens)
    homes = balanced(sequences, PAIR)
    own = [[one.tokens for one in sequences if homes[one.number] == at] for at in PAIR]
    loads = [(len(each), sum(each)) for each in own]
    assert is_balanced(loads) or abs(loads[0][1] - loads[1][1]) <= max(tokens)


def test_when_one_of_a_pair_prefills_the_other_decodes_all_that_it_holds() -> None:
    sequences = [*copied([10] * 6), HeldSequence(6, 10, 20, 0, (0,))]
    homes = balanced(sequences, [1])
    assert [homes[number] for number in range(7)] == [1] * 6 + [0]


# -- roles


@st.composite
def standing(draw: st.DrawFn, instance: int = 0) -> Standing:
    kept, copies, free = (draw(st.integers(0, 10000)) for _ in range(3))
    return Standing(instance, kept + copies + free, kept, copies, draw(st.integers(0, 9)))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True).flatmap(
    lambda numbers: st.tuples(*(standing(number) for number in numbers))
))  # fmt: skip
def test_nobody_prefills_for_whom_more_would_have_to_wait(standings: tuple[Standing, ...]) -> None:
    chosen = next(one for one in standings if one.instance == prefiller(standings))
    assert chosen.alone == min(one.alone for one in standings)
    assert all(chosen.free_tokens >= one.free_tokens for one in standings if one.alone == chosen.alone)


@given(
    st.lists(standing(), min_size=1, max_size=4), st.integers(0, 5000), st.integers(0, 5000), st.booleans()
)
def test_more_to_hold_never_ends_a_shortage_and_a_shortage_ends_later_than_it_began(
    standings: list[Standing], tokens: int, more: int, was_short: bool
) -> None:
    assert is_short(standings, tokens, was_short=was_short) <= is_short(
        standings, tokens + more, was_short=was_short
    )
    assert is_short(standings, tokens, was_short=False) <= is_short(standings, tokens, was_short=True)


def test_prompts_that_keep_coming_do_not_stop_sequences_that_nobody_else_holds() -> None:
    assert prefills_next(was_prefilling=False, waiting=3)
    assert not prefills_next(was_prefilling=True, waiting=3)
    assert prefills_next(was_prefilling=True, waiting=0)


def test_a_group_is_short_when_not_everything_fits_twice() -> None:
    half = [Standing(number, 1000, 500, 400, 0) for number in FOUR]
    assert not is_short(half, 0, was_short=False)
    assert is_short(half, 1, was_short=False)


@given(st.integers(1, 7), st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_the_copies_of_a_short_group_stay_within_an_equal_part(decoders: int, arriving: list[int]) -> None:
    origin = copies = 0
    for tokens in arriving:
        if keeps_copy(decoders, origin, copies, tokens):
            copies += tokens
        origin += tokens
        assert decoders * copies <= origin
    assert decoders > 1 or copies == origin


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one of them"):
        keeps_copy(0, 1, 1, 1)
    with pytest.raises(ValueError, match="less than nothing"):
        Standing(0, 10, 8, 3, 0)
    with pytest.raises(ValueError, match="where it is held"):
        HeldSequence(0, 1, 1, 2, PAIR)


# -- pairs


@given(
    st.lists(st.tuples(st.integers(0, 100000), st.integers(0, 5)), min_size=1, max_size=8),
    st.lists(st.integers(1, 2000), max_size=40),
)
def test_prompts_that_come_at_once_are_spread_evenly(
    rooms: list[tuple[int, int]], prompts: list[int]
) -> None:
    pairs = [PairRoom(number, free, waiting) for number, (free, waiting) in enumerate(rooms)]
    chosen = Counter(spread(pairs, prompts))
    assert sum(chosen.values()) == len(prompts)
    after = {room.pair: room.waiting + chosen[room.pair] for room in pairs}
    for room in pairs:
        assert not chosen[room.pair] or after[room.pair] - min(after.values()) <= 1


@given(st.lists(st.integers(0, 100000), min_size=1, max_size=8))
def test_a_prompt_alone_goes_to_the_pair_with_the_most_free_memory(free: list[int]) -> None:
    rooms = [PairRoom(number, tokens, 0) for number, tokens in enumerate(free)]
    assert free[spread(rooms, [100])[0]] == max(free)


@settings(max_examples=examples(40))
@given(many(PAIR, 12), many((2, 3), 12), st.lists(st.integers(0, 3000), min_size=4, max_size=4),
       st.sets(st.sampled_from(FOUR)))  # fmt: skip
def test_a_copy_fits_and_leaves_where_the_sequence_is_and_the_line_idle(
    first: list[HeldSequence], second: list[HeldSequence], free: list[int], idle: set[int]
) -> None:
    shifted = [
        HeldSequence(one.number + 100, one.tokens, one.room_tokens, one.home, one.holders) for one in second
    ]
    pairs = (PairLoad(PAIR, tuple(first)), PairLoad((2, 3), tuple(shifted)))
    copy = next_copy(pairs, dict(enumerate(free)), idle)
    singles = [
        one
        for one in (*first, *shifted)
        if len(one.holders) == 1 and one.home in idle and free[one.home ^ 1] >= one.room_tokens
    ]
    if copy is None:
        assert not singles
        return
    one = next(one for one in (*first, *shifted) if one.number == copy.number)
    assert copy.source == one.home
    assert copy.source in idle
    assert copy.target not in one.holders
    assert free[copy.target] >= one.room_tokens
    assert copy.goes_over == (copy.source // 2 != copy.target // 2) == (not singles)
    if copy.goes_over:
        lengths = len(pairs[copy.source // 2].sequences), len(pairs[copy.target // 2].sequences)
        assert lengths[0] - lengths[1] >= 2 * UNEVEN_SEQUENCES


# -- pieces of prompts


@given(
    st.integers(0, 2000),
    st.lists(st.integers(1, 2000), max_size=12),
    st.integers(1, 600),
    st.integers(1, 4),
)
def test_pieces_fill_a_step_with_whole_prompts_but_for_the_last_and_leave_others_their_share(
    begun: int, waiting: list[int], piece: int, instances: int
) -> None:
    prompts = [*([begun] if begun else []), *waiting]
    found = next_pieces(begun, waiting, piece, instances)
    assert bool(found) == bool(prompts)
    assert 0 <= sum(found) <= piece
    assert list(found[:-1]) == prompts[: len(found)][:-1]
    assert all(0 < tokens <= prompt for tokens, prompt in zip(found, prompts, strict=False))
    taken = len(found) - bool(begun)
    assert taken <= -(-len(waiting) // instances)
    if taken < -(-len(waiting) // instances):
        assert sum(found) == piece


@given(st.integers(0, 2000), st.lists(st.integers(1, 2000), max_size=12), st.integers(1, 600))
def test_every_prompt_is_computed_piece_by_piece_in_its_turn(
    begun: int, waiting: list[int], piece: int
) -> None:
    left, queue = begun, list(waiting)
    for _ in range(-(-(begun + sum(waiting)) // piece) + len(waiting)):
        prompts = [*([left] if left else []), *queue]
        found = next_pieces(left, queue, piece, 2)
        queue = queue[len(found) - bool(left) :] if found else queue
        left = prompts[len(found) - 1] - found[-1] if found else 0
    assert (left, queue) == (0, [])


@given(st.floats(0.1, 50), st.floats(0.001, 1), st.integers(1, 5000))
def test_a_piece_takes_at_most_so_many_times_the_shortest_step_and_the_next_larger_one_more(
    step_ms: float, token_ms: float, most: int
) -> None:
    def step_s(tokens: int) -> float:
        return max(step_ms, tokens * token_ms)

    found = piece_tokens(step_s, most)
    assert 1 <= found <= most
    assert step_s(found) <= LONGER * step_s(1)
    assert found == most or step_s(found + 1) > LONGER * step_s(1)


def test_a_piece_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="a token or more, got at most 0"):
        piece_tokens(float, 0)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 2000)), min_size=2, max_size=2))
def test_no_prompt_overtakes_one_that_came_before_it_and_the_shortest_of_a_moment_is_first(
    prompts: list[tuple[float, int]],
) -> None:
    first = min(range(2), key=lambda at: prompt_order(*prompts[at], at))
    assert prompts[first] == min(prompts)
