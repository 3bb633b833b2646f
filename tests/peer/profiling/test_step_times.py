"""What steps took makes predictions better, outliers do not, and only real changes are announced."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.dht.records.records import LayerLatency, PrefillLatency
from molink.peer.profiling.profile import Profile, StepWork, predicted_ms
from molink.peer.profiling.step_times import (
    CHANGED_BY,
    MOST_CHANGE,
    REMEMBERED_ERRORS,
    STEADY_AFTER,
    StepTimes,
    worth_announcing,
)
from molink.routing.cost.cost import PROFILED_CONTEXT_TOKENS

PROFILE = Profile(
    (LayerLatency(1, 1.0), LayerLatency(4, 1.6), LayerLatency(16, 4.0)),
    embed_ms=0.1,
    head_ms=0.5,
    load_bytes_per_s=1e9,
    prefill_latencies=(PrefillLatency(16, 4.0), PrefillLatency(64, 12.0)),
    decode_context_ms=0.5,
    prefill_context_ms=0.02,
)

contexts = st.lists(st.integers(0, 4000), max_size=5).map(tuple)
prefills = st.lists(st.tuples(st.integers(1, 512), st.integers(0, 4000)), max_size=3).map(tuple)
works = st.builds(StepWork, st.integers(1, 80), st.booleans(), st.booleans(), contexts, prefills).filter(
    lambda work: work.rows > 0
)


def decode(rows: int = 1, context: int = PROFILED_CONTEXT_TOKENS, layers: int = 10) -> StepWork:
    return StepWork(layers, False, False, (context,) * rows)


def prefill(rows: int, context: int = 0, layers: int = 10) -> StepWork:
    return StepWork(layers, False, False, (), ((rows, context),))


def test_a_prediction_is_layers_and_ends_and_what_the_context_adds() -> None:
    assert predicted_ms(PROFILE, decode()) == pytest.approx(10.0)
    assert predicted_ms(PROFILE, decode(rows=4)) == pytest.approx(16.0)
    assert predicted_ms(PROFILE, decode(rows=4, context=1064)) == pytest.approx(16.0 + 4 * 10 * 0.5)
    assert predicted_ms(PROFILE, replace(decode(), starts=True, ends=True)) == pytest.approx(10.6)
    assert predicted_ms(PROFILE, prefill(16)) == pytest.approx(40.0)
    assert predicted_ms(PROFILE, prefill(16, context=1000)) == pytest.approx(40.0 + 10 * 16 * 0.02)


@given(works)
def test_more_context_or_layers_never_take_less_time(work: StepWork) -> None:
    taken_ms = predicted_ms(PROFILE, work)
    assert taken_ms > 0
    longer = replace(
        work,
        decode_contexts=tuple(tokens + 100 for tokens in work.decode_contexts),
        prefills=tuple((rows, tokens + 100) for rows, tokens in work.prefills),
    )
    assert predicted_ms(PROFILE, longer) >= taken_ms
    assert predicted_ms(PROFILE, replace(work, layers=work.layers + 1)) > taken_ms


@given(works, st.floats(0.05, 20))
def test_a_lasting_difference_is_learnt(work: StepWork, factor: float) -> None:
    times = StepTimes(PROFILE)
    measured_ms = predicted_ms(PROFILE, work) * factor
    for _ in range(200):
        times.observe(work, measured_ms)
    assert times.predicted_ms(work) == pytest.approx(measured_ms, rel=0.01)


@given(works, st.floats(1e-3, 1e6), st.integers(0, 50))
def test_one_outlier_moves_a_prediction_by_a_little_only(work: StepWork, odd_ms: float, steps: int) -> None:
    times = StepTimes(PROFILE)
    for _ in range(steps):
        times.observe(work, predicted_ms(PROFILE, work))
    before_ms = times.predicted_ms(work)
    times.observe(work, odd_ms)
    assert abs(times.predicted_ms(work) / before_ms - 1) <= MOST_CHANGE + 1e-9


@given(st.lists(st.tuples(works, st.floats(allow_nan=True, allow_infinity=True)), max_size=8))
def test_a_refined_profile_is_one_whatever_was_measured(steps: list[tuple[StepWork, float]]) -> None:
    times = StepTimes(PROFILE)
    for work, measured_ms in steps:
        for _ in range(STEADY_AFTER):
            times.observe(work, measured_ms)
    refined = times.refined()
    decode_ms = [one.layer_ms for one in refined.layer_latencies]
    prefill_ms = [one.layer_ms for one in refined.prefill_latencies]
    assert [one.batch_size for one in refined.layer_latencies] == [1, 4, 16]
    assert [one.tokens for one in refined.prefill_latencies] == [16, 64]
    assert decode_ms == sorted(decode_ms)
    assert prefill_ms == sorted(prefill_ms)
    assert min(*decode_ms, *prefill_ms, refined.head_ms, refined.embed_ms) > 0
    assert times.steps == STEADY_AFTER * sum(0 < measured_ms < float("inf") for _, measured_ms in steps)


def test_a_few_steps_are_not_believed_and_more_are_where_they_were_and_next_to_it() -> None:
    times = StepTimes(PROFILE)
    for _ in range(STEADY_AFTER - 1):
        times.observe(decode(), 20.0)
    assert times.refined() == PROFILE
    for _ in range(100):
        times.observe(decode(), 20.0)
    refined = times.refined()
    assert refined.layer_latencies[0].layer_ms == pytest.approx(2.0, rel=0.01)
    assert refined.layer_latencies[1].layer_ms == pytest.approx(3.2, rel=0.01)  # nobody stepped four
    assert refined.prefill_latencies == PROFILE.prefill_latencies  # of prompts nothing was learnt
    assert refined.load_bytes_per_s == PROFILE.load_bytes_per_s


def test_the_error_is_the_median_of_the_latest_and_is_compared_with_that_of_the_start() -> None:
    times = StepTimes(PROFILE)
    assert times.median_error is None
    assert times.median_profile_error is None
    times.observe(decode(), 20.0)
    assert times.median_error == times.median_profile_error == pytest.approx(0.5)
    for _ in range(2 * REMEMBERED_ERRORS):
        times.observe(decode(), 20.0)
    assert times.median_error == pytest.approx(0.0, abs=0.01)
    assert times.median_profile_error == pytest.approx(0.5)


@given(st.floats(0.1, 10))
def test_a_profile_is_announced_anew_when_a_time_has_changed_by_much(factor: float) -> None:
    slower = replace(
        PROFILE,
        layer_latencies=tuple(
            LayerLatency(one.batch_size, one.layer_ms * factor) for one in PROFILE.layer_latencies
        ),
    )
    if abs(abs(factor - 1) - CHANGED_BY) > 1e-6:
        assert worth_announcing(PROFILE, slower) == (abs(factor - 1) > CHANGED_BY)
    assert not worth_announcing(PROFILE, PROFILE)
