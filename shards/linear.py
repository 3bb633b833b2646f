"""Matrix products of steps that need not equal transformers' bit for bit: the fastest of several ways.

Torch's linear layers call MKL for float32 on x86 processors. For a few rows that can be slow: on a processor that is
not Intel's a product of one to eight rows took half again to three times as long as it had to. No rounding is promised
where sessions share a step. Where a session has the engine for itself, its products stay torch's, and its numbers those
of transformers.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from molink.shards.attention import BatchSlot

LEAST_WEIGHTS = 1 << 16
"""Smaller matrices are not worth a choice: the call costs more than the product."""
TIMED_ROWS = (1, 2, 4, 8, 32, 128)
"""Each of the ways is timed with so many rows; what is best for some is used up to the next number."""
TIMED_ROWS_OF_ALL = 32
"""More rows are multiplied by fewer of the matrices: they are no longer waited for."""
TIMED_BYTES = 96 * 1024 * 1024
"""Of matrices that are multiplied in turn: no processor's cache keeps them all."""
TIMED_TURNS = 4
TIMED_BUDGET_S = 1.0
"""No number of rows is begun after this long: the best way of the last one is used."""
WORTH = 0.9
"""Another way has to take at most so much of torch's time."""

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of rows [..., in], weights [out, in] and, if there is one, a bias [out]: [..., out]."""
Choice: TypeAlias = tuple[tuple[int, Product], ...]
"""From so many rows on, the product to use; in order, the first from 1."""


def onednn_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.nn.functional.linear`, up to rounding. Weights are used as they lie, not packed."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001 - what torch's own compiler calls
    return product


def divided_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.nn.functional.linear`, up to rounding: weights times rows instead of rows times weights, a part of the
    weights for each thread. Where they cannot be divided, one row counts twice, for a product with a single column is
    made in another way, which is slow."""
    flat = rows.reshape(-1, rows.shape[-1])
    parts = math.gcd(torch.get_num_threads(), len(weight))
    columns = (flat if parts > 1 or len(flat) > 1 else torch.cat((flat, flat))).t()
    divided = torch.bmm(weight.reshape(parts, -1, weight.shape[1]), columns.expand(parts, -1, -1))
    product = divided.view(len(weight), -1).t()[: len(flat)].contiguous()
    if bias is not None:
        product += bias
    return product.view(*rows.shape[:-1], -1)


def ways_on(device: torch.device) -> tuple[Product, ...]:
    """What there is to choose from beside torch's own."""
    if device.type != "cpu":
        return ()
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    has_onednn = has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return (onednn_product, divided_product) if has_onednn else (divided_product,)


def fastest(weights: Sequence[Tensor], ways: Iterable[Product]) -> Choice:
    """Which way multiplies rows by all these matrices fastest, as measured now, in turns."""
    products = (functional.linear, *ways)
    deadline_s = time.perf_counter() + TIMED_BUDGET_S
    choice: list[tuple[int, Product]] = []
    with torch.inference_mode():
        for count in TIMED_ROWS:
            if choice and time.perf_counter() > deadline_s:
                break
            share = min(1.0, TIMED_ROWS_OF_ALL / count)
            few = weights[: math.ceil(share * len(weights))]
            turns = [[_taken_s(product, few, count) for product in products] for _ in range(TIMED_TURNS)]
            least_s = [min(times) for times in zip(*turns, strict=True)]
            best = min(range(len(products)), key=least_s.__getitem__)
            choice.append((count, products[best if least_s[best] < WORTH * least_s[0] else 0]))
    return tuple(choice)


def _taken_s(product: Product, weights: Sequence[Tensor], count: int) -> float:
    inputs = {weight.shape[1]: torch.ones(count, weight.shape[1]) for weight in weights}
    began_s = time.perf_counter()
    for weight in weights:
        product(inputs[weight.shape[1]], weight, None)
    return time.perf_counter() - began_s


def install_products(model: nn.Module, slot: BatchSlot) -> None:
    """Lets the model's large float32 linear layers multiply in the fastest way in steps that need not be bitwise, as
    `slot` says."""
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.dtype is torch.float32
        and module.weight.numel() >= LEAST_WEIGHTS
    ]
    if not layers or not (ways := ways_on(layers[0].weight.device)):
        return
    timed: list[Tensor] = []
    for layer in layers:
        if sum(weight.nbytes for weight in timed) < TIMED_BYTES:
            timed.append(layer.weight)
    choice = fastest(timed, ways)
    if any(product is not functional.linear for _, product in choice):
        for layer in layers:
            layer.__dict__["forward"] = _forward(layer.weight, layer.bias, slot, choice)


def _forward(
    weight: Tensor, bias: Tensor | None, slot: BatchSlot, choice: Choice
) -> Callable[[Tensor], Tensor]:
    largest_first = choice[::-1]

    def forward(rows: Tensor) -> Tensor:
        if slot.bitwise:
            return functional.linear(rows, weight, bias)
        count = rows.numel() // rows.shape[-1]
        product = next((product for least, product in largest_first if count >= least), functional.linear)
        return product(rows, weight, bias)

    return forward
