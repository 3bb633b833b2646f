"""Other ways to multiply give what torch gives up to rounding, and are taken where no bit is promised."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.devices.brief_profile import StandingClock
from support.models.circuit_runs import Circuit, engine_with, start_run, step_runs
from torch import nn
from torch.nn import functional

from molink.shards.attention.attention import BatchSlot
from molink.shards.matrices import linear, products
from molink.shards.matrices.linear import (
    divided_product,
    fastest,
    install_products,
    packed_for_onednn,
    ways_for,
    widened_product,
)
from molink.shards.matrices.products import Scratch, Timings, packed_product, time_ways, used_for

TinyModel = Callable[[str], Path]

PROMPT = (5, 9, 200, 31, 7)
NEVER = math.inf


def drawn(seed: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_gives_the_product_of_torch_up_to_rounding(
    rows: int, bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "UNPACKED_ELEMENTS", 64 * 96)
    drawn_states, drawn_weight, drawn_bias = drawn(rows, (1, rows, 96), (160, 96), (160,))
    states, weight = drawn_states.to(dtype), drawn_weight.to(dtype)
    offset = drawn_bias.to(dtype) if bias else None
    wide = None if offset is None else offset.double()
    expected = functional.linear(states.double(), weight.double(), wide)
    summands = functional.linear(states.double().abs(), weight.double().abs())
    eps = torch.finfo(dtype).eps
    rounding = 2 * eps * (expected.abs() + 5.0) + 4 * torch.finfo(torch.float32).eps * summands
    ways = ways_for(dtype, Scratch())
    assert len(ways) >= 2
    with torch.inference_mode():
        found = [product(states, weight, offset) for product in ways]
        packed = packed_for_onednn(weight)
        found += [] if packed is None else [packed_product(states, packed, offset)]
    for one in found:
        assert one.dtype is dtype
        assert bool(((one.double() - expected).abs() <= rounding).all())


def test_the_fastest_way_is_used_from_its_rows_on_and_torchs_unless_another_is_clearly_faster() -> None:
    timings = Timings((1, 4, 32), ((1.0, 0.8, NEVER), (1.0, 0.95, 2.0), (4.0, 2.0, 1.0)))
    choice = timings.choose(("torch", "second", "third"))
    assert choice == ((1, "second"), (4, "torch"), (32, "third"))
    assert [used_for(choice, rows) for rows in (1, 3, 4, 31, 32, 500)] == [
        "second", "second", "torch", "torch", "third", "third"
    ]  # fmt: skip


def test_packed_weights_pay_if_they_are_faster_than_the_best_other_way_over_all_numbers_of_rows() -> None:
    assert Timings((1, 8), ((2.0, 3.0, 1.0), (3.0, 2.0, 2.0))).pays(2)
    assert not Timings((1, 8), ((2.0, 3.0, 1.9), (3.0, 2.0, 1.9))).pays(2)
    assert not Timings((1, 8), ((2.0, 3.0, 1.0), (3.0, 2.0, 4.0))).pays(2)
    assert Timings((1,), ((2.0, 1.0, 3.0),)).without(1) == Timings((1,), ((2.0, 3.0),))


def test_ways_are_timed_and_hopeless_ones_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[str, int]] = []
    clock = StandingClock()
    monkeypatch.setattr(products, "time", clock)

    def fast(_: int, rows: torch.Tensor) -> None:
        calls.append(("fast", len(rows)))

    def slow(_: int, rows: torch.Tensor) -> None:
        calls.append(("slow", len(rows)))
        clock.pass_s(0.001)

    timings = time_ways((fast, slow), [256, 256], torch.float32)
    assert timings.rows[0] == 1
    assert {way for _, way in timings.choose(("fast", "slow"))} == {"fast"}
    assert calls.count(("slow", 1)) == 2
    assert calls.count(("fast", 1)) == 2 * products.TIMED_TURNS


def test_large_layers_get_other_products_only_where_these_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> nn.Sequential:
        large = nn.Linear(256, 256), nn.Linear(256, 256, dtype=torch.bfloat16)
        return nn.Sequential(*large, nn.Linear(8, 8), nn.Linear(256, 512, bias=False))

    for product, expected in ((divided_product, [0, 1, 3]), (functional.linear, [])):
        monkeypatch.setattr(linear, "fastest", lambda *_, product=product: (((1, product),), False))
        layers = model()
        install_products(layers, BatchSlot(None, exact=False))
        assert [at for at, layer in enumerate(layers) if "forward" in layer.__dict__] == expected


def test_packed_weights_take_the_place_of_the_others_unless_these_are_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where a stage is exact nothing is packed."""
    monkeypatch.setattr(Timings, "pays", lambda *_: True)
    for exact in (False, True):
        own, tied, embedding = nn.Linear(256, 512), nn.Linear(256, 512), nn.Embedding(512, 256)
        tied.weight = embedding.weight
        plain, (inputs,) = own.weight.detach().clone(), drawn(5, (3, 256))
        nbytes = own.weight.nbytes
        install_products(nn.Sequential(own, tied, embedding), BatchSlot(None, exact=exact))
        assert own.weight.is_mkldnn != exact
        assert not tied.weight.is_mkldnn
        assert own.weight.nbytes == nbytes
        with torch.inference_mode():
            torch.testing.assert_close(own(inputs), functional.linear(inputs, plain, own.bias))


def test_nothing_is_made_anew_for_a_product_that_the_kept_buffer_holds() -> None:
    scratch = Scratch()
    weight, rows = torch.ones(512, 256, dtype=torch.bfloat16), torch.ones(2, 256, dtype=torch.bfloat16)
    product = widened_product(scratch)
    with torch.inference_mode():
        product(rows, weight, None)
        before, address = scratch.nbytes, scratch.take((1,), torch.uint8).data_ptr()
        product(rows, weight[:64], None)
        product(rows, weight, None)
    assert scratch.nbytes == before == 512 * 256 * 4
    assert scratch.take((8, 8), torch.float32).data_ptr() == address


def test_one_session_is_bitwise_the_same_and_a_batch_takes_the_other_products(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the stage is exact; if it is not, one session takes them too."""
    taken: list[int] = []

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        taken.append(rows.shape[-2])
        return functional.linear(rows.double(), weight.double(), bias).float()

    plain = engine_with(tiny_model("llama"), (0, 6))
    monkeypatch.setattr(products, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(linear, "fastest", lambda *_: (((1, product),), False))
    other = engine_with(tiny_model("llama"), (0, 6))
    free = engine_with(tiny_model("llama"), (0, 6), exact=False)
    circuits: list[Circuit] = [[(engine, engine.held[0])] for engine in (plain, other, free)]
    runs = [[start_run(circuit, PROMPT[:count], 6) for count in (5, 3)] for circuit in circuits]
    taken.clear()  # what trial steps took
    for circuit, (first, _) in zip(circuits[:2], runs[:2], strict=True):
        step_runs(circuit, [first])
        step_runs(circuit, [first])
    assert not taken
    assert all(torch.equal(*pair) for pair in zip(runs[0][0].logits, runs[1][0].logits, strict=True))
    for circuit, together in zip(circuits[:2], runs[:2], strict=True):
        step_runs(circuit, together)
    assert set(taken) == {4, 2}
    for _ in range(2):
        step_runs(circuits[2], [runs[2][0]])
    assert set(taken) == {5, 4, 2, 1}
    step_runs(circuits[2], runs[2])
    for others in runs[1:]:
        for ours, theirs in zip(runs[0], others, strict=True):
            torch.testing.assert_close(ours.logits[-1], theirs.logits[-1], atol=2e-4, rtol=1e-3)


def test_what_is_measured_is_a_choice_for_each_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Timings((1, 8), ((1.0, 0.5, 0.1), (1.0, 2.0, 0.1)))
    monkeypatch.setattr(linear, "time_ways", lambda *_: found)
    weights = [torch.ones(256, 256)]
    choice, packs = fastest(weights, (functional.linear, divided_product), weights)
    assert (choice, packs) == (((1, divided_product), (8, functional.linear)), True)
