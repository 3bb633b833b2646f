"""Pieces of prompts keep decode within its limit where that can be, and a prompt gets through whatever happens."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.records.records import LayerLatency
from molink.peer.profiling.profile import Profile, SliceLatency, StepWork, plausible_slices, slice_layer_ms
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.prefill_slices import (
    LEAST_BUDGET_MS,
    LEAST_SHARE,
    LEAST_TOKENS,
    MOST_SLOWDOWN,
    RemainingPrefill,
    SliceSize,
    SliceSizer,
    budget_ms,
    next_slice,
    together_ms,
)

PIECES = tuple(
    SliceLatency(tokens, 0.5 + 0.05 * tokens, 0.5 + 0.02 * tokens) for tokens in (16, 32, 64, 128, 256, 512)
)
PROFILE = Profile((LayerLatency(1, 1.5),), 0.1, 0.1, 1e9, slice_latencies=PIECES)
DECODE = StepWork(8, starts=True, ends=True, decode_contexts=(64,))
"""12.2 ms"""

parts = st.lists(
    st.builds(RemainingPrefill, st.integers(1, 2000), st.integers(0, 32000), st.booleans()),
    min_size=1,
    max_size=5,
)
LAYERS = 8
times_ms = st.floats(0.01, 1000)


def layer_ms(tokens: int, context_tokens: int) -> float:
    return slice_layer_ms(PIECES, tokens, context_tokens)


def taken_ms(size: SliceSize, waiting: Sequence[RemainingPrefill]) -> float:
    return size.layers * together_ms(layer_ms, waiting[: len(size.tokens)], size.tokens)


@given(st.integers(1, 80), parts, times_ms, times_ms)
def test_a_piece_fits_the_time_or_is_the_least_there_is(
    layers: int, waiting: list[RemainingPrefill], most_ms: float, beside_ms: float
) -> None:
    size = next_slice(layer_ms, layers, waiting, most_ms, beside_ms)
    assert 1 <= size.layers <= layers
    assert 1 <= size.tokens[0] <= waiting[0].tokens
    whole = tuple(part.tokens for part in waiting)
    assert len(size.tokens) == 1 or size.tokens == whole[: len(size.tokens)]
    least = SliceSize((min(waiting[0].tokens, LEAST_TOKENS),), 1)
    assert size == least or taken_ms(size, waiting) <= most_ms * 1.0001


@given(st.integers(1, 80), parts, times_ms)
def test_tokens_between_layers_go_on_together_through_as_many_as_fit(
    layers: int, waiting: list[RemainingPrefill], decode_ms: float
) -> None:
    sizes = SliceSizer(StepTimes(PROFILE))
    for _ in range(50):
        sizes.record_decode(DECODE, decode_ms, beside=True)
    tokens = tuple(min(part.tokens, 100) for part in waiting)
    size = sizes.next_slice(layers, waiting, 1, tokens)
    assert size.tokens == tokens
    assert 1 <= size.layers <= layers
    most_ms = budget_ms(StepTimes(PROFILE).predicted_ms(DECODE), decode_ms)
    assert size.layers == 1 or taken_ms(size, waiting) <= most_ms * 1.0001


@given(waiting=parts, between=st.booleans())
def test_where_nobody_decodes_all_that_waits_goes_through_all_layers(
    *, waiting: list[RemainingPrefill], between: bool
) -> None:
    tokens = tuple(part.tokens for part in waiting)
    sizes = SliceSizer(StepTimes(PROFILE))
    assert sizes.next_slice(LAYERS, waiting, 0, tokens if between else ()) == SliceSize(tokens, LAYERS)


def test_pieces_shrink_as_the_context_grows() -> None:
    work = [
        size.tokens[0] * size.layers
        for context in (0, 1000, 2000, 4000, 8000)
        if (size := next_slice(layer_ms, LAYERS, [RemainingPrefill(2000, context)], 14.0, 10.0))
    ]
    assert work == sorted(work, reverse=True)
    assert work[0] > 2 * work[-1]


def test_short_prompts_join_one_another_and_not_a_long_one() -> None:
    short, long = RemainingPrefill(32, 0), RemainingPrefill(448, 1000, ends=False)
    assert len(next_slice(layer_ms, LAYERS, [short] * 3, 20.0, 10.0).tokens) > 1
    assert (
        next_slice(lambda tokens, _: 1 + tokens / 1000, LAYERS, [short] * 9, 20.0, 10.0).tokens == (32,) * 9
    )
    assert next_slice(layer_ms, LAYERS, [short, short, long], 40.0, 10.0).tokens == (32, 32)


def test_prompts_are_computed_at_once_where_more_wait_for_a_first_token_than_for_a_next() -> None:
    sizes = SliceSizer(StepTimes(PROFILE))
    sizes.record_decode(DECODE, 12.2, beside=False)
    waiting = [
        RemainingPrefill(32, 0),
        RemainingPrefill(448, 0, ends=False),
        RemainingPrefill(32, 0),
        RemainingPrefill(32, 0),
    ]
    assert sizes.at_once(LAYERS, waiting, 3) == ()
    assert sizes.at_once(LAYERS, waiting[:2], 1) == ()
    assert sizes.at_once(LAYERS, waiting, 2) == (0, 2, 3)


def test_a_pause_is_followed_by_decodes_share_of_the_time() -> None:
    sizes = SliceSizer(StepTimes(PROFILE))
    sizes.record_decode(DECODE, 12.2, beside=False)
    waiting = [RemainingPrefill(32, 0)] * 3
    assert sizes.at_once(LAYERS, waiting, 2)
    owed_ms = LAYERS * layer_ms(96, 0) * 2 / 3
    while owed_ms > 0:
        assert sizes.at_once(LAYERS, waiting, 2) == ()
        sizes.record_decode(DECODE, 12.2, beside=True)
        owed_ms -= 12.2
    assert sizes.at_once(LAYERS, waiting, 2)


def test_prompts_are_not_computed_at_once_where_pieces_cost_little() -> None:
    """Decode steps are so fast that the prompts hardly wait for them."""
    sizes = SliceSizer(StepTimes(replace(PROFILE, layer_latencies=(LayerLatency(1, 0.01),))))
    sizes.record_decode(DECODE, 0.1, beside=True)
    assert sizes.at_once(LAYERS, [RemainingPrefill(32, 0)] * 5, 2) == ()


@given(times_ms, times_ms)
def test_a_decode_step_and_a_piece_keep_to_the_limit_unless_decode_leaves_the_prompt_too_little(
    idle_ms: float, beside_ms: float
) -> None:
    most_ms = budget_ms(idle_ms, beside_ms)
    is_within = beside_ms + most_ms <= MOST_SLOWDOWN * idle_ms * 1.0001
    is_least_share = most_ms == pytest.approx(LEAST_SHARE * (beside_ms + most_ms))
    assert is_within or is_least_share or most_ms == LEAST_BUDGET_MS
    assert most_ms >= LEAST_BUDGET_MS


def test_a_machine_that_became_slower_gets_smaller_pieces() -> None:
    sizes = SliceSizer(StepTimes(PROFILE))
    sizes.record_decode(DECODE, 12.2, beside=False)
    waiting = [RemainingPrefill(2000, 1000)]
    first = sizes.next_slice(LAYERS, waiting, 1)
    for _ in range(20):
        sizes.record_slice(first, waiting, 2 * taken_ms(first, waiting))
    assert sizes.layer_ms(64, 1000) == pytest.approx(2 * layer_ms(64, 1000), rel=0.01)
    assert taken_ms(sizes.next_slice(LAYERS, waiting, 1), waiting) <= taken_ms(first, waiting) * 0.6


def test_decode_steps_that_are_fast_beside_pieces_leave_more_time_to_the_prompt() -> None:
    slow, fast = (SliceSizer(StepTimes(PROFILE)) for _ in range(2))
    for _ in range(20):
        slow.record_decode(DECODE, 12.2, beside=True)
        fast.record_decode(DECODE, 6.0, beside=True)
    waiting = [RemainingPrefill(2000, 1000)]
    more, less = (taken_ms(sizes.next_slice(LAYERS, waiting, 1), waiting) for sizes in (fast, slow))
    assert more > 1.2 * less


@given(
    st.integers(1, 3000),
    st.integers(0, 9000),
    st.lists(st.tuples(st.integers(1, 90), times_ms, times_ms), min_size=1, max_size=20),
)
def test_a_prompt_gets_through_whatever_was_measured(
    tokens: int, context: int, told: list[tuple[int, float, float]]
) -> None:
    sizes = SliceSizer(StepTimes(PROFILE))
    left, layer, turn = [RemainingPrefill(tokens, context), RemainingPrefill(60, 0)], 0, 0
    under_way: tuple[int, ...] = ()
    while left:
        beside, decode_ms, piece_ms = told[turn % len(told)]
        sizes.record_decode(DECODE, decode_ms, beside=beside % 2 == 0)
        going_on = left[: len(under_way)] if under_way else left
        size = sizes.next_slice(LAYERS - layer, going_on, 1, under_way)
        sizes.record_slice(size, left[: len(size.tokens)], piece_ms)
        under_way = size.tokens
        layer += size.layers
        assert layer <= LAYERS
        if layer == LAYERS:
            through = zip(left, [*under_way, 0], strict=False)
            left = [RemainingPrefill(one.tokens - done, one.context_tokens + done) for one, done in through]
            left = [one for one in left if one.tokens]
            layer, under_way = 0, ()
        turn += 1
    assert turn <= LAYERS * (tokens // LEAST_TOKENS + 8)


@given(st.integers(1, 4000), st.integers(0, 9000))
def test_more_tokens_and_more_context_are_predicted_to_take_longer(tokens: int, context: int) -> None:
    assert layer_ms(tokens + 1, context) >= layer_ms(tokens, context) > 0
    assert layer_ms(tokens, context + 1) > layer_ms(tokens, context)


@given(st.dictionaries(st.integers(1, 600), st.tuples(times_ms, times_ms), min_size=1, max_size=7))
def test_what_is_measured_of_fewer_tokens_is_believed_as_far_as_that_of_more_allows(
    told: dict[int, tuple[float, float]],
) -> None:
    measured = tuple(SliceLatency(tokens, *times) for tokens, times in sorted(told.items()))
    cleaned = plausible_slices(measured)
    assert [one.tokens for one in cleaned] == [one.tokens for one in measured]
    assert cleaned[-1] == measured[-1]
    for few, many in pairwise(cleaned):
        for low_ms, high_ms in ((few.layer_ms, many.layer_ms), (few.context_ms, many.context_ms)):
            assert high_ms * few.tokens / many.tokens <= low_ms * 1.0001 <= high_ms * 1.0002
    assert plausible_slices(PIECES) == PIECES
