"""Partial steps for layered prefill: some tokens of one or several prompts through some layers at a time.

A prompt's step takes many times as long as a decode step. Cut into fewer tokens it wastes time, for each piece reads
all weights and all keys and values before it; cut between layers as well it does not ("layered prefill", Lee et al.
2025), and decode steps of other sessions run between the pieces. Tokens of several prompts in one piece read the
weights once for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.sampling.prompt_scores import PromptScores
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.spec import ModelSpec, Span


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What one session contributes to a step."""

    cache: SequenceCache
    count: int
    """New tokens of this session in this step, at least 1."""
    token_ids: tuple[int, ...] | None
    """As many ids, where the span starts the model; None elsewhere."""
    logit_rows: int
    """Where the span ends the model: behind how many of these rows, the last ones, logits are wanted. All but the first
    of these are guesses, wherever the span ends."""
    requests: tuple[SampleRequest, ...] = ()
    """How the tokens behind these rows are chosen, for engines that choose them themselves."""
    scores: PromptScores | None = None
    """Where the span ends the model: takes the log-probabilities of the prompt's tokens; None: nobody wants them."""

    @property
    def decodes(self) -> bool:
        """Whether these are a decode step's: a token, and maybe guesses."""
        return self.scores is None and (self.count == 1 or self.count == self.logit_rows)

    @property
    def guesses(self) -> int:
        """How many of the new tokens, the last ones, may be cut off again."""
        return self.logit_rows - 1 if self.logit_rows > 1 else 0


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


def check_blocks(rows: Sequence[Rows]) -> None:
    """Raises ValueError where a session lacks blocks for its rows: what it had is elsewhere, maybe another's by now."""
    for row in rows:
        if not row.cache.has_blocks_for(row.count):
            raise ValueError(
                f"a session of {row.cache.length} tokens is without blocks for the {row.count} that are between layers"
            )


def check_inputs(spec: ModelSpec, span: Span, rows: Sequence[Rows], hidden: Tensor | None) -> list[int]:
    """The token ids, where the span starts the model; else none. Raises ValueError where rows and `hidden` do not fit
    each other."""
    tokens = sum(row.count for row in rows)
    if span.start:
        if hidden is None or hidden.shape != (tokens, spec.hidden_size):
            shape = None if hidden is None else tuple(hidden.shape)
            raise ValueError(f"span {span} takes hidden states {(tokens, spec.hidden_size)}, got {shape}")
        return []
    ids = [token for row in rows for token in row.token_ids or ()]
    if hidden is not None or len(ids) != tokens:
        raise ValueError(f"span {span} starts the model: it takes {tokens} token ids and no hidden states")
    if min(ids) < 0 or max(ids) >= spec.vocabulary_size:
        raise ValueError(f"token ids must be in [0, {spec.vocabulary_size})")
    return ids


@dataclass(slots=True, eq=False, weakref_slot=True)
class PartialStep:
    """A partial step: the rows of one session, of which some have been computed. Made by `Engine.begin_partial`."""

    span: Span
    row: Rows
    inputs: Tensor
    """Token ids [1, count] or hidden states [1, count, hidden_size]."""
    results: list[Tensor] = field(default_factory=list)
    """[1, tokens, hidden_size] of each group of tokens that is through, in order; none where the span ends the model,
    for only the last row is read there."""
    computed_tokens: int = 0
    under_way: bool = False
    """Whether some of its tokens are between layers."""

    @property
    def left_tokens(self) -> int:
        """Those that are not through, or on their way."""
        return self.row.count - self.computed_tokens


@dataclass(slots=True, eq=False, weakref_slot=True)
class SliceBatch:
    """A batch of tokens of partial steps on their way through a span together. Made by `Engine.gather_slice`."""

    steps: tuple[PartialStep, ...]
    tokens: tuple[int, ...]
    """The next ones of each step."""
    positions: Tensor
    """[1, tokens of all]"""
    hidden: Tensor
    """What goes into the next layer: [1, tokens of all, hidden_size]; before layer 0 token ids [1, tokens of all]."""
    layer: int
    """The next one."""

    def finishing(self, hidden: Tensor) -> list[tuple[PartialStep, Tensor]]:
        """The steps that have no tokens left behind this piece, with what has come of these out of the last layer."""
        parts = zip(self.steps, self.tokens, hidden.split_with_sizes(self.tokens, 1), strict=True)
        return [(step, part) for step, count, part in parts if step.left_tokens == count]

    def complete(self, hidden: Tensor, *, kept: bool) -> None:
        """The tokens are through: they count, and what has come of them is `kept` for the step's result."""
        self.layer = self.steps[0].span.stop
        parts = zip(self.steps, self.tokens, hidden.split_with_sizes(self.tokens, 1), strict=True)
        for step, count, part in parts:
            step.computed_tokens += count
            step.under_way = False
            if kept:
                step.results.append(part)

    def of(self, kept: Sequence[int]) -> "SliceBatch":
        """The same of some of the steps, by their places."""
        hidden, positions = (part.split_with_sizes(self.tokens, 1) for part in (self.hidden, self.positions))
        return SliceBatch(
            tuple(self.steps[one] for one in kept),
            tuple(self.tokens[one] for one in kept),
            torch.cat([positions[one] for one in kept], 1),
            torch.cat([hidden[one] for one in kept], 1),
            self.layer,
        )


def join_slice_batches(pieces: Sequence[SliceBatch]) -> SliceBatch:
    """The same tokens in one piece. All are before the same layer of one span."""
    if len(pieces) == 1:
        return pieces[0]
    return SliceBatch(
        tuple(step for slice_ in pieces for step in slice_.steps),
        tuple(count for slice_ in pieces for count in slice_.tokens),
        torch.cat([slice_.positions for slice_ in pieces], 1),
        torch.cat([slice_.hidden for slice_ in pieces], 1),
        pieces[0].layer,
    )


def next_rows(steps: Sequence[PartialStep], tokens: Sequence[int]) -> list[Rows]:
    """Those of the next so many tokens of each step. Raises ValueError where there are not so many, or they cannot be
    the rows of one step."""
    rows = []
    for step, count in zip(steps, tokens, strict=True):
        if not 1 <= count <= step.left_tokens:
            raise ValueError(f"a piece cannot have {count} tokens of a step: {step.left_tokens} are left")
        rows.append(replace(step.row, count=count))
    check_rows(steps[0].span, rows)
    return rows


def next_slice_batch(steps: Sequence[PartialStep], tokens: Sequence[int], positions: Tensor) -> SliceBatch:
    """The next so many tokens of each step, before their first layer. They are under way from now on."""
    parts = []
    for step, count in zip(steps, tokens, strict=True):
        step.under_way = True
        parts.append(step.inputs[:, step.computed_tokens : step.computed_tokens + count])
    inputs = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return SliceBatch(tuple(steps), tuple(tokens), positions, inputs, steps[0].span.start)
