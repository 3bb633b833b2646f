"""Which operations hold up the host until the device has computed something: they cannot be part of a recording."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_BY_MASK = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
"""They look for what a mask selects, and only then."""
_COPIES = frozenset({"aten::_to_copy", "aten::copy_"})
_GROUPED = "aten::_grouped_mm"
_BY_GROUP = frozenset({"transformers::grouped_mm_fallback"})
"""They ask how many rows each group has."""
_GROUPED_MAJORS = (9, 10)
"""Compute capabilities for which torch has a grouped product; for others it asks each group's size."""


class WaitsForDevice(RuntimeError):
    """A step reads on the host what the device computes."""

    def __init__(self, operation: str) -> None:
        super().__init__(f"{operation} waits for the device")


class RefusesWaits(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Raises WaitsForDevice in the place of each such operation of this thread, before it runs. Kernels that torch does
    not launch are not seen."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's type has no public name
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as above
        if _waits(func, args, kwargs or {}):
            raise WaitsForDevice(str(func))
        with self:  # without gradients an operation that is made of others comes as one
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def _waits(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ANN401 - as above
    name = func.name().partition(".")[0]
    if name in _BY_MASK:
        indices = args[1] if len(args) > 1 else kwargs.get("indices", ())
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name in _COPIES:
        return _leaves_the_device(name, args, kwargs)
    if name == _GROUPED:
        return any(lacks_grouped_products(one) for one in args if isinstance(one, Tensor))
    tags = func.tags
    return (
        name in _BY_GROUP or torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    )


def _leaves_the_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a copy is between the host and the device, in either direction."""
    if name == "aten::copy_":
        return bool(args[0].is_cpu != args[1].is_cpu)
    target = kwargs.get("device")
    return target is not None and (torch.device(target).type == "cpu") != args[0].is_cpu


def lacks_grouped_products(matrix: Tensor) -> bool:
    """Whether products by group with this matrix wait, since its card has no kernel for them."""
    if not matrix.is_cuda:
        return False
    if matrix.dtype is not torch.bfloat16 or torch.version.hip is not None or sys.platform == "win32":
        return True
    return torch.cuda.get_device_capability(matrix.device)[0] not in _GROUPED_MAJORS


def refusing_waits(step: Callable[[], Tensor]) -> Tensor:
    """The result of `step`. Raises WaitsForDevice where a part of it would hold up the host, and what it raises."""
    with RefusesWaits():  # type: ignore[no-untyped-call] # as above
        return step()
