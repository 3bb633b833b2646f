"""Tensors of a step: what goes to the device before it, and what is taken of what it gives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from molink.shards.batching.partial_step import Rows
from molink.shards.device.device import Device
from molink.shards.device.transfers import Transfers
from molink.shards.model.stage import View


class StepTensors:
    """Makes a step's inputs and positions, and its logits, on one device."""

    __slots__ = ("_place", "_vocabulary_size", "transfers")

    def __init__(self, device: Device, vocabulary_size: int) -> None:
        self.transfers = Transfers(device)
        self._place = device.place
        self._vocabulary_size = vocabulary_size

    def positions(self, rows: Sequence[Rows]) -> Tensor:
        """[1, tokens] of the new tokens of each session."""
        counted = [(row.cache.length, row.count) for row in rows]
        places = [at for length, count in counted for at in range(length, length + count)]
        return self.transfers.numbers(places)[None]

    def inputs(self, ids: Sequence[int], hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Token ids [1, tokens] or hidden states [1, tokens, hidden]."""
        if hidden is None:
            return self.transfers.numbers(ids)[None]
        return self.transfers.to_device(hidden, dtype)[None]

    def wanted(self, result: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Of one row of logits for each new token, those that are wanted."""
        last = _logit_places(rows)
        return result if len(last) == len(result) else result[self.transfers.numbers(last)]

    def logits(self, tail: View, rows: Sequence[Rows], hidden: Tensor) -> Tensor:
        """Logits of the last rows of each session, as many as it wants; `hidden` is [1, tokens, hidden]."""
        last = _logit_places(rows)
        if not last:
            return torch.empty(0, self._vocabulary_size, device=self._place)
        if len(last) < hidden.shape[1]:
            hidden = hidden[:, self.transfers.numbers(last)]
        return tail.logits(hidden)


def _logit_places(rows: Sequence[Rows]) -> list[int]:
    """Which of the step's new tokens logits are wanted behind."""
    places: list[int] = []
    stop = 0
    for row in rows:
        stop += row.count
        places.extend(range(stop - row.logit_rows, stop))
    return places
