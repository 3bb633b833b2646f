"""What waits until a stage serves. Packing for oneDNN takes a second for each gigabyte, and compiling a few seconds, in
which nobody would be served; meanwhile the same matrices are multiplied as they lie, and by torch."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import nn

from molink.shards.native.few_rows import FewRows
from molink.shards.native.native_way import TrustedWays, WaysTrial

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


@dataclass(frozen=True, slots=True, eq=False)
class LaterWork:
    """What makes a stage's steps faster while it serves."""

    packing: LaterPacking | None = None
    few_rows: FewRows | None = None
    ways: WaysTrial = field(default_factory=TrustedWays)
    """Bound when the compiled library is there."""
