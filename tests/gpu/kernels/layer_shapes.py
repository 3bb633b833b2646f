"""Fused kernels beside what they stand in for: norms, gates, rotations, products with bytes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu.kernels.kernel_shapes import poisoned
from torch import Tensor
from torch.nn import functional

from molink.shards.kernels.fused import Activation, LayerKernels, NormKind
from molink.shards.kernels.row_products import RowProduct
from molink.shards.matrices.by_bytes import ByteProduct

BARS = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Largest difference from float64, relative to the largest number of the row: two units in the last place, and three
roundings on the way."""
PRODUCT_BARS = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
"""Sums of thousands of products."""
NORM_DIMS = (64, 128, 896, 2048, 4096, 5120, 8192)
GATE_DIMS = (64, 1000, 4864, 14336)
MATRICES = ((48, 80), (256, 512), (1001, 1536), (4096, 4096), (64, 9000))
"""Rows and columns; some are no multiples of anything."""
BYTE_ROWS = (1, 2, 7, 16, 17, 40, 64)


@dataclass(frozen=True, slots=True)
class Compared:
    """One call beside its definition in float64."""

    name: str
    dtype: str
    difference: float
    bar: float

    @property
    def faults(self) -> list[str]:
        held = self.difference <= self.bar
        return (
            [] if held else [f"{self.name} in {self.dtype}: off by {self.difference:.1e}, not {self.bar:.0e}"]
        )


Case = Callable[[], Compared]


def layer_cases(kernels: LayerKernels, device: str, *, small: bool = False) -> Iterator[Case]:
    """Norms of every kind, alone and behind a sum, and gates."""
    for dtype, dim, kind, adds in itertools.product(
        BARS, NORM_DIMS[:3] if small else NORM_DIMS, NormKind, (False, True)
    ):
        yield lambda dtype=dtype, dim=dim, kind=kind, adds=adds: _norm(
            kernels, device, dtype, dim, kind, adds
        )  # type: ignore[misc]
    for dtype, dim, activation in itertools.product(BARS, GATE_DIMS[:2] if small else GATE_DIMS, Activation):
        yield lambda dtype=dtype, dim=dim, activation=activation: _gate(
            kernels, device, dtype, dim, activation
        )  # type: ignore[misc]


def byte_cases(kernel: ByteProduct, device: str, *, small: bool = False) -> Iterator[Case]:
    """Products of rows with matrices in bytes, with a bias and without."""
    shapes = MATRICES[:2] if small else MATRICES
    for dtype, shape, rows in itertools.product(PRODUCT_BARS, shapes, (1, 7, 17) if small else BYTE_ROWS):
        yield lambda dtype=dtype, shape=shape, rows=rows: _bytes(kernel, device, dtype, shape, rows)  # type: ignore[misc]


def row_cases(kernel: RowProduct, device: str, *, small: bool = False) -> Iterator[Case]:
    """Products of one row with matrices of the inputs' own dtype."""
    for dtype, shape in itertools.product(PRODUCT_BARS, MATRICES[:2] if small else MATRICES):
        yield lambda dtype=dtype, shape=shape: _row(kernel, device, dtype, shape)  # type: ignore[misc]


def _drawn(shape: tuple[int, ...], dtype: str, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, getattr(torch, dtype))


def _norm(kernels: LayerKernels, device: str, dtype: str, dim: int, kind: NormKind, adds: bool) -> Compared:
    rows = 5
    states = _drawn((1, rows, 2 * dim), dtype, device, 0)[..., :dim] * 3
    added = _drawn((1, rows, dim), dtype, device, 1) if adds else None
    weight = _drawn((dim,), dtype, device, 2)
    with poisoned():
        normed, summed = kernels.norm(states, added, weight, 1e-6, kind)
    expected_sum = states if added is None else states + added
    wide = expected_sum.double()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    expected = scaled * (1 + weight.double() if kind is NormKind.RAISED else weight.double())
    off = _off(normed, expected) if torch.equal(summed, expected_sum) else float("inf")
    return Compared(f"norm of {dim}, {kind.value}{', of a sum' if adds else ''}", dtype, off, BARS[dtype])


def _gate(kernels: LayerKernels, device: str, dtype: str, dim: int, activation: Activation) -> Compared:
    both = _drawn((1, 3, 2 * dim), dtype, device, 3) * 3
    gate, up = both.chunk(2, -1)
    with poisoned():
        gated = kernels.gate(gate, up, activation)
    wide = gate.double()
    active = (
        functional.silu(wide) if activation is Activation.SILU else functional.gelu(wide, approximate="tanh")
    )
    return Compared(f"{activation.value} of {dim}", dtype, _off(gated, active * up.double()), BARS[dtype])


def _bytes(kernel: ByteProduct, device: str, dtype: str, shape: tuple[int, int], rows: int) -> Compared:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8).to(device)
    scales = (torch.rand(shape[0], generator=generator) / 500 + 1e-4).to(device)
    bias = _drawn((shape[0],), dtype, device, 5) if rows % 2 else None
    inputs = _drawn((1, rows, shape[1]), dtype, device, 6)
    with poisoned():
        product = kernel.multiply(inputs, weight, scales, bias)
    expected = inputs.double() @ (weight.double() * scales.double()[:, None]).T
    expected = expected if bias is None else expected + bias.double()
    name = f"{rows} rows by {shape[0]} x {shape[1]} bytes"
    return Compared(name, dtype, _off(product, expected), PRODUCT_BARS[dtype])


def _row(kernel: RowProduct, device: str, dtype: str, shape: tuple[int, int]) -> Compared:
    weight, inputs = _drawn(shape, dtype, device, 7), _drawn((1, 1, shape[1]), dtype, device, 8)
    bias = _drawn((shape[0],), dtype, device, 9) if shape[0] % 2 else None
    with poisoned():
        product = kernel.multiply(inputs, weight, bias)
    expected = inputs.double() @ weight.double().T
    expected = expected if bias is None else expected + bias.double()
    return Compared(f"a row by {shape[0]} x {shape[1]}", dtype, _off(product, expected), PRODUCT_BARS[dtype])


def _off(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number of its row; NaN counts as infinite."""
    apart = (found.double() - expected).abs().amax(-1) / expected.abs().amax(-1).clamp(min=1e-30)
    return float(torch.nan_to_num(apart, nan=float("inf")).max())
