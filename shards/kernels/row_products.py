"""Products of one row in steps that fuse, such as every product of a session that decodes alone."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional

from molink.shards.attention.attention import BatchSlot


class RowProduct(Protocol):
    """Multiplies one row by a matrix. Neither call waits for the device."""

    def takes(self, inputs: Tensor, weight: Tensor) -> bool:
        """Whether these inputs [..., columns] are one row, and the matrix [rows, columns] is of a kind that is
        multiplied faster so than by the device's library."""
        ...

    def multiply(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`torch.nn.functional.linear` of inputs that it takes."""
        ...


@dataclass(slots=True, eq=False)
class RowProducts:
    """The products of one stage: by the kernel once there is one that agrees, by the library otherwise."""

    slot: BatchSlot
    kernel: RowProduct | None = None

    def linear(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As torch's, of the same arguments."""
        kernel = self.kernel
        if kernel is not None and self.slot.fuses and kernel.takes(inputs, weight):
            return kernel.multiply(inputs, weight, bias)
        return functional.linear(inputs, weight, bias)

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Lets plain matrices that no other forward has been given be multiplied so."""
        for module in modules:
            if self.kernel is not None and type(module) is nn.Linear and "forward" not in module.__dict__:
                module.__dict__["forward"] = self._forward_of(module)

    def _forward_of(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(states: Tensor) -> Tensor:
            return self.linear(states, module.weight, module.bias)

        return forward
