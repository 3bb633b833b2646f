"""Batches for models whose layers keep states: sessions with equally many new tokens run as rows beside each other.

Layers with a state mix a session's tokens with each other, so sessions cannot follow one another in one row as they do
in packed batches. Each row reads and writes its own session's keys and values where they lie, and a copy of its states;
these count only when the step has succeeded.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DummyLayer, LinearAttentionLayer

from molink.shards.attention.attention import AttentionRules, attend_sequence, layer_number
from molink.shards.batching.packed import PackedBatch, StepSession, attend_session
from molink.shards.kv.session_state import filled_layer, states_in
from molink.shards.model.stage import View
from molink.shards.spec import Span


class RowsView(View):
    """A span ready to run with rows of sessions."""

    __slots__ = ()

    packs = False

    def run(self, inputs: Tensor, positions: Tensor, batch: PackedBatch) -> Tensor:  # type: ignore[override] # it needs the caches
        """As `View.run`: packed rows go in and come out, whatever they are inside."""
        results: list[Tensor | None] = [None] * len(batch.counts)
        rows, places = (part[0].split_with_sizes(batch.counts) for part in (inputs, positions))
        for members in self._groups(batch):
            sessions = [batch.sessions[member] for member in members]
            hidden = self._run_rows(
                torch.stack([rows[member] for member in members]),
                torch.stack([places[member] for member in members]),
                RowsCache(sessions, self.span, bitwise=batch.bitwise),
            )
            for member, row in zip(members, hidden.unbind(0), strict=True):
                results[member] = row
        return torch.cat([row for row in results if row is not None])[None]

    def _groups(self, batch: PackedBatch) -> list[list[int]]:
        """Which sessions run together: those with equally many new tokens, old ones and new ones apart."""
        groups: dict[tuple[int, bool], list[int]] = {}
        for member, session in enumerate(batch.sessions):
            groups.setdefault((session.count, session.cache.length == 0), []).append(member)
        return list(groups.values())

    def _run_rows(self, inputs: Tensor, positions: Tensor, cache: "RowsCache") -> Tensor:
        """[sessions, count] token ids or [sessions, count, hidden] to hidden states."""
        hidden = self._attended(inputs, positions, cache)
        cache.keep_states()
        return hidden


class SerialRowsView(RowsView):
    """For models that continue from a state only one token at a time; the first tokens of all go together."""

    __slots__ = ()

    def _run_rows(self, inputs: Tensor, positions: Tensor, cache: "RowsCache") -> Tensor:
        if cache.begins or inputs.shape[1] == 1:
            return super()._run_rows(inputs, positions, cache)
        hidden = []
        for at in range(inputs.shape[1]):
            now = slice(at, at + 1)
            hidden.append(super()._run_rows(inputs[:, now], positions[:, now], cache.part(at)))
        return torch.cat(hidden, 1)


class LoneView(RowsView):
    """For models whose attention cannot be replaced, or masks what it pleases: each session by itself."""

    __slots__ = ()

    def _groups(self, batch: PackedBatch) -> list[list[int]]:
        return [[member] for member in range(len(batch.sessions))]


class RowsCache(Cache):  # type: ignore[misc] # transformers has no types
    """What a model sees as its cache: rows of sessions, each with as many new tokens."""

    def __init__(self, sessions: Sequence[StepSession], span: Span, *, bitwise: bool) -> None:
        """`span` are the layers that run, of those that the sessions' caches are of."""
        first = sessions[0]
        self.bitwise = bitwise
        self._running = span
        self._sessions = sessions
        self._span = first.cache.span
        self._layouts = first.cache.layouts
        self._lengths = [session.start + session.count for session in sessions]
        layers = [DummyLayer() for _ in range(span.start)]
        super().__init__(layers=[*layers, *map(self._state_layer, span)])

    @property
    def begins(self) -> bool:
        """Whether the new tokens are the sessions' first."""
        return self._sessions[0].start == 0

    def part(self, at: int) -> "RowsCache":
        """For the sessions' new token `at` alone, after those before it."""
        return RowsCache(
            [session.part(at) for session in self._sessions], self._running, bitwise=self.bitwise
        )

    def _state_layer(self, layer: int) -> LinearAttentionLayer | DummyLayer:
        layouts = self._layouts[layer - self._span.start].states
        if not layouts:
            return DummyLayer()
        kept = [session.states_before(layer) for session in self._sessions]
        if kept[0] is None:
            return filled_layer(layouts, None)
        columns = zip(*(states for states in kept if states is not None), strict=True)
        return filled_layer(layouts, [torch.cat(column) for column in columns])

    def keep_states(self) -> None:
        """The model has run: its states are those behind the step, once it counts.

        Raises ValueError where a layer keeps something else than it did when the span was tried out.
        """
        for layer in self._running:
            layouts = self._layouts[layer - self._span.start].states
            if layouts:
                stacked = states_in(self.layers[layer], layouts)
                for row, session in enumerate(self._sessions):
                    session.states[layer] = tuple(state[row : row + 1] for state in stacked)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values [sessions, heads, count, dim] of one layer.

        Returns what the layer attends to: of a single session all of it; of several the new ones untouched, which
        `attend` replaces, or, where the layer transforms what it gets, all of each, padded behind the shorter ones.
        """
        slot = 2 * (layer_idx - self._span.start)
        for session, keys, values in zip(
            self._sessions, self._rows(key_states), self._rows(value_states), strict=True
        ):
            session.write(slot, keys)
            session.write(slot + 1, values)
        if len(self._sessions) == 1:
            return self._sessions[0].read(slot), self._sessions[0].read(slot + 1)
        if self._layouts[slot // 2].expands:
            return self._padded(slot, key_states), self._padded(slot + 1, value_states)
        return key_states, value_states

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """As `update`, for the keys [1, count, dim] by which a layer chooses what to attend to; returns all."""
        (session,) = self._sessions
        slot = session.cache.index_slot(layer_idx)
        session.write(slot, indexer_key_states[:, None])
        return session.read(slot)[:, 0]

    def _rows(self, states: Tensor) -> tuple[Tensor, ...]:
        return states.split_with_sizes([1] * len(self._sessions))

    def _padded(self, slot: int, like: Tensor) -> Tensor:
        padded = like.new_zeros(len(self._sessions), like.shape[1], max(self._lengths), like.shape[3])
        for row, session, length in zip(padded, self._sessions, self._lengths, strict=True):
            row[:, :length] = session.read(slot)[0]
        return padded

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, rules: AttentionRules
    ) -> Tensor:
        """Each session's queries [sessions, heads, count, dim] over its own keys and values."""
        if len(self._sessions) == 1:
            return attend_sequence(query, key, value, rules)
        index = layer_number(module) - self._span.start
        if self._layouts[index].expands:
            attended = [
                attend_sequence(row, keys[:, :, :length], values[:, :, :length], rules)
                for row, keys, values, length in zip(
                    self._rows(query), self._rows(key), self._rows(value), self._lengths, strict=True
                )
            ]
        else:
            attended = [
                attend_session(session, 2 * index, row, rules)
                for session, row in zip(self._sessions, self._rows(query), strict=True)
            ]
        return torch.cat(attended)

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return max(self._lengths) - self._sessions[0].count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return max(self._lengths), 0
