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

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""What architectures call such matrices."""


class JoinedProduct:
    """The product of inputs [..., columns] with several matrices one below the other. Owns what it has given, until all
    of it has been taken."""

    __slots__ = ("_bias", "_inputs", "_left", "_rows", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: Sequence[int]) -> None:
        """`weight` [sum of rows, columns], `bias` [sum of rows], and how many rows each matrix has."""
        self._weight = weight
        self._bias = bias
        self._rows = list(rows)
        self._inputs: Tensor | None = None
        self._left: dict[int, Tensor] = {}

    def take(self, place: int, inputs: Tensor) -> Tensor:
        """What the matrix in that place gives [..., rows]: a part of what has been computed, which nobody else has,
        or of what is computed now. Modules may change it in its place."""
        if self._inputs is not inputs or place not in self._left:
            product = functional.linear(inputs, self._weight, self._bias)
            self._inputs, self._left = inputs, dict(enumerate(torch.split(product, self._rows, -1)))
        result = self._left.pop(place)
        if not self._left:
            self._inputs = None
        return result


def install_joined(modules: Iterable[nn.Module], slot: BatchSlot) -> None:
    """Joins matrices of modules whose parts have those names, are plain, and are of one kind. Needs as much memory
    besides as the largest of the joined matrices, for a moment."""
    modules = list(modules)
    uses = Counter(id(parameter) for module in modules for parameter in module.parameters(recurse=False))
    for module in modules:
        for names in _TOGETHER:
            parts = [getattr(module, name, None) for name in names]
            plain = [part for part in parts if type(part) is nn.Linear and "forward" not in part.__dict__]
            if (
                len(plain) == len(names)
                and _are_alike(plain)
                and all(uses[id(one.weight)] == 1 for one in plain)
            ):
                _join(plain, slot)


def _are_alike(parts: Sequence[nn.Linear]) -> bool:
    kinds = {(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in parts}
    return len(kinds) == 1


def _join(parts: Sequence[nn.Linear], slot: BatchSlot) -> None:
    """The matrices become views of one, so that nothing is kept twice, and other steps compute as before."""
    rows = [part.out_features for part in parts]
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor | None] = [part.bias for part in parts]
    weight, known = torch.cat(weights), [bias for bias in biases if bias is not None]
    product = JoinedProduct(weight, torch.cat(known) if known else None, rows)
    for place, (part, own) in enumerate(zip(parts, torch.split(weight, rows), strict=True)):
        part.weight = nn.Parameter(own, requires_grad=False)
        part.__dict__["forward"] = _forward(part.forward, product, place, slot)


def _forward(
    own: Callable[[Tensor], Tensor], product: JoinedProduct, place: int, slot: BatchSlot
) -> Callable[[Tensor], Tensor]:
    def forward(states: Tensor) -> Tensor:
        return product.take(place, states) if slot.fuses else own(states)

    return forward
