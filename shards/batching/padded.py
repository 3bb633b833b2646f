"""Batches for models whose attention cannot be replaced: caches padded on the left, and the model's own masks.

Sessions with equally many new tokens run together as rows [sessions, tokens]. The model sees a two-dimensional mask
of what is padding and makes of it whatever its attention needs: a causal mask, a window, linear biases.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from molink.shards.batching.packed import PackedBatch, StepSession
from molink.shards.model.probe import ProbeBatch
from molink.shards.model.stage import View


class PaddedView(View):
    """A span ready to run with the architecture's own attention."""

    __slots__ = ()

    packs = False

    def run(self, inputs: Tensor, positions: Tensor, batch: PackedBatch) -> Tensor:  # type: ignore[override] # it needs the caches
        """As `View.run`: packed rows go in and come out, whatever they are inside."""
        self._slot.begin(batch)
        groups: dict[int, list[int]] = {}
        for session, count in enumerate(batch.counts):
            groups.setdefault(count, []).append(session)
        rows, places = (part[0].split_with_sizes(batch.counts) for part in (inputs, positions))
        results: list[Tensor | None] = [None] * len(batch.counts)
        for count, members in groups.items():
            cache = LeftPaddedCache([batch.sessions[member] for member in members], count)
            hidden = self._through(
                torch.stack([rows[member] for member in members]),
                torch.stack([places[member] for member in members]),
                cache,
                cache.mask(inputs.device),
            )
            for member, row in zip(members, hidden.unbind(0), strict=True):
                results[member] = row
        return torch.cat([row for row in results if row is not None])[None]

    def try_out(self, inputs: Tensor, positions: Tensor, probe: ProbeBatch) -> Tensor:
        return self._through(inputs, positions, probe, torch.ones_like(positions))


class LeftPaddedCache(Cache):  # type: ignore[misc] # transformers has no types
    """What a model sees as its cache: rows of sessions of any lengths, each with `count` new tokens, the shorter ones
    padded in front. Keys and values are kept in the sessions' own caches."""

    def __init__(self, sessions: Sequence[StepSession], count: int) -> None:
        super().__init__(layers=[])
        self._sessions = sessions
        self._count = count
        self._first_layer = sessions[0].cache.span.start
        self._lengths = [session.cache.length + count for session in sessions]
        self._longest = max(self._lengths)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Stores the new keys and values [sessions, heads, count, dim]; returns all [sessions, heads, longest, dim]."""
        slot = 2 * (layer_idx - self._first_layer)
        return self._extend(slot, key_states), self._extend(slot + 1, value_states)

    def _extend(self, slot: int, states: Tensor) -> Tensor:
        for session, new in zip(
            self._sessions, states.split_with_sizes([1] * len(self._sessions)), strict=True
        ):
            session.write(slot, new)
        if len(self._sessions) == 1:
            return self._sessions[0].read(slot)
        padded = states.new_zeros(len(self._sessions), states.shape[1], self._longest, states.shape[3])
        for row, session, length in zip(padded, self._sessions, self._lengths, strict=True):
            row[:, self._longest - length :] = session.read(slot)[0]
        return padded

    def mask(self, device: torch.device) -> Tensor:
        """[sessions, longest] of 1 where a token is and 0 where padding is."""
        columns = torch.arange(self._longest, device=device)[None]
        padding = self._longest - torch.tensor(self._lengths, device=device)[:, None]
        return (columns >= padding).long()

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers' signature
        return self._longest - self._count

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # noqa: ARG002 - as above
        return self._longest, 0
