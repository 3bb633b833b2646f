"""Tensors of a checkpoint under other names: read once, and handed out in pieces."""

import threading
from collections.abc import Mapping

import torch
from torch.nn import functional

from molink.shards.checkpoint.conversions import Conversion, SourceRows
from molink.shards.checkpoint.verification import StoredPart


def converted_tensors(
    stored: Mapping[str, StoredPart], conversion: Conversion
) -> dict[str, "ConvertedTensor"]:
    """What becomes of the tensors of a checkpoint, by their new names. Nothing is read yet."""
    found: dict[str, ConvertedTensor] = {}
    for name, tensor in stored.items():
        pieces = conversion.pieces(name)
        source = _KeptTensor(tensor, len(pieces))
        found.update((piece.name, ConvertedTensor(source, piece)) for piece in pieces)
    return found


class _KeptTensor:
    """A stored tensor, kept from when its first piece is read until the last has been. Pieces may be read by several
    threads."""

    def __init__(self, tensor: StoredPart, pieces: int) -> None:
        self.tensor = tensor
        self._left = pieces
        self._whole: torch.Tensor | None = None
        self._lock = threading.Lock()

    def read(self) -> torch.Tensor:
        with self._lock:
            whole = self.tensor[...] if self._whole is None else self._whole
            self._left -= 1
            self._whole = whole if self._left > 0 else None
            return whole


class ConvertedTensor:
    """A piece in the form in which transformers takes tensors that it reads when needed."""

    def __init__(self, source: _KeptTensor, piece: SourceRows) -> None:
        self._source = source
        self._piece = piece

    def __getitem__(self, index: object) -> torch.Tensor:
        whole = self._source.read()
        if self._piece.step == "zero row":
            made = torch.zeros_like(whole[:1])
        elif self._piece.step == "doubled":
            made = whole * 2
        elif self._piece.step == "unit rows":
            made = functional.normalize(whole.float())
        else:
            # a copy, so that the rest is freed
            made = whole if self._piece.rows is None else whole[slice(*self._piece.rows)].clone()
        return made[index]  # type: ignore[index] # a slice or an ellipsis

    def get_shape(self) -> list[int]:
        rows, *others = self._source.tensor.get_shape()
        if self._piece.step == "zero row":
            rows = 1
        elif self._piece.rows is not None:
            start, stop = self._piece.rows
            rows = max(0, min(stop, rows) - start)
        return [rows, *others]

    def get_dtype(self) -> str:
        return self._source.tensor.get_dtype()
