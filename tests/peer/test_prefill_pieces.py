"""Pieces of prompts keep decode within its limit where that can be, and a prompt gets through whatever happens."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.records import LayerLatency
from molink.peer.profiling.profile import PieceLatency, Profile, StepWork, piece_layer_ms, plausible_pieces
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.prefill_pieces import (
    LEAST_SHARE,
    LEAST_TOKENS,
    MOST_SLOWDOWN,
    PartLeft,
    PieceSize,
    PieceSizes,
    budget_ms,
    next_piece,
)

PIECES = tuple(
    PieceLatency(tokens, 0.5 + 0.05 * tokens, 0.5 + 0.02 * tokens) for tokens in (16, 32, 64, 128, 256, 512)
)
PROFILE = Profile((LayerLatency(1, 1.5),), 0.1, 0.1, 1e9, piece_latencies=PIECES)
DECODE = StepWork(8, starts=True, ends=True, decode_contexts=(64,))
"""12.2 ms"""

parts = st.builds(PartLeft, st.integers(1, 80), st.integers(1, 2000), st.integers(0, 32000))
times_ms = st.floats(0.01, 1000)


def layer_ms(tokens: int, context_tokens: int) -> float:
    return piece_layer_ms(PIECES, tokens, context_tokens)


def taken_ms(size: PieceSize, context_tokens: int) -> float:
    return size.layers * layer_ms(size.tokens, context_tokens)


@given(parts, times_ms, times_ms)
def test_a_piece_fits_the_time_or_is_the_least_there_is(
    part: PartLeft, most_ms: float, beside_ms: float
) -> None:
    size = next_piece(layer_ms, part, most_ms, beside_ms)
    assert 1 <= size.tokens <= part.tokens
    assert 1 <= size.layers <= part.layers
    least = PieceSize(min(part.tokens, LEAST_TOKENS), 1)
    assert size == least or taken_ms(size, part.context_tokens) <= most_ms * 1.0001


@given(parts, st.integers(1, 500), times_ms)
def test_tokens_between_layers_go_on_together_through_as_many_as_fit(
    part: PartLeft, tokens: int, most_ms: float
) -> None:
    under_way = replace(part, under_way=PieceSize(tokens, part.layers))
    size = next_piece(layer_ms, under_way, most_ms, 1.0)
    assert size.tokens == tokens
    assert 1 <= size.layers <= part.layers
    assert size.layers == 1 or taken_ms(size, part.context_tokens) <= most_ms * 1.0001


def test_pieces_shrink_as_the_context_grows() -> None:
    work = [
        size.tokens * size.layers
        for context in (0, 1000, 2000, 4000, 8000)
        if (size := next_piece(layer_ms, PartLeft(8, 2000, context), 14.0, 10.0))
    ]
    assert work == sorted(work, reverse=True)
    assert work[0] > 2 * work[-1]


@given(times_ms, times_ms)
def test_a_decode_step_and_a_piece_keep_to_the_limit_unless_decode_leaves_the_prompt_too_little(
    idle_ms: float, beside_ms: float
) -> None:
    most_ms = budget_ms(idle_ms, beside_ms)
    assert beside_ms + most_ms <= MOST_SLOWDOWN * idle_ms * 1.0001 or most_ms == pytest.approx(
        LEAST_SHARE * (beside_ms + most_ms)
    )


def test_a_machine_that_became_slower_gets_smaller_pieces() -> None:
    sizes = PieceSizes(StepTimes(PROFILE))
    sizes.decoded(DECODE, 12.2, beside=False)
    part = PartLeft(8, 2000, 1000)
    first = sizes.next(part)
    for _ in range(20):
        sizes.computed(first, 1000, 2 * taken_ms(first, 1000))
    assert sizes.layer_ms(64, 1000) == pytest.approx(2 * layer_ms(64, 1000), rel=0.01)
    assert taken_ms(sizes.next(part), 1000) <= taken_ms(first, 1000) * 0.6


def test_decode_steps_that_are_fast_beside_pieces_leave_more_time_to_the_prompt() -> None:
    slow, fast = (PieceSizes(StepTimes(PROFILE)) for _ in range(2))
    for _ in range(20):
        slow.decoded(DECODE, 12.2, beside=True)
        fast.decoded(DECODE, 6.0, beside=True)
    part = PartLeft(8, 2000, 1000)
    assert taken_ms(fast.next(part), 1000) > 1.2 * taken_ms(slow.next(part), 1000)


@given(
    st.integers(1, 3000),
    st.integers(0, 9000),
    st.lists(st.tuples(st.integers(1, 90), times_ms, times_ms), min_size=1, max_size=20),
)
def test_a_prompt_gets_through_whatever_was_measured(
    tokens: int, context: int, told: list[tuple[int, float, float]]
) -> None:
    sizes = PieceSizes(StepTimes(PROFILE))
    left, layer, turn = PartLeft(8, tokens, context), 0, 0
    while left.tokens:
        piece_tokens, decode_ms, piece_ms = told[turn % len(told)]
        sizes.decoded(DECODE, decode_ms, beside=piece_tokens % 2 == 0)
        size = sizes.next(left)
        sizes.computed(size, left.context_tokens, piece_ms)
        layer += size.layers
        assert layer <= 8
        if layer == 8:
            left = PartLeft(8, left.tokens - size.tokens, left.context_tokens + size.tokens)
            layer = 0
        else:
            left = replace(left, under_way=PieceSize(size.tokens, 8 - layer))
        turn += 1
    assert turn <= 8 * (tokens // LEAST_TOKENS + 2)


@given(st.integers(1, 4000), st.integers(0, 9000))
def test_more_tokens_and_more_context_are_predicted_to_take_longer(tokens: int, context: int) -> None:
    assert layer_ms(tokens + 1, context) >= layer_ms(tokens, context) > 0
    assert layer_ms(tokens, context + 1) > layer_ms(tokens, context)


@given(st.dictionaries(st.integers(1, 600), st.tuples(times_ms, times_ms), min_size=1, max_size=7))
def test_what_is_measured_of_fewer_tokens_is_believed_as_far_as_that_of_more_allows(
    told: dict[int, tuple[float, float]],
) -> None:
    measured = tuple(PieceLatency(tokens, *times) for tokens, times in sorted(told.items()))
    cleaned = plausible_pieces(measured)
    assert [one.tokens for one in cleaned] == [one.tokens for one in measured]
    assert cleaned[-1] == measured[-1]
    for few, many in pairwise(cleaned):
        for low_ms, high_ms in ((few.layer_ms, many.layer_ms), (few.context_ms, many.context_ms)):
            assert high_ms * few.tokens / many.tokens <= low_ms * 1.0001 <= high_ms * 1.0002
    assert plausible_pieces(PIECES) == PIECES
