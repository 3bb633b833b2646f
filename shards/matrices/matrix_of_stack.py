"""One matrix of a stack of quantized ones, such as an expert's."""

from collections.abc import Callable, Mapping
from types import EllipsisType
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

Index: TypeAlias = int | Tensor | EllipsisType


class Stack(Protocol):
    """What `MatrixOfStack` needs of `quantized_matrices.QuantizedMatrices`."""

    def multiply(self, inputs: Tensor, bias: Tensor | None, index: Index = ...) -> Tensor: ...

    def in_scratch(self, index: Index) -> Tensor: ...

    def unpacked(self, index: Index = ...) -> Tensor: ...


class MatrixOfStack:
    """One matrix of a stack, as models multiply by it; whatever else they do with it unpacks it."""

    __slots__ = ("index", "stack")

    def __init__(self, stack: Stack, index: Index) -> None:
        self.stack = stack
        self.index = index

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        _types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what any of torch's functions returns
        named = dict(kwargs or {})
        if function is nn.functional.linear and isinstance(args[-1], cls) and len(args) == 2 and not named:
            inputs, matrix = args
            return matrix.stack.multiply(inputs, None, matrix.index)
        if function in _PRODUCTS and isinstance(args[-1], cls) and isinstance(args[0], Tensor) and not named:
            inputs, matrix = args
            return inputs @ matrix.stack.in_scratch(matrix.index)
        plain = (cls._plain(one) for one in args)
        return function(*plain, **{name: cls._plain(one) for name, one in named.items()})

    @classmethod
    def _plain(cls, argument: Any) -> Any:  # noqa: ANN401 - of any of torch's functions
        if isinstance(argument, list | tuple):
            return [cls._plain(one) for one in argument]
        return argument.unpacked() if isinstance(argument, cls) else argument

    def unpacked(self) -> Tensor:
        """[rows, columns] in the compute dtype, in memory of its own."""
        return self.stack.unpacked(self.index)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a tensor has
        return getattr(self.unpacked(), name)


_PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
