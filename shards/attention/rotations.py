"""The rotation of queries and keys by their positions, left to the kernel that stores keys and values."""

import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from molink.shards.attention.attention import BatchSlot, layer_number

_ROTARY = "apply_rotary_pos_emb"
"""What architectures call the function that turns queries and keys by their positions."""


class Rotation:
    """What stands in one attention module for the architecture's function that turns queries and keys.

    In a step that fuses, they are turned where keys and values are stored, if the module hands both on as they are: a
    trial step has to show that (`ProbeBatch.rotated`).
    """

    __slots__ = ("_layer", "_own", "_slot", "hands_on")

    def __init__(self, own: Callable[..., tuple[Tensor, Tensor]], slot: BatchSlot, layer: int) -> None:
        self._own = own
        self._slot = slot
        self._layer = layer
        self.hands_on = False

    def __call__(
        self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: object, **named: object
    ) -> tuple[Tensor, Tensor]:
        batch: Any = self._slot.batch
        whole = query.shape[3] == key.shape[3] == cos.shape[-1] and not others and not named
        if self.hands_on and whole and self._slot.fuses and hasattr(batch, "rotate_when_stored"):
            batch.rotate_when_stored(query, key, cos, sin)
            return query, key
        turned = self._own(query, key, cos, sin, *others, **named)
        if whole and hasattr(batch, "rotated"):
            batch.rotated(self._layer, turned, self)
        return turned


def install_rotations(modules: Iterable[nn.Module], slot: BatchSlot) -> None:
    """Lets attention modules leave the rotation to the batch, in steps that fuse. Each keeps its architecture's own
    forward, in which one name means something else."""
    agreed: dict[Any, bool] = {}
    for module in modules:
        forward = inspect.unwrap(type(module).forward)
        own = getattr(forward, "__globals__", {}).get(_ROTARY)
        if own is None or _ROTARY not in forward.__code__.co_names or not hasattr(module, "layer_idx"):
            continue
        if own not in agreed:
            agreed[own] = _rotates(own)
        if agreed[own]:
            rotation = Rotation(own, slot, layer_number(module))
            module.__dict__["forward"] = _naming(forward, {_ROTARY: rotation}).__get__(module)


def _rotates(own: Callable[..., object]) -> bool:
    """Whether the function turns each number with the one half a vector away (Su et al., "RoFormer", 2021)."""
    generator = torch.Generator().manual_seed(0)
    query, key, cos, sin = (
        torch.randn(shape, generator=generator) for shape in ((1, 2, 3, 8),) * 2 + ((1, 3, 8),) * 2
    )
    try:
        turned = own(query, key, cos, sin)
    except Exception:  # noqa: BLE001 - it takes something else
        return False
    if not isinstance(turned, tuple) or len(turned) != 2:
        return False
    expected = [
        states * cos[:, None] + torch.cat((-states[..., 4:], states[..., :4]), -1) * sin[:, None]
        for states in (query, key)
    ]
    return all(torch.equal(one, other) for one, other in zip(turned, expected, strict=True))


def _naming(function: FunctionType, names: dict[str, object]) -> FunctionType:
    """The same function, in which these names mean something else."""
    made = FunctionType(
        function.__code__,
        function.__globals__ | names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made
