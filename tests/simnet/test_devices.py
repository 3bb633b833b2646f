"""Estimated times of steps: they grow with the work, and never beat what the device can do at most."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.shards.spec import Span
from molink.simnet.devices import DEVICES, Chunk, DeviceProfile
from molink.simnet.model_shapes import MODEL_SHAPES, QWEN2_7B, ModelShape

shapes = st.sampled_from(list(MODEL_SHAPES.values()))
devices = st.sampled_from(list(DEVICES.values()))
chunks = st.lists(st.builds(Chunk, st.integers(1, 512), st.integers(0, 4096)), min_size=1, max_size=32)
MIDDLE = Span(5, 15)


@given(devices, shapes, chunks, st.builds(Chunk, st.integers(1, 512), st.integers(0, 4096)))
def test_another_sequence_never_makes_a_step_shorter(
    device: DeviceProfile, shape: ModelShape, batch: list[Chunk], more: Chunk
) -> None:
    assert device.compute_s(shape, MIDDLE, [*batch, more], 0) >= device.compute_s(shape, MIDDLE, batch, 0)


@given(devices, shapes, chunks, st.integers(0, 31), st.integers(1, 512), st.integers(0, 4096))
def test_more_rows_or_more_context_never_make_a_step_shorter(
    device: DeviceProfile, shape: ModelShape, batch: list[Chunk], place: int, rows: int, context: int
) -> None:
    one = batch[place % len(batch)]
    rest = [chunk for chunk in batch if chunk is not one]
    before_s = device.compute_s(shape, MIDDLE, [one, *rest], 0)
    assert device.compute_s(shape, MIDDLE, [Chunk(one.rows + rows, one.context), *rest], 0) >= before_s
    assert device.compute_s(shape, MIDDLE, [Chunk(one.rows, one.context + context), *rest], 0) >= before_s


@given(devices, shapes, chunks, st.data())
def test_more_layers_take_longer_and_the_model_s_ends_cost_something(
    device: DeviceProfile, shape: ModelShape, batch: list[Chunk], data: st.DataObject
) -> None:
    start = data.draw(st.integers(1, shape.layers - 2))
    stop = data.draw(st.integers(start + 1, shape.layers - 1))
    inner = device.compute_s(shape, Span(start, stop), batch, len(batch))
    assert device.compute_s(shape, Span(start - 1, stop), batch, len(batch)) > inner
    whole, headless = (device.compute_s(shape, Span(start, shape.layers), batch, n) for n in (1, 0))
    assert whole > headless > inner


@given(devices, shapes, chunks)
def test_no_step_is_faster_than_reading_its_weights_or_computing_its_products(
    device: DeviceProfile, shape: ModelShape, batch: list[Chunk]
) -> None:
    seconds = device.compute_s(shape, MIDDLE, batch, 0)
    rows = sum(chunk.rows for chunk in batch)
    assert seconds > len(MIDDLE) * shape.layer_bytes / device.memory_bytes_per_s
    assert seconds > len(MIDDLE) * 2 * shape.layer_parameters * rows / device.flops_per_s


def test_a_prefill_in_one_step_is_not_slower_than_in_two() -> None:
    device = DEVICES["rtx-4090"]
    whole_s = device.compute_s(QWEN2_7B, MIDDLE, [Chunk(1000, 0)], 0)
    halves_s = [device.compute_s(QWEN2_7B, MIDDLE, [Chunk(500, context)], 0) for context in (0, 500)]
    assert whole_s <= sum(halves_s)


def test_qwen2_7b_has_the_parameters_that_its_makers_say() -> None:
    parameters = QWEN2_7B.layers * QWEN2_7B.layer_parameters + QWEN2_7B.embed_parameters
    parameters += QWEN2_7B.head_parameters
    assert parameters == 7_615_616_512
    assert QWEN2_7B.kv_bytes_per_token == 2048
    assert QWEN2_7B.activation_bytes == 7168
    spec = QWEN2_7B.spec()
    assert spec.weight_bytes(spec.whole) == 2 * parameters
    assert spec.activation_bytes == 7168


def test_a_second_tensor_between_machines_doubles_what_travels_and_nothing_that_is_computed_or_held() -> None:
    both = replace(QWEN2_7B, tensors_per_boundary=2)
    device, chunks = DEVICES["rtx-4090"], [Chunk(100, 0)]
    assert both.spec().activation_bytes == 2 * QWEN2_7B.spec().activation_bytes
    assert both.spec().weight_bytes(Span(0, 28)) == QWEN2_7B.spec().weight_bytes(Span(0, 28))
    assert both.spec().kv_bytes(Span(0, 28), 9) == QWEN2_7B.spec().kv_bytes(Span(0, 28), 9)
    for span in (Span(0, 9), MIDDLE, Span(19, 28)):
        assert device.compute_s(both, span, chunks, 1) == device.compute_s(QWEN2_7B, span, chunks, 1)


@pytest.mark.parametrize(
    ("span", "batch", "sampled"),
    [(Span(0, 29), [Chunk(1, 0)], 0), (Span(0, 28), [], 0), (Span(0, 28), [Chunk(1, 0)], -1)],
)
def test_steps_that_cannot_be_are_refused(span: Span, batch: list[Chunk], sampled: int) -> None:
    with pytest.raises(ValueError, match="chunks"):
        DEVICES["rtx-4090"].compute_s(QWEN2_7B, span, batch, sampled)


@pytest.mark.parametrize(("rows", "context"), [(0, 0), (1, -1)])
def test_chunks_that_cannot_be_are_refused(rows: int, context: int) -> None:
    with pytest.raises(ValueError, match="at least one row"):
        Chunk(rows, context)
