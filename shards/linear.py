"""Matrix products of steps that need not equal transformers' bit for bit: by oneDNN where that is faster here.

Torch's linear layers call MKL for float32 on x86 processors. For a few rows that can be slow: on a processor that is
not Intel's a product of eight rows took half again as long as oneDNN's. No rounding is promised where sessions share a
step. Where a session has the engine for itself, its products stay torch's, and its numbers those of transformers.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from molink.shards.attention import BatchSlot

LEAST_WEIGHTS = 1 << 16
"""Smaller matrices are not worth a choice: the call costs more than the product."""
TIMED_ROWS = 8
TIMED_MATRICES = 32
TIMED_TURNS = 5
WORTH = 0.9
"""oneDNN has to take at most so much of torch's time."""

Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of rows [..., in], weights [out, in] and, if there is one, a bias [out]: [..., out]."""


def onednn_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `torch.nn.functional.linear`, up to rounding. Weights are used as they lie, not packed."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")  # noqa: SLF001 - what torch's own compiler calls
    return product


def has_onednn(device: torch.device) -> bool:
    """Whether torch was built with that product, and computes there with it."""
    return (
        device.type == "cpu"
        and bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def is_faster(weights: Sequence[Tensor]) -> bool:
    """Whether oneDNN multiplies one row and TIMED_ROWS rows by all these matrices faster than torch, as measured now,
    in turns. One matrix alone would stay in the processor's cache, as it does not in a step."""
    batches = [
        torch.ones(rows, columns) for rows in (1, TIMED_ROWS) for columns in {w.shape[1] for w in weights}
    ]
    pairs = [(rows, weight) for rows in batches for weight in weights if weight.shape[1] == rows.shape[1]]
    products: tuple[Product, Product] = (onednn_product, functional.linear)
    taken_s: list[list[float]] = [[], []]
    with torch.inference_mode():
        for _ in range(TIMED_TURNS):
            for times, product in zip(taken_s, products, strict=True):
                began_s = time.perf_counter()
                for rows, weight in pairs:
                    product(rows, weight, None)
                times.append(time.perf_counter() - began_s)
    ours_s, torch_s = map(min, taken_s)
    return ours_s < WORTH * torch_s


def install_products(model: nn.Module, slot: BatchSlot) -> None:
    """Lets the model's large float32 linear layers multiply by oneDNN where that is faster, in steps that need not be
    bitwise, as `slot` says."""
    layers = [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.dtype is torch.float32
        and module.weight.numel() >= LEAST_WEIGHTS
    ]
    if not layers or not has_onednn(layers[0].weight.device):
        return
    if is_faster([layer.weight for layer in layers[:TIMED_MATRICES]]):
        for layer in layers:
            layer.__dict__["forward"] = _forward(layer.weight, layer.bias, slot)


def _forward(weight: Tensor, bias: Tensor | None, slot: BatchSlot) -> Callable[[Tensor], Tensor]:
    def forward(rows: Tensor) -> Tensor:
        return functional.linear(rows, weight, bias) if slot.bitwise else onednn_product(rows, weight, bias)

    return forward
