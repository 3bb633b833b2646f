"""Block tables: where one session's keys and values are, in layers that forget alike."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from molink.shards.kv.extents import Block, BlockKind, Extent
from molink.shards.spec import KV_BLOCK_TOKENS

Run = tuple[Extent[Any], int, int]
"""An extent, the first of its blocks, and how many."""


@dataclass(slots=True, eq=False)
class Runs:
    """Where a table's blocks lay when so many had moved."""

    moves: int
    each: list[Run]
    places: Tensor | None = None
    """Of `KvPool.places`, once asked for."""


@dataclass(slots=True, eq=False)
class BlockTable:
    """Where one session's keys and values are, in layers that forget alike."""

    kind: BlockKind
    window: int | None
    most: int
    """Blocks that it holds at most, unless a step has more than MAX_STEP_TOKENS new tokens."""
    blocks: list[Block] = field(default_factory=list)
    first: int = 0
    """How many blocks were passed by the window and are not there any more."""
    runs: Runs | None = None
    """None when blocks came or went since."""
    held: bool = False
    """Whether a step that has begun will use it, so that its blocks stay even if its session ends."""
    released: bool = False
    """Whether its session has ended and its blocks are free."""

    def kept_from(self, length: int) -> int:
        """The first block that the token at position `length`, or a later one, sees."""
        return 0 if self.window is None else max(0, length - self.window + 1) // KV_BLOCK_TOKENS

    @property
    def least_length(self) -> int:
        """A sequence of so many tokens, or more, sees nothing of what is not there any more."""
        return 0 if self.window is None or not self.first else self.first * KV_BLOCK_TOKENS + self.window - 1

    @property
    def end(self) -> int:
        """The block of the sequence behind its last one."""
        return self.first + len(self.blocks)

    def from_block(self, index: int) -> list[Block]:
        """The blocks of the tokens from that block of the sequence on."""
        return self.blocks[max(0, index - self.first) :]
