"""Matrices of one module that take the same inputs, multiplied as one, in steps that fuse.

A decode step reads every matrix once and is over as soon as that is done. Small ones, such as those of keys and values
where heads are grouped, do not keep a large GPU's memory busy, and each is a launch. The architecture's own forward
still calls one module after the other: the first computes what all of them give, and each takes its part.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from molink.shards.attention.attention import BatchSlot
from molink.shards.matrices.quantize import QuantizedLinear
from molink.shards.matrices.quantized_matrices import Int8Matrices

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What architectures call such matrices."""


class JoinedProduct:
    """The product of inputs [..., columns] with several matrices one below the other. Owns what it has given, until all
    of it has been taken."""

    __slots__ = ("_inputs", "_left", "_multiply", "_rows")

    def __init__(self, multiply: Callable[[Tensor], Tensor], rows: Sequence[int]) -> None:
        """`multiply` gives [..., sum of rows], of which each matrix has so many."""
        self._multiply = multiply
        self._rows = list(rows)
        self._inputs: Tensor | None = None
        self._left: dict[int, Tensor] = {}

    def take(self, place: int, inputs: Tensor) -> Tensor:
        """What the matrix in that place gives [..., rows]: a part of what has been computed, which nobody else has,
        or of what is computed now. Modules may change it in its place."""
        if self._inputs is not inputs or place not in self._left:
            self._left = dict(enumerate(torch.split(self._multiply(inputs), self._rows, -1)))
            self._inputs = inputs
        result = self._left.pop(place)
        if not self._left:
            self._inputs = None
        return result


Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of inputs, a matrix, and a bias, as torch's."""


def install_joined(
    model: nn.Module, slot: BatchSlot, linear: Linear = functional.linear
) -> list[Int8Matrices]:
    """Joins matrices of modules whose parts have those names, and are of one kind: numbers as they are, or bytes.
    Returns those of bytes, which no module has. Needs as much memory besides as the largest of the joined matrices, for
    a moment, and leaves none of it to the allocator: what was there before is of other sizes."""
    modules, bytes_ = list(model.modules()), list[Int8Matrices]()
    uses = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    for module in modules:
        for names in _TOGETHER:
            parts = [part for name, part in module.named_children() if name in names]
            plain = [part for part in parts if type(part) is nn.Linear]
            quantized = [part for part in parts if isinstance(part, QuantizedLinear)]
            known = (*plain, *quantized)
            if any("forward" in part.__dict__ or uses[id(part.weight)] > 1 for part in known):
                continue
            if len(plain) == len(names):
                _join(plain, slot, linear)
            elif len(quantized) == len(names):
                bytes_ += _join_bytes(quantized, slot)
    if any(parameter.is_cuda for parameter in model.parameters()):
        torch.cuda.empty_cache()
    return bytes_


def _join(parts: Sequence[nn.Linear], slot: BatchSlot, linear: Linear) -> None:
    """The matrices become views of one, so that nothing is kept twice, and other steps compute as before."""
    kinds = {(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts}
    if len(kinds) > 1:
        return
    rows = [part.out_features for part in parts]
    weight, bias = torch.cat(_tensors(parts, "weight")), _joined_bias(parts)
    for part, own in zip(parts, torch.split(weight, rows), strict=True):
        part.weight = nn.Parameter(own, requires_grad=False)
    _install(parts, JoinedProduct(lambda inputs: linear(inputs, weight, bias), rows), slot)


def _join_bytes(parts: Sequence[QuantizedLinear], slot: BatchSlot) -> list[Int8Matrices]:
    """The same of matrices of one byte for each number; where they were joined, what they are now."""
    matrices = [part.matrix for part in parts]
    alike = {
        (one.shape[1], one.dtype, one.weight.device, part.bias is None)
        for one, part in zip(matrices, parts, strict=True)
    }
    whole = all(type(one) is Int8Matrices and not one.is_stack for one in matrices)
    if len(alike) > 1 or not whole or not all(part.is_whole for part in parts):
        return []
    rows, first = [one.shape[0] for one in matrices], matrices[0]
    weight, scales = (torch.cat(_tensors(matrices, name)) for name in ("weight", "scales"))
    joined = Int8Matrices(weight, scales, (sum(rows), first.shape[1]), first.dtype)
    for one, own, worth in zip(matrices, torch.split(weight, rows), torch.split(scales, rows), strict=True):
        one.weight = nn.Parameter(own, requires_grad=False)
        one.scales = nn.Parameter(worth, requires_grad=False)
    bias = _joined_bias(parts)
    _install(parts, JoinedProduct(lambda inputs: joined.multiply(inputs, bias), rows), slot)
    return [joined]


def _tensors(modules: Iterable[nn.Module], name: str) -> list[Tensor]:
    return [getattr(module, name) for module in modules]


def _joined_bias(parts: Sequence[nn.Module]) -> Tensor | None:
    return None if parts[0].bias is None else torch.cat(_tensors(parts, "bias"))  # type: ignore[redundant-expr] # torch says it is never None


def _install(parts: Sequence[nn.Module], product: JoinedProduct, slot: BatchSlot) -> None:
    for place, part in enumerate(parts):
        part.__dict__["forward"] = _forward(part.forward, product, place, slot)


def _forward(
    own: Callable[[Tensor], Tensor], product: JoinedProduct, place: int, slot: BatchSlot
) -> Callable[[Tensor], Tensor]:
    def forward(states: Tensor) -> Tensor:
        return product.take(place, states) if slot.fuses else own(states)

    return forward
