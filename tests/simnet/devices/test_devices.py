"""Estimated times of steps: they grow with the work, and never beat what the device can do at most."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.shards.spec import Span
from molink.simnet.devices.devices import DEVICES, DeviceProfile, SequenceChunk
from molink.simnet.devices.model_shapes import MODEL_SHAPES, QWEN2_7B, ModelShape

shapes = st.sampled_from([shape for shape in MODEL_SHAPES.values() if shape.layers >= 16])
devices = st.sampled_from(list(DEVICES.values()))
chunks = st.lists(
    st.builds(SequenceChunk, st.integers(1, 512), st.integers(0, 4096)), min_size=1, max_size=32
)
MIDDLE = Span(5, 15)


@given(devices, shapes, chunks, st.builds(SequenceChunk, st.integers(1, 512), st.integers(0, 4096)))
def test_another_sequence_never_makes_a_step_shorter(
    device: DeviceProfile, shape: ModelShape, batch: list[SequenceChunk], more: SequenceChunk
) -> None:
    assert device.compute_s(shape, MIDDLE, [*batch, more], 0) >= device.compute_s(shape, MIDDLE, batch, 0)


@given(devices, shapes, chunks, st.integers(0, 31), st.integers(1, 512), st.integers(0, 4096))
def test_more_rows_or_more_context_never_make_a_step_shorter(
    device: DeviceProfile, shape: ModelShape, batch: list[SequenceChunk], place: int, rows: int, context: int
) -> None:
    one = batch[place % len(batch)]
    rest = [chunk for chunk in batch if chunk is not one]
    before_s = device.compute_s(shape, MIDDLE, [one, *rest], 0)
    assert (
        device.compute_s(shape, MIDDLE, [SequenceChunk(one.rows + rows, one.context), *rest], 0) >= before_s
    )
    assert (
        device.compute_s(shape, MIDDLE, [SequenceChunk(one.rows, one.context + context), *rest], 0)
        >= before_s
    )


@given(devices, shapes, chunks, st.data())
def test_more_layers_take_longer_and_the_model_s_ends_cost_something(
    device: DeviceProfile, shape: ModelShape, batch: list[SequenceChunk], data: st.DataObject
) -> None:
    start = data.draw(st.integers(1, shape.layers - 2))
    stop = data.draw(st.integers(start + 1, shape.layers - 1))
    inner = device.compute_s(shape, Span(start, stop), batch, len(batch))
    assert device.compute_s(shape, Span(start - 1, stop), batch, len(batch)) > inner
    whole, headless = (device.compute_s(shape, Span(start, shape.layers), batch, n) for n in (1, 0))
    assert whole > headless > inner


@given(devices, shapes, chunks)
def test_no_step_is_faster_than_reading_its_weights_or_computing_its_products(
    device: DeviceProfile, shape: ModelShape, batch: list[SequenceChunk]
) -> None:
    seconds = device.compute_s(shape, MIDDLE, batch, 0)
    rows = sum(chunk.rows for chunk in batch)
    read = sum(shape.read_parameters(layer, rows) for layer in MIDDLE) * shape.element_bytes
    assert seconds > read / device.memory_bytes_per_s
    assert seconds > 2 * rows * sum(shape.row_parameters(layer) for layer in MIDDLE) / device.flops_per_s


def test_a_prefill_in_one_step_is_not_slower_than_in_two() -> None:
    device = DEVICES["rtx-4090"]
    whole_s = device.compute_s(QWEN2_7B, MIDDLE, [SequenceChunk(1000, 0)], 0)
    halves_s = [device.compute_s(QWEN2_7B, MIDDLE, [SequenceChunk(500, context)], 0) for context in (0, 500)]
    assert whole_s <= sum(halves_s)


def test_a_second_tensor_between_machines_doubles_what_travels_and_nothing_that_is_computed_or_held() -> None:
    both = replace(QWEN2_7B, tensors_per_boundary=2)
    device, chunks = DEVICES["rtx-4090"], [SequenceChunk(100, 0)]
    assert both.spec().activation_bytes == 2 * QWEN2_7B.spec().activation_bytes
    assert both.spec().weight_bytes(Span(0, 28)) == QWEN2_7B.spec().weight_bytes(Span(0, 28))
    assert both.spec().kv_bytes(Span(0, 28), 9) == QWEN2_7B.spec().kv_bytes(Span(0, 28), 9)
    for span in (Span(0, 9), MIDDLE, Span(19, 28)):
        assert device.compute_s(both, span, chunks, 1) == device.compute_s(QWEN2_7B, span, chunks, 1)


@pytest.mark.parametrize(
    ("name", "embed_ms", "layer_ms", "head_ms", "total_ms"),
    [
        ("a10g", 0.098, 3.748, 1.293, 301.231),
        ("a100-80", 0.074, 1.211, 0.471, 97.425),
        ("rtx-3090", 0.062, 2.177, 0.785, 175.007),
    ],
)
def test_table_2_of_the_scheduling_paper(
    name: str, embed_ms: float, layer_ms: float, head_ms: float, total_ms: float
) -> None:
    device, shape, row = DEVICES[name], MODEL_SHAPES["llama-2-70b"], [SequenceChunk(1, 0)]

    def taken_ms(span: Span, sampled: int) -> float:
        return 1000 * device.compute_s(shape, span, row, sampled)

    layer = taken_ms(Span(1, 2), 0) - 1000 * device.step_s
    assert layer == pytest.approx(layer_ms, rel=1e-4)
    assert taken_ms(Span(0, 1), 0) - layer == pytest.approx(embed_ms, rel=1e-3)
    assert taken_ms(Span(79, 80), 1) - taken_ms(Span(79, 80), 0) == pytest.approx(head_ms, rel=1e-4)
    assert taken_ms(Span(0, 80), 1) == pytest.approx(total_ms, rel=1e-3)


def test_forty_layers_on_an_h100_as_the_scheduling_paper_s_figure_4_says() -> None:
    """30.6 ms of one row is what the profile is made from; 33.1 ms of 16 rows it has with some 2,700 tokens of context
    each, of which the paper says nothing."""
    device, shape, layers = DEVICES["h100"], MODEL_SHAPES["llama-2-70b"], Span(0, 40)
    assert device.compute_s(shape, layers, [SequenceChunk(1, 0)], 0) == pytest.approx(30.6e-3, rel=1e-3)
    without, with_context = (
        device.compute_s(shape, layers, [SequenceChunk(1, n)] * 16, 0) for n in (0, 4095)
    )
    assert without < 33.1e-3 < with_context
    assert device.compute_s(shape, layers, [SequenceChunk(1, 2700)] * 16, 0) == pytest.approx(
        33.1e-3, rel=0.01
    )


def test_table_1_of_the_redundancy_paper() -> None:
    """Teraflops, gigabytes, terabytes a second."""
    found = {name: DEVICES[name] for name in ("910b2", "h100")}
    assert {
        name: (one.flops_per_s / 1e12, one.memory_bytes / 1e9, one.memory_bytes_per_s / 1e12)
        for name, one in found.items()
    } == {"910b2": (400, 64, 1.8), "h100": (989, 80, 3.35)}


def test_a_step_of_a_mixture_reads_the_experts_that_its_rows_draw_and_no_more() -> None:
    shape, device = MODEL_SHAPES["mixtral-8x7b"], DEVICES["a100-80"]
    one, many = (device.compute_s(shape, MIDDLE, [SequenceChunk(1, 0)] * rows, 0) for rows in (1, 64))
    expert_s = len(MIDDLE) * 3 * 4096 * 14336 * 2 / (device.memory_bytes_per_s * device.memory_efficiency)
    assert many - one == pytest.approx(6 * expert_s, rel=0.01)


def test_dense_layers_of_a_mixture_take_other_times_than_those_with_experts() -> None:
    shape, device, row = MODEL_SHAPES["deepseek-v3"], DEVICES["h100"], [SequenceChunk(1, 100)]
    dense, mixed = (device.compute_s(shape, Span(start, start + 1), row, 0) for start in (2, 3))
    assert dense != mixed
    both = device.compute_s(shape, Span(2, 4), row, 0)
    assert both == pytest.approx(dense + mixed - device.step_s)


@pytest.mark.parametrize(
    ("span", "batch", "sampled"),
    [(Span(0, 29), [SequenceChunk(1, 0)], 0), (Span(0, 28), [], 0), (Span(0, 28), [SequenceChunk(1, 0)], -1)],
)
def test_steps_that_cannot_be_are_refused(span: Span, batch: list[SequenceChunk], sampled: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        DEVICES["rtx-4090"].compute_s(QWEN2_7B, span, batch, sampled)


@pytest.mark.parametrize(("rows", "context"), [(0, 0), (1, -1)])
def test_chunks_that_cannot_be_are_refused(rows: int, context: int) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        SequenceChunk(rows, context)
