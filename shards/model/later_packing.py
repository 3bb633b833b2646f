"""Packing that waits until a stage serves: for oneDNN it takes a second for each gigabyte, in which nobody would be
served; meanwhile the same matrices are multiplied as they lie."""

import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

Pack: TypeAlias = Callable[[nn.Linear], object]


class LaterPacking:
    """The matrices of a stage that are still to be packed; those that are gone by then are passed over. Used from the
    thread that steps through them, so that none changes in the middle of a step."""

    def __init__(self) -> None:
        self._left: deque[tuple[weakref.ref[nn.Linear], Pack]] = deque()

    def __len__(self) -> int:
        return len(self._left)

    def add(self, layer: nn.Linear, pack: Pack) -> None:
        self._left.append((weakref.ref(layer), pack))

    def next(self) -> bool:
        """Packs one more; whether there was one."""
        while self._left:
            found, pack = self._left.popleft()
            layer = found()
            if layer is not None:
                pack(layer)
                return True
        return False
