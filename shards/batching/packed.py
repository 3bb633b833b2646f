"""One step's batch: what a model sees as its cache while it runs the packed new tokens of many sessions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from molink.shards.attention.attention import (
    AttentionRules,
    attend_parts,
    attend_sequence,
    attend_up_to_rounding,
    layer_number,
)
from molink.shards.batching.token_contexts import TokenContexts, token_contexts
from molink.shards.kv.kv_cache import SequenceCache

FEW_ROWS = 16
"""More the compiled library does not take (`few_rows.c`)."""
States = dict[int, tuple[Tensor, ...]]
"""Of each layer that keeps some."""


class StepSession:
    """Where one session's step reads and writes, for each slot."""

    __slots__ = ("_fresh", "_kept", "_past", "_past_parts", "cache", "count", "start", "states")

    def __init__(
        self, cache: SequenceCache, count: int, states: States | None = None, start: int | None = None
    ) -> None:
        """`states` are of layers that the new tokens have been through; `start` is the position of the first of these:
        where the cache ends, unless they go in parts."""
        self.cache = cache
        self.count = count
        self.start = cache.length if start is None else start
        self._fresh: list[list[Tensor]] | None = None
        self._past: list[Tensor] | None = None
        self._past_parts: list[list[Tensor]] | None = None
        self._kept = cache.states
        self.states: States = {} if states is None else states
        """What layers keep beside keys and values, [1, *shape] of each, behind the new tokens that have run."""

    @property
    def fresh(self) -> list[list[Tensor]]:
        """Of each slot the views of its new tokens."""
        if self._fresh is None:
            whole = self.cache.slots(self.start, self.count)
            parts = self.cache.parts(self.start, self.count) if whole is None else [[view] for view in whole]
            self._fresh = parts
        return self._fresh

    @property
    def past(self) -> list[Tensor] | None:
        """What it attends to, fresh tokens included; None where that lies in several runs of blocks."""
        if self._past is None and self._past_parts is None:
            self._past = self.cache.slots(0, self.start + self.count)
            if self._past is None:
                self._past_parts = self.cache.parts(0, self.start + self.count)
        return self._past

    @property
    def past_parts(self) -> list[list[Tensor]]:
        """The same of each slot by runs, where there are several."""
        return [] if self.past is not None or self._past_parts is None else self._past_parts

    def part(self, at: int) -> "StepSession":
        """The step of its new token `at` alone, after those before it."""
        return StepSession(self.cache, 1, self.states, self.start + at)

    def states_before(self, layer: int) -> tuple[Tensor, ...] | None:
        """What the layer kept behind the tokens before these; None: there were none."""
        found = self.states.get(layer)
        return found if found is not None or self._kept is None else self._kept[layer]

    def write(self, slot: int, states: Tensor) -> None:
        views = self.fresh[slot]
        if len(views) == 1:
            views[0].copy_(states)
            return
        lengths = [view.shape[2] for view in views]
        for view, part in zip(views, states.split_with_sizes(lengths, 2), strict=True):
            view.copy_(part)

    def read(self, slot: int) -> Tensor:
        """All that the slot keeps; copied where it lies in several runs."""
        past = self.past
        return torch.cat(self.past_parts[slot], 2) if past is None else past[slot]


class PackedBatch(Cache):  # type: ignore[misc] # transformers has no types
    """Stores each session's fresh keys and values in its own cache and attends session by session.

    All caches are of one span. `counts` are the new tokens of each session, packed in this order. What is
    written lies beyond each cache's length until the caches advance, so that a failed step leaves them as they
    were.
    """

    def __init__(
        self, caches: Sequence[SequenceCache], counts: Sequence[int], *, bitwise: bool = True
    ) -> None:
        """`bitwise`: whether results equal transformers' bit for bit; of one session only."""
        super().__init__(layers=[])
        self.counts = list(counts)
        self.bitwise = bitwise and len(self.counts) == 1
        self._first_layer = caches[0].span.start
        self._layouts = caches[0].layouts
        self.sessions = [StepSession(*session) for session in zip(caches, counts, strict=True)]
        self._lone = self.sessions[0] if len(self.sessions) == 1 else None
        self._are_few = sum(self.counts) <= FEW_ROWS
        self._contexts: dict[int, TokenContexts | None] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the fresh keys and values [1, heads, tokens, dim] of one layer.

        Returns what the layer attends to: of a single session all of it, of several the fresh ones untouched,
        which `attend` replaces; a layer that transforms what it gets receives all sessions' tokens one after
        the other.
        """
        slot = 2 * (layer_idx - self._first_layer)
        past = None if self._lone is None else self._lone.past
        if self._lone is not None and past is not None:
            self._lone.write(slot, key_states)
            self._lone.write(slot + 1, value_states)
            return past[slot], past[slot + 1]
        for session, keys, values in zip(
            self.sessions,
            key_states.split_with_sizes(self.counts, 2),
            value_states.split_with_sizes(self.counts, 2),
            strict=True,
        ):
            session.write(slot, keys)
            session.write(slot + 1, values)
        if self._layouts[slot // 2].expands:
            return (
                torch.cat([session.read(slot) for session in self.sessions], 2),
                torch.cat([session.read(slot + 1) for session in self.sessions], 2),
            )
        return key_states, value_states

    def contexts(self, layer: int) -> tuple[TokenContexts, int] | None:
        """Where the compiled library finds the keys and values of one layer, and writes those of the new tokens as
        `update` would: of all sessions, and in which slot the keys are. None where there are more than FEW_ROWS new
        tokens, or keys and values lie otherwise."""
        if not self._are_few:
            return None
        table, index = self.sessions[0].cache.place_of(layer)
        if table not in self._contexts:
            self._contexts[table] = token_contexts(
                [session.cache for session in self.sessions], self.counts, table
            )
        contexts = self._contexts[table]
        return None if contexts is None else (contexts, 2 * index)

    def fresh(self, layer: int) -> list[Tensor]:
        """Views [1, heads, tokens, dim] of the new tokens' keys and values in one layer."""
        slot = 2 * (layer - self._first_layer)
        return [view for session in self.sessions for at in (slot, slot + 1) for view in session.fresh[at]]

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        """Each session's queries over its own keys and values; shapes as in `attend_sequence`, tokens
        packed."""
        if self._lone is not None and self._lone.past is not None:
            attend = attend_sequence if self.bitwise else attend_up_to_rounding
            return attend(query, key, value, rules)
        index = layer_number(module) - self._first_layer
        queries = query.split_with_sizes(self.counts, 2)
        if self._layouts[index].expands:
            lengths = [session.cache.length + session.count for session in self.sessions]
            pairs = zip(key.split_with_sizes(lengths, 2), value.split_with_sizes(lengths, 2), strict=True)
            attended = [
                attend_sequence(part, *pair, rules) for part, pair in zip(queries, pairs, strict=True)
            ]
        else:
            attended = [
                attend_session(session, 2 * index, part, rules)
                for session, part in zip(self.sessions, queries, strict=True)
            ]
        return attended[0] if len(attended) == 1 else torch.cat(attended, 2)

    def commit(self) -> None:
        """The step succeeded: the new tokens count."""
        for session in self.sessions:
            if session.states:
                session.cache.write_states(session.states)
            session.cache.advance(session.count)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return query_length, 0


def attend_session(session: StepSession, slot: int, query: Tensor, rules: AttentionRules) -> Tensor:
    past = session.past
    if past is not None:
        return attend_up_to_rounding(query, past[slot], past[slot + 1], rules)
    return attend_parts(query, session.past_parts[slot], session.past_parts[slot + 1], rules)
