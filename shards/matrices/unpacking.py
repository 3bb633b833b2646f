"""Packed matrices of AWQ, GPTQ and fp8 checkpoints as plain ones, each when it is read.

AWQ (Lin et al., 2023, as AutoAWQ stores it) and GPTQ (Frantar et al., 2022, as AutoGPTQ does) keep
scale * (number - zero point), with a scale and a zero point for each group of inputs and each output. Fp8 keeps a scale
for each block of the matrix (DeepSeek-V3, section 3.3).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from molink.shards.checkpoint.stored_quantization import (
    WORD_BITS,
    PackedMatrix,
    StoredQuantization,
    packed_matrices,
)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word AWQ keeps the first to the eighth of its numbers."""


class UnpackedTensor:
    """A packed matrix in the form in which transformers takes tensors that it reads when needed."""

    def __init__(self, matrix: PackedMatrix, parts: Mapping[str, Any], stored: StoredQuantization) -> None:
        self._matrix = matrix
        self._parts = parts
        self._stored = stored

    def __getitem__(self, index: Any) -> Tensor:  # noqa: ANN401 - whatever a tensor takes
        parts = {name.rpartition(".")[2]: self._parts[name][...] for name in self._matrix.parts}
        unpack = {"awq": _awq, "gptq": _gptq, "fp8": _fp8}[self._stored.method]
        weight: Tensor = unpack(parts, self._stored)[index]
        return weight

    def get_shape(self) -> list[int]:
        return list(self._matrix.shape)

    def get_dtype(self) -> str:
        return "F32"


def unpacked(tensors: Mapping[str, Any], stored: StoredQuantization) -> dict[str, Any]:
    """The tensors with packed matrices in place of their parts. `tensors` are lazy, as those of safetensors.

    Raises:
        UnsupportedStorage: a part of one is missing or has no such shape.
    """
    known = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in tensors.items()}
    matrices = packed_matrices(stored, known)
    packed = {part for matrix in matrices.values() for part in matrix.parts}
    plain = {name: part for name, part in tensors.items() if name not in packed}
    return plain | {name: UnpackedTensor(matrix, tensors, stored) for name, matrix in matrices.items()}


def _awq(parts: Mapping[str, Tensor], stored: StoredQuantization) -> Tensor:
    """qweight int32 [inputs, outputs / 8], qzeros int32 [groups, outputs / 8], scales [groups, outputs]."""
    numbers = _along_columns(parts["qweight"], 4)[:, :, list(_AWQ_PLACES)].flatten(1)
    zeros = _along_columns(parts["qzeros"], 4)[:, :, list(_AWQ_PLACES)].flatten(1)
    group = torch.arange(len(numbers)) // _group_size(stored, len(numbers))
    return ((numbers - zeros[group]) * parts["scales"].float()[group]).T.contiguous()


def _gptq(parts: Mapping[str, Tensor], stored: StoredQuantization) -> Tensor:
    """qweight int32 [inputs * bits / 32, outputs], qzeros int32 [groups, outputs * bits / 32], scales [groups,
    outputs], g_idx int32 [inputs], the group of each input."""
    numbers = _along_columns(parts["qweight"].T.contiguous(), stored.bits).flatten(1).T
    zeros = _along_columns(parts["qzeros"], stored.bits).flatten(1) + stored.zero_offset
    group = parts["g_idx"].long() if "g_idx" in parts else None
    if group is None:
        group = torch.arange(len(numbers)) // _group_size(stored, len(numbers))
    return ((numbers - zeros[group]) * parts["scales"].float()[group]).T.contiguous()


def _fp8(parts: Mapping[str, Tensor], stored: StoredQuantization) -> Tensor:
    """weight float8 [outputs, inputs], weight_scale_inv float32 [blocks, blocks], or one scale for all."""
    weight, scales = parts["weight"].float(), parts["weight_scale_inv"].float()
    if scales.numel() > 1:
        rows, columns = stored.block
        scales = scales.repeat_interleave(rows, 0)[: len(weight)]
        scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
    return weight * scales


def _along_columns(words: Tensor, bits: int) -> Tensor:
    """int32 [rows, words] as [rows, words, numbers of a word], the lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)


def _group_size(stored: StoredQuantization, inputs: int) -> int:
    return inputs if stored.group_size == -1 else stored.group_size
