"""Predicted TTFT and TPOT of tensor and pipeline parallelism inside one machine, and the choice between them."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.routing.parallelism.layout_prediction import (
    DeviceLink,
    DeviceRates,
    Goal,
    LayoutChoice,
    LayoutGoal,
    _attended,
    all_reduce_s,
    choose_layout,
    predict,
)
from molink.routing.parallelism.parallelism import Layout, Lengths
from molink.routing.parallelism.volumes import pipeline_volume, tensor_volume
from molink.shards.spec import ModelSpec, Span
from molink.simnet.devices.model_shapes import MODEL_SHAPES

DEVICE = DeviceRates(flops_per_s=120e12, memory_bytes_per_s=850e9, memory_bytes=24e9, layer_s=10e-6)
NVLINK = DeviceLink(bytes_per_s=200e9, latency_s=5e-6)
ETHERNET = DeviceLink(bytes_per_s=125e6, latency_s=500e-6)
EIGHT = MODEL_SHAPES["llama-3.1-8b"].spec()
LENGTHS = Lengths(128, 128)

specs = st.sampled_from(
    [MODEL_SHAPES[name].spec() for name in ("llama-3.2-3b", "llama-3.1-8b", "llama-2-13b")]
)
links = st.builds(DeviceLink, st.floats(1e6, 1e12), st.floats(0, 1e-2))
lengths = st.builds(Lengths, st.integers(1, 4096), st.integers(1, 512))
ranks = st.sampled_from((1, 2, 4, 8))


@given(specs, ranks, lengths)
def test_over_a_perfect_link_ranks_divide_all_but_the_launches(
    spec: ModelSpec, tensor: int, length: Lengths
) -> None:
    perfect = DeviceLink(bytes_per_s=1e30, latency_s=0.0)
    alone = predict(spec, spec.whole, Layout(), DEVICE, perfect, length)
    shared = predict(spec, spec.whole, Layout(tensor), DEVICE, perfect, length)
    launches_s = spec.layers * DEVICE.layer_s
    assert shared.ttft_s == pytest.approx((alone.ttft_s - launches_s) / tensor + launches_s)
    if length.decode_tokens > 1:
        assert shared.tpot_s == pytest.approx((alone.tpot_s - launches_s) / tensor + launches_s)


@given(specs, links, lengths, st.integers(2, 8))
def test_a_pipeline_never_shortens_a_lone_request(
    spec: ModelSpec, link: DeviceLink, length: Lengths, stages: int
) -> None:
    alone = predict(spec, spec.whole, Layout(), DEVICE, link, length)
    piped = predict(spec, spec.whole, Layout(1, stages), DEVICE, link, length)
    assert piped.ttft_s >= alone.ttft_s
    assert piped.tpot_s >= alone.tpot_s
    assert piped.device_bytes < alone.device_bytes


@given(specs, ranks, lengths, links, st.floats(1, 100))
def test_a_slower_link_never_makes_a_layout_faster(
    spec: ModelSpec, tensor: int, length: Lengths, link: DeviceLink, times: float
) -> None:
    slower = DeviceLink(link.bytes_per_s / times, link.latency_s * times)
    for layout in (Layout(tensor), Layout(1, tensor), Layout(2, 2)):
        fast = predict(spec, spec.whole, layout, DEVICE, link, length)
        slow = predict(spec, spec.whole, layout, DEVICE, slower, length)
        assert slow.ttft_s >= fast.ttft_s
        assert slow.tpot_s >= fast.tpot_s


@given(specs, lengths, links, st.floats(1e-3, 10), st.sampled_from(("ttft", "tpot", "latency")))
def test_the_choice_is_the_best_of_those_that_fit_and_keep_the_limit(
    spec: ModelSpec, length: Lengths, link: DeviceLink, max_ttft_s: float, goal: Goal
) -> None:
    layouts = [Layout(), Layout(2), Layout(1, 2), Layout(4), Layout(2, 2), Layout(1, 4)]
    predictions = [predict(spec, spec.whole, layout, DEVICE, link, length) for layout in layouts]
    fitting = [one for one in predictions if one.fits]
    if not fitting:
        with pytest.raises(ValueError, match="fits"):
            choose_layout(spec, spec.whole, layouts, DEVICE, link, length, LayoutGoal(goal, max_ttft_s))
        return
    choice = choose_layout(spec, spec.whole, layouts, DEVICE, link, length, LayoutGoal(goal, max_ttft_s))
    allowed = [one for one in fitting if one.ttft_s <= max_ttft_s] or fitting
    assert choice.best in allowed
    assert choice.best.value_s(goal) == min(one.value_s(goal) for one in allowed)
    assert len(choice.reasons) == len(layouts)
    assert choice.reasons[0].startswith(str(choice.best.layout))


def counted(rows: int, context: int, window: int | None) -> tuple[int, int]:
    """Token by token: what each sees, and what is read of the cache and of the new tokens."""
    sees = [range(max(0, at + 1 - window) if window else 0, at + 1) for at in range(context, context + rows)]
    return sum(map(len, sees)), sees[-1].stop - sees[0].start


@given(st.integers(1, 40), st.integers(0, 60), st.none() | st.integers(1, 70))
def test_attention_counts_what_each_token_sees(rows: int, context: int, window: int | None) -> None:
    assert _attended(rows, context, window) == counted(rows, context, window)


@given(lengths, links)
def test_layers_with_a_window_take_less_time_once_the_context_is_longer(
    length: Lengths, link: DeviceLink
) -> None:
    windowed = replace(EIGHT, kv_windows=(None, 256) * (EIGHT.layers // 2))
    whole, part = (predict(spec, EIGHT.whole, Layout(2), DEVICE, link, length) for spec in (EIGHT, windowed))
    assert part.ttft_s <= whole.ttft_s
    assert part.tpot_s <= whole.tpot_s
    if length.prefill_tokens > 256:
        assert part.ttft_s < whole.ttft_s
    if length.prefill_tokens + length.decode_tokens <= 256:
        assert (part.ttft_s, part.tpot_s) == (whole.ttft_s, whole.tpot_s)


def choose(link: DeviceLink, goal: Goal = "latency") -> LayoutChoice:
    return choose_layout(
        EIGHT, EIGHT.whole, [Layout(2), Layout(1, 2)], DEVICE, link, LENGTHS, LayoutGoal(goal)
    )


def test_a_fast_link_favours_tensor_parallelism_although_it_moves_far_more() -> None:
    assert tensor_volume(EIGHT, 2, LENGTHS).bytes > 10 * pipeline_volume(EIGHT, 2, LENGTHS).bytes
    assert choose(NVLINK).best.layout == Layout(tensor=2)


def test_a_slow_link_favours_the_pipeline() -> None:
    assert choose(ETHERNET).best.layout == Layout(pipeline=2)
    assert "between devices" in choose(ETHERNET).reasons[1]


def test_messages_that_take_long_make_decoding_slow_while_the_prefill_gains() -> None:
    """Figure 8: over two machines eight ranks shorten the first token and lengthen every other."""
    spec = MODEL_SHAPES["llama-3.2-3b"].spec()
    device = DeviceRates(flops_per_s=20e12, memory_bytes_per_s=850e9, memory_bytes=24e9, layer_s=10e-6)
    inside = predict(spec, spec.whole, Layout(4), device, NVLINK, Lengths(1024, 128))
    across = predict(spec, spec.whole, Layout(8), device, DeviceLink(50e9, 12e-6), Lengths(1024, 128))
    assert across.ttft_s < inside.ttft_s
    assert across.tpot_s > inside.tpot_s


def test_a_model_too_large_for_one_device_is_divided() -> None:
    spec = MODEL_SHAPES["llama-2-13b"].spec()
    choice = choose_layout(spec, spec.whole, [Layout(), Layout(2)], DEVICE, ETHERNET, LENGTHS)
    assert choice.best.layout == Layout(2)
    assert "does not fit" in choice.reasons[1]


def test_a_limit_on_the_first_token_overrules_the_goal() -> None:
    layouts = [Layout(4), Layout(1)]
    link = DeviceLink(bytes_per_s=200e9, latency_s=200e-6)
    length = Lengths(4096, 512)
    free = choose_layout(EIGHT, EIGHT.whole, layouts, DEVICE, link, length, LayoutGoal("tpot"))
    assert free.best.layout == Layout(1)
    limited = choose_layout(
        EIGHT, EIGHT.whole, layouts, DEVICE, link, length, LayoutGoal("tpot", free.best.ttft_s * 0.9)
    )
    assert limited.best.layout == Layout(4)
    assert "later than" in limited.reasons[1]


def test_an_all_reduce_takes_its_messages_and_its_bytes() -> None:
    link = DeviceLink(bytes_per_s=1000.0, latency_s=1.0)
    assert all_reduce_s(500, 1, link) == 0
    assert all_reduce_s(500, 2, link) == 2 * 1.0 + 500 / 1000
    assert all_reduce_s(500, 4, link) == 6 * 1.0 + 1.5 * 500 / 1000


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot have 3 stages"):
        predict(EIGHT, Span(0, 2), Layout(1, 3), DEVICE, NVLINK, LENGTHS)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_cannot_be_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="bytes_per_s must be"):
        DeviceLink(bytes_per_s=value, latency_s=0.0)
    with pytest.raises(ValueError, match="flops_per_s must be"):
        DeviceRates(flops_per_s=value, memory_bytes_per_s=1.0, memory_bytes=1.0, layer_s=0.0)
