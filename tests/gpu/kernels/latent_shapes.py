"""Attention to latents beside its definition in float64."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpu.kernels.kernel_shapes import poisoned
from gpu.kernels.layer_shapes import Case, Compared
from torch import Tensor

from molink.shards.paged_attention.paged import BlockAddresses, PagedLatentAttention
from molink.shards.spec import KV_BLOCK_TOKENS

BARS = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""As `kernel_shapes.TOLERANCES`."""
_SLOTS = 3
_SLOT = 1
"""Of the three that the memory has; the others must stay as they are."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """One call for rows of these lengths; a row of length 0 is nobody's."""

    rank: int
    dim: int
    heads: int
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        rows = f"{len(self.lengths)} rows of up to {max(self.lengths)}"
        return f"latents of {self.rank} and {self.dim}, {self.heads} heads, {rows}"


def latent_cases(
    attention: PagedLatentAttention, device: str, longest: int, dtypes: tuple[str, ...]
) -> Iterator[Case]:
    """Ranks and heads of DeepSeek's models and smaller ones, rows alone, many, and one long row among short ones."""
    ragged = (1, 15, 0, 16, 17, 65)
    for dtype, (rank, dim, heads) in itertools.product(dtypes, ((512, 64, 16), (512, 64, 20), (48, 8, 4))):
        for lengths in (ragged, (longest,), (7, longest, 33, 1)):
            shape = LatentShape(rank, dim, heads, lengths)
            yield lambda shape=shape, dtype=dtype: _compared(attention, shape, dtype, device)  # type: ignore[misc]


def _compared(attention: PagedLatentAttention, shape: LatentShape, dtype: str, device: str) -> Compared:
    """One step's `store` and `attend`, in memory that is NaN wherever no row may look."""
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)

    def drawn(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, kind)

    rows = len(shape.lengths)
    blocks = [-(-length // KV_BLOCK_TOKENS) for length in shape.lengths]
    tokens = (sum(blocks) + 2) * KV_BLOCK_TOKENS
    memory = [
        torch.full((_SLOTS, tokens, size), float("nan"), dtype=kind, device=device)
        for size in (shape.rank, shape.dim)
    ]
    order = torch.randperm(sum(blocks) + 2, generator=generator).tolist()
    table = torch.zeros(rows, 4 * max(1, *blocks), dtype=torch.long)
    fresh = [drawn(1, 1, rows, shape.rank), drawn(1, 1, rows, shape.dim)]
    seen = [[drawn(length, shape.rank), drawn(length, shape.dim)] for length in shape.lengths]
    expected_memory = [part.clone() for part in memory]
    for row, (count, length) in enumerate(zip(blocks, shape.lengths, strict=True)):
        for index in range(count):
            place = order.pop() * KV_BLOCK_TOKENS
            here = slice(index * KV_BLOCK_TOKENS, min(length, (index + 1) * KV_BLOCK_TOKENS))
            for part in (0, 1):
                seen[row][part][-1] = fresh[part][0, 0, row]
                buffer, states = memory[part], seen[row][part]
                buffer[_SLOT, place : place + here.stop - here.start] = states[here]
                expected_memory[part][_SLOT, place : place + here.stop - here.start] = states[here]
                if here.stop == length:
                    buffer[_SLOT, place + here.stop - here.start - 1] = float("nan")
                address = buffer.data_ptr() + place * buffer.shape[2] * buffer.itemsize
                table[row, 4 * index + 2 * part : 4 * index + 2 * part + 2] = torch.tensor([address, tokens])
    bounds = torch.tensor([[0] * rows, list(shape.lengths)], dtype=torch.long)
    places = BlockAddresses(table.to(device), bounds.to(device))
    query, turned = (
        drawn(shape.heads, rows, shape.rank),
        drawn(shape.heads, rows, 2 * shape.dim)[..., shape.dim :],
    )
    scaling = (shape.rank + shape.dim) ** -0.5
    with poisoned():
        attention.store(fresh[0], fresh[1], places, _SLOT)
        attended = attention.attend(query, turned, places, _SLOT, scaling)
    stored = all(
        torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        for one, other in zip(memory, expected_memory, strict=True)
    )
    difference = 0.0 if stored else float("inf")
    for row, (latents, keys) in enumerate(seen):
        if not len(latents):
            difference = max(difference, float(attended[:, row].abs().max().nan_to_num(float("inf"))))
            continue
        logits = query[:, row].double() @ latents.double().T + turned[:, row].double() @ keys.double().T
        expected = torch.softmax(logits * scaling, -1) @ latents.double()
        apart = (attended[:, row].double() - expected).abs().max() / expected.abs().max()
        difference = max(difference, float(apart.nan_to_num(float("inf"))))
    return Compared(str(shape), dtype, difference, BARS[dtype])
