"""Products with 8 and 4 bits, in every way that there is on this processor, are those of the matrices' definition."""

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models.circuit_runs import engine_with, greedy, start_run, step_runs
from support.pairwise import pairwise
from torch import Tensor, nn
from torch.nn.functional import linear

from molink.shards.attention.attention import BatchSlot
from molink.shards.matrices import nf4_products, products, quantized_matrices
from molink.shards.matrices.int8_products import LARGEST, BytePacking, byte_product, plain
from molink.shards.matrices.linear import install_products
from molink.shards.matrices.matrix_of_stack import MatrixOfStack
from molink.shards.matrices.nf4_products import (
    BLOCK,
    PANEL_ROWS,
    from_panels,
    kernel_takes,
    to_panels,
    unpack_into,
)
from molink.shards.matrices.products import Scratch, Timings
from molink.shards.matrices.quantize import QuantizedLinear
from molink.shards.matrices.quantized_matrices import (
    Int8Matrices,
    Nf4Matrices,
    QuantizedMatrices,
)
from molink.shards.spec import Span

TinyModel = Callable[[str], Path]

NF4_ERROR = 3e-3
"""Largest error of a product in bfloat16, relative to its length."""
DTYPES = (torch.float32, torch.bfloat16)
CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat's numbers: Dettmers et al., "QLoRA" (2023), appendix E."""


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def defined(matrices: QuantizedMatrices, index: int) -> Tensor:
    """One matrix in float64, number by number."""
    rows, columns = matrices.shape
    if isinstance(matrices, Int8Matrices):
        return matrices.weight[index].double() * matrices.scales[index].double().unsqueeze(-1)
    packed = matrices.weight[index].long()
    codes = torch.tensor(CODES, dtype=torch.float64)[torch.stack((packed >> 4, packed & 15), -1).view(-1)]
    scales = matrices.scales[index].double().repeat_interleave(BLOCK)
    return (codes * scales).view(rows, columns)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 33, 130])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [Int8Matrices, Nf4Matrices])
def test_every_way_multiplies_by_what_the_bits_mean(
    kind: type[Int8Matrices] | type[Nf4Matrices],
    dtype: torch.dtype,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a stack the matrix that is asked for, also where it is unpacked in parts."""
    monkeypatch.setattr(products, "UNPACKED_ELEMENTS", 64 * 256)
    stack, inputs = kind.of(drawn(1, 2, 160, 256).to(dtype)), drawn(rows, rows, 256).to(dtype)
    with torch.inference_mode():
        for index in range(2):
            expected = inputs.double() @ defined(stack, index).t()
            for way in stack.ways_here():
                found = way(stack, index, inputs)
                assert found.dtype is dtype
                assert apart(found, expected) < (1e-6 if dtype is torch.float32 else 4e-3)


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_in_panels_nf4_is_as_close_to_its_definition_as_is_promised(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense and of a stack, at a real width: the error of rounding activations, scales and products together. Where
    this processor has no such kernel, by the way that it has."""
    matrices, inputs = Nf4Matrices.of(drawn(2, 2, 96, 2048).bfloat16()), drawn(rows, rows, 2048).bfloat16()
    expected = [inputs.double() @ defined(matrices, index).t() for index in range(2)]
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(Timings, "pays", lambda *_: True)
    holder = nn.Module()
    holder.matrices = matrices
    install_products(holder, BatchSlot(None, exact=False))
    assert matrices.paneled == kernel_takes(96, 2048, torch.bfloat16)
    with torch.inference_mode():
        for index in range(2):
            assert apart(linear(inputs, cast("Tensor", matrices[index])), expected[index]) <= NF4_ERROR


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
def test_packed_int8_is_as_close_to_its_definition_as_rounding_its_result(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a real width, with activations of which few are a hundred times as large as the others, and with rows of
    zeros. Where this processor has no such product, by the way that it has."""
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(Timings, "pays", lambda *_: True)
    layers = [QuantizedLinear(Int8Matrices.of(drawn(seed, 128, 2048).bfloat16()), None) for seed in range(2)]
    inputs = drawn(rows, rows, 2048)
    inputs[:, ::500] *= 100
    inputs[rows - 1] *= rows == 1
    inputs = inputs.bfloat16()
    expected = [inputs.double() @ defined_int8(layer.matrix).t() for layer in layers]
    install_products(nn.Sequential(*layers), BatchSlot(None, exact=False))
    for layer, exact in zip(layers, expected, strict=True):
        assert layer.matrix.weight.is_mkldnn == BytePacking().takes(128, 2048, torch.bfloat16)
        with torch.inference_mode():
            assert apart(layer(inputs), exact) < 2e-3


def defined_int8(matrix: QuantizedMatrices) -> Tensor:
    return matrix.weight.double() * matrix.scales.double().unsqueeze(-1)


def test_a_row_of_packed_int8_does_not_depend_on_what_it_is_batched_with() -> None:
    packing = BytePacking()
    if not packing.takes(128, 256, torch.bfloat16):
        assert packing.takes(128, 250, torch.bfloat16) is False
        return
    matrices = Int8Matrices.of(drawn(8, 128, 256).bfloat16())
    packed, inputs = packing.pack(matrices.weight.data), drawn(9, 9, 256).bfloat16()
    inputs[3] *= 1000
    with torch.inference_mode():
        together = byte_product(inputs, packed, matrices.scales)
        for row, result in zip(inputs.split(1), together, strict=True):
            assert torch.equal(byte_product(row, packed, matrices.scales)[0], result)


def test_bytes_that_are_packed_one_after_the_other_come_back_and_multiply_alike() -> None:
    """The first of a shape is packed by the library, the others here."""
    packing = BytePacking()
    if not packing.takes(192, 128, torch.bfloat16):
        return
    generator = torch.Generator().manual_seed(10)
    for _ in range(3):
        weight = torch.randint(-127, 128, (192, 128), dtype=torch.int8, generator=generator)
        packed = packing.pack(weight)
        assert torch.equal(plain(packed), weight)
        rows = torch.randint(-LARGEST, LARGEST, (2, 128), generator=generator).bfloat16()
        with torch.inference_mode():
            found = byte_product(rows, packed, torch.ones(192))
        assert apart(found, rows.double() @ weight.double().t()) < 2e-3


def test_experts_are_packed_one_by_one_and_multiply_as_they_did() -> None:
    packing = BytePacking()
    if not packing.takes(128, 192, torch.bfloat16):
        return
    stack = Int8Matrices.of(drawn(11, 3, 128, 192).bfloat16())
    kept, scales = stack.weight.data.clone(), stack.scales.data
    before = stack.unpacked()
    stack.ways = quantized_matrices.QuantizedWays(
        BatchSlot(None, exact=False), Scratch(), ((1, quantized_matrices.by_kernel),), packing
    )
    stack.prepare()
    assert stack.is_stack
    assert stack.each is not None
    assert stack.weight.numel() == 0, "bytes are not kept twice"
    assert torch.equal(stack.unpacked(), before)
    rows = drawn(12, 5, 192).bfloat16()
    with torch.inference_mode():
        for expert in range(3):
            exact = rows.double() @ (kept[expert].double() * scales[expert].double()[:, None]).t()
            found = linear(rows, cast("Tensor", stack[torch.tensor(expert)]))
            assert apart(found, exact) < 2e-3
            assert torch.equal(stack.unpacked(expert), before[expert])


@given(panels=st.integers(1, 3), blocks=st.integers(1, 3), stack=st.integers(1, 2))
def test_panels_hold_the_same_numbers_and_come_back(panels: int, blocks: int, stack: int) -> None:
    rows, columns = panels * PANEL_ROWS, blocks * BLOCK
    generator = torch.Generator().manual_seed(rows * columns)
    packed = torch.randint(0, 256, (stack, rows * columns // 2), dtype=torch.uint8, generator=generator)
    for one in packed:
        plain = one.clone()
        to_panels(one, rows, columns)
        left, right = (half.view(rows, -1) for half in (plain >> 4, plain & 15))
        found = one.view(panels, columns // 2, PANEL_ROWS // 2, 2)
        for upper in range(PANEL_ROWS // 2):
            for half, numbers in ((0, left), (1, right)):
                rows_of_panels = numbers.view(panels, PANEL_ROWS, -1)
                assert torch.equal(found[:, :, upper, half] & 15, rows_of_panels[:, upper])
                assert torch.equal(found[:, :, upper, half] >> 4, rows_of_panels[:, upper + PANEL_ROWS // 2])
        from_panels(one, rows, columns)
        assert torch.equal(one, plain)


def test_a_matrix_in_panels_can_still_be_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = Nf4Matrices.of(drawn(3, 64, 128).bfloat16())
    before = matrices.unpacked()
    matrices.ways = quantized_matrices.QuantizedWays(
        BatchSlot(None, exact=False), Scratch(), ((1, quantized_matrices.by_kernel),), BytePacking()
    )
    matrices.prepare()
    assert matrices.paneled
    assert not torch.equal(matrices.weight, Nf4Matrices.of(before).weight)
    # scales are bfloat16 now
    torch.testing.assert_close(matrices.unpacked(), before, rtol=2**-7, atol=0)


def test_without_the_library_nf4_is_unpacked_by_what_stands_in_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    matrices = Nf4Matrices.of(drawn(4, 64, 128))
    expected = unpack_into(torch.empty(64, 128), matrices.weight, matrices.scales)
    monkeypatch.setattr(nf4_products, "_function", lambda _: None)
    assert not kernel_takes(64, 128, torch.bfloat16)
    assert torch.equal(unpack_into(torch.empty(64, 128), matrices.weight, matrices.scales), expected)


@pytest.mark.parametrize("kind", [Int8Matrices, Nf4Matrices])
def test_a_matrix_of_a_stack_is_multiplied_by_and_used_as_a_tensor_is(
    kind: type[Int8Matrices] | type[Nf4Matrices],
) -> None:
    stack = kind.of(drawn(5, 3, 64, 128))
    one, plain = stack[torch.tensor(1)], stack.unpacked(1)
    assert isinstance(one, MatrixOfStack)
    matrix = cast("Tensor", one)
    wide, tall = drawn(6, 4, 128), drawn(7, 4, 64)
    with torch.inference_mode():
        torch.testing.assert_close(linear(wide, matrix), linear(wide, plain))
        torch.testing.assert_close(linear(wide, matrix, torch.ones(64)), linear(wide, plain, torch.ones(64)))
        torch.testing.assert_close(linear(wide, weight=matrix), linear(wide, plain))
        torch.testing.assert_close(tall @ matrix, tall @ plain)
        torch.testing.assert_close(torch.matmul(tall, matrix), tall @ plain)
        assert torch.equal(matrix.float(), plain)
        assert torch.equal(torch.stack([matrix, matrix]), torch.stack([plain, plain]))
        assert matrix.shape == plain.shape


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_made_anew_for_a_product_that_the_kept_buffer_holds(
    quantization: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers together one buffer is kept, no larger than the largest part that was unpacked."""
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    kind = Int8Matrices if quantization == "int8" else Nf4Matrices
    layers = [QuantizedLinear(kind.of(drawn(size, size, 128).to(dtype)), None) for size in (64, 192, 128)]
    install_products(nn.Sequential(*layers), BatchSlot(None, exact=False))
    scratches = {layer.matrix.ways.scratch for layer in layers}
    assert len(scratches) == 1
    (scratch,) = scratches
    with torch.inference_mode():
        for rows in (1, 40):
            for layer in layers:
                layer(drawn(rows, rows, 128).to(dtype))
    assert scratch.nbytes <= 192 * 128 * 4


@pytest.mark.parametrize(
    ("kind", "quantization", "dtype"),
    pairwise(["llama", "mixtral", "gpt_oss"], ["int8", "nf4"], ["float32", "bfloat16"]),
)
def test_a_quantized_model_computes_the_same_in_the_ways_that_are_chosen(
    kind: str, quantization: str, dtype: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every run each pair of kind, quantization and dtype, and `full` all."""
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(products, "TIMED_ROWS", (1, 8))
    folder = tiny_model(kind)
    runs = []
    for exact in (True, False):
        engine = engine_with(folder, (0, 6), dtype=dtype, quantization=quantization, exact=exact)
        circuit = [(engine, Span(0, 6))]
        run = start_run(circuit, (5, 9, 200, 31, 7), 3)
        step_runs(circuit, [run])
        runs.append(run.logits[-1])
        assert len(greedy(circuit, (3, 4), 3)) == 3
    # in bfloat16 rounding may send a token to another expert
    assert apart(runs[1], runs[0]) < (1e-4 if dtype == "float32" else 0.1)
