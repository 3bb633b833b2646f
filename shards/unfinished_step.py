"""Part of a prompt that is computed piece by piece: so many of its tokens through so many layers at a time.

A prompt's step takes many times as long as a decode step. Cut into fewer tokens it wastes time, for each piece reads
all weights and all keys and values before it; cut between layers as well it does not ("layered prefill", Lee et al.
2025), and decode steps of other sessions run between the pieces.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from molink.shards.kv_cache import SequenceCache
from molink.shards.packed import PackedBatch
from molink.shards.sampling import SampleRequest
from molink.shards.spec import Span


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What one session contributes to a step."""

    cache: SequenceCache
    count: int
    """New tokens of this session in this step, at least 1."""
    token_ids: tuple[int, ...] | None
    """As many ids, where the span starts the model; None elsewhere."""
    want_logits: bool
    """Where the span ends the model: whether logits follow the last of these rows."""
    request: SampleRequest | None = None
    """How the token after the last of these rows is chosen, for engines that choose it themselves."""


def check_rows(span: Span, rows: Sequence[Rows]) -> None:
    """Raises ValueError where these cannot be the rows of one step on the span."""
    if not rows:
        raise ValueError("a step needs the rows of at least one session")
    if len({id(row.cache) for row in rows}) != len(rows):
        raise ValueError("a session may be in a step only once: one of the caches is there twice")
    for row in rows:
        if row.cache.span != span:
            raise ValueError(f"the cache of a session on {row.cache.span} cannot be used for span {span}")
        if row.count < 1:
            raise ValueError(f"a session contributes at least one token to a step, got {row.count}")
        if row.cache.tables[0].released:
            raise ValueError("a session that has ended cannot be in a step")


@dataclass(slots=True, eq=False)
class Piece:
    """Tokens that follow each other, on their way through the span."""

    batch: PackedBatch
    positions: Tensor
    """[1, tokens]"""
    hidden: Tensor
    """What goes into the next layer: [1, tokens, hidden_size], or token ids [1, tokens] before the first."""
    layer: int
    """The next one."""
    tokens: int


@dataclass(slots=True, eq=False, weakref_slot=True)
class UnfinishedStep:
    """The rows of one session, of which some have been computed. Made by `Engine.begin`."""

    span: Span
    row: Rows
    inputs: Tensor
    """Token ids [1, count] or hidden states [1, count, hidden_size]."""
    results: list[Tensor] = field(default_factory=list)
    """[1, tokens, hidden_size] of each group of tokens that is through, in order."""
    computed_tokens: int = 0
    piece: Piece | None = None

    @property
    def left_tokens(self) -> int:
        """Those that are not through, or on their way."""
        return self.row.count - self.computed_tokens
