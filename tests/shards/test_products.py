"""Other ways to multiply give what torch gives up to rounding, and are taken only where no bit is promised."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from circuit_runs import Circuit, engine_with, start_run, step_runs
from torch import nn
from torch.nn import functional

from molink.shards import linear
from molink.shards.attention import BatchSlot
from molink.shards.linear import divided_product, fastest, install_products, ways_on

TinyModel = Callable[[str], Path]

PROMPT = (5, 9, 200, 31, 7)


@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("bias", [True, False])
def test_every_way_gives_the_product_of_torch_up_to_rounding(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    states, weight = (torch.randn(shape, generator=generator) for shape in ((1, rows, 96), (160, 96)))
    offset = torch.randn(160, generator=generator) if bias else None
    expected = functional.linear(states, weight, offset)
    ways = ways_on(torch.device("cpu"))
    assert divided_product in ways
    with torch.inference_mode():
        for product in ways:
            torch.testing.assert_close(product(states, weight, offset), expected, atol=1e-4, rtol=1e-4)


def test_the_way_that_is_fast_for_so_many_rows_is_chosen_for_them() -> None:
    calls: list[int] = []

    def slow_from_eight(rows: torch.Tensor, weight: torch.Tensor, _: torch.Tensor | None) -> torch.Tensor:
        calls.append(len(rows))
        for _ in range(200 if len(rows) >= 8 else 0):
            torch.mm(rows, weight.t())
        return rows

    choice = fastest([torch.ones(256, 256)], [slow_from_eight])
    assert [(rows, product is slow_from_eight) for rows, product in choice] == [
        (1, True), (2, True), (4, True), (8, False), (32, False), (128, False)
    ]  # fmt: skip
    assert set(calls) == {1, 2, 4, 8, 32, 128}


def test_only_large_float32_layers_get_other_products_and_only_where_these_are_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def model() -> nn.Sequential:
        large = nn.Linear(256, 256), nn.Linear(256, 256, dtype=torch.bfloat16)
        return nn.Sequential(*large, nn.Linear(8, 8), nn.Linear(256, 512, bias=False))

    for product, expected in ((divided_product, [0, 3]), (functional.linear, [])):
        monkeypatch.setattr(linear, "fastest", lambda *_, product=product: ((1, product),))
        layers = model()
        install_products(layers, BatchSlot(None))
        assert [at for at, layer in enumerate(layers) if "forward" in layer.__dict__] == expected


def test_one_session_is_bitwise_the_same_and_a_batch_takes_the_other_products(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    products: list[int] = []

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        products.append(rows.shape[-2])
        return functional.linear(rows.double(), weight.double(), bias).float()

    plain = engine_with(tiny_model("llama"), (0, 6))
    monkeypatch.setattr(linear, "LEAST_WEIGHTS", 1)
    monkeypatch.setattr(linear, "fastest", lambda *_: ((1, product),))
    other = engine_with(tiny_model("llama"), (0, 6))
    circuits: list[Circuit] = [[(engine, engine.held[0])] for engine in (plain, other)]
    runs = [[start_run(circuit, PROMPT[:count], 6) for count in (5, 3)] for circuit in circuits]
    for circuit, (first, _) in zip(circuits, runs, strict=True):
        step_runs(circuit, [first])
        step_runs(circuit, [first])
    assert not products
    assert all(torch.equal(*pair) for pair in zip(runs[0][0].logits, runs[1][0].logits, strict=True))
    for circuit, together in zip(circuits, runs, strict=True):
        step_runs(circuit, together)
    assert set(products) == {4, 2}
    for ours, theirs in zip(*runs, strict=True):
        torch.testing.assert_close(ours.logits[-1], theirs.logits[-1], atol=2e-4, rtol=1e-3)
