"""Paged attention written out for a CPU, and a recorder of steps: what a GPU's kernels and graphs must do."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from molink.shards.attention import Rules, attend_sequence
from molink.shards.decode import BATCH_SIZES, Decoding
from molink.shards.paged import Places
from molink.shards.spec import KV_BLOCK_TOKENS


def memory_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The memory of this process at an address, as a tensor."""
    elements = torch.Size(shape).numel()
    there = (ctypes.c_char * (elements * dtype.itemsize)).from_address(address)
    return torch.frombuffer(there, dtype=dtype).view(shape)


def vectors(
    blocks: Tensor, row: int, index: int, slot: int, heads: int, dim: int, dtype: torch.dtype
) -> Tensor:
    """[1, heads, tokens, dim] of one block of a row, where it lies."""
    address, extent_tokens = blocks[row].view(-1, 2)[index].tolist()
    head_bytes = extent_tokens * dim * dtype.itemsize
    parts = [
        memory_at(address + (slot * heads + head) * head_bytes, (KV_BLOCK_TOKENS, dim), dtype)
        for head in range(heads)
    ]
    return torch.stack(parts)[None] if len(parts) > 1 else parts[0][None, None]


@torch.library.custom_op("molink_tests::store", mutates_args=())
def _store(keys: Tensor, values: Tensor, blocks: Tensor, bounds: Tensor, slot: int) -> None:
    _, heads, rows, dim = keys.shape
    for row in range(rows):
        token = int(bounds[1, row]) - 1
        if token < 0:
            continue
        address, extent_tokens = blocks[row].view(-1, 2)[token // KV_BLOCK_TOKENS].tolist()
        for part, states in enumerate((keys, values)):
            for head in range(heads):
                vector = ((slot + part) * heads + head) * extent_tokens + token % KV_BLOCK_TOKENS
                place = address + vector * dim * keys.itemsize
                memory_at(place, (dim,), keys.dtype).copy_(states[0, head, row])


@torch.library.custom_op("molink_tests::attend", mutates_args=())
def _attend(
    query: Tensor, blocks: Tensor, bounds: Tensor, slot: int, key_heads: int, scaling: float
) -> Tensor:
    _, _, rows, dim = query.shape
    attended = torch.zeros_like(query)
    for row in range(rows):
        start, stop = bounds[:, row].tolist()
        if stop == 0:
            continue
        first = start // KV_BLOCK_TOKENS
        keys, values = (
            torch.cat(
                [
                    vectors(blocks, row, index, slot + part, key_heads, dim, query.dtype)
                    for index in range(first, -(-stop // KV_BLOCK_TOKENS))
                ],
                2,
            )[:, :, start - first * KV_BLOCK_TOKENS : stop - first * KV_BLOCK_TOKENS]
            for part in (0, 1)
        )
        rules = Rules(scaling, None, None, None)
        attended[:, :, row : row + 1] = attend_sequence(query[:, :, row : row + 1], keys, values, rules)
    return attended


class WrittenOut:
    """`paged.PagedAttention` on a CPU, one row and block after the other."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Of each call of `attend`."""

    def store(self, keys: Tensor, values: Tensor, places: Places, slot: int) -> None:
        _store(keys, values, *places, slot)

    def attend(self, query: Tensor, places: Places, slot: int, key_heads: int, scaling: float) -> Tensor:
        self.rows.append(query.shape[2])
        return _attend(query, *places, slot, key_heads, scaling)


WAITING = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
)
"""Operations for which the host waits on a GPU."""


class Tape(TorchDispatchMode):
    """Remembers the operations of a step on the very tensors that they used, as a CUDA graph does: what Python decided
    meanwhile is not decided again."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as above
        if func in WAITING:
            raise RuntimeError("a recorded step waited for a value")
        result = func(*args, **(kwargs or {}))
        self._operations.append((func, args, kwargs or {}, result))
        return result

    def play(self, result: Tensor) -> Tensor:
        """All operations again; what `result` is now."""
        now: dict[int, Any] = {}

        def current(value: Any) -> Any:  # noqa: ANN401 - whatever an operation takes
            return now.get(id(value), value)

        for func, args, kwargs, before in self._operations:
            after = func(*tree_map(current, args), **tree_map(current, kwargs))
            pairs = zip(before, after, strict=True) if isinstance(before, list | tuple) else [(before, after)]
            now.update((id(old), new) for old, new in pairs if isinstance(old, Tensor) and old is not new)
        return current(result)  # type: ignore[no-any-return]


class Tapes:
    """`decode.Recorder` on a CPU."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        """Rows of each step that was recorded."""
        self.replays = 0
        """Of all recordings, but for the first of each, which is part of recording."""

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        step()
        with Tape() as tape:
            result = step()
        self.sizes.append(len(result))
        self.replays -= 1

        def replay() -> Tensor:
            self.replays += 1
            return tape.play(result)

        return replay


def decoding_here(
    *, records: bool = True, sizes: tuple[int, ...] = BATCH_SIZES
) -> tuple[Decoding, WrittenOut, Tapes]:
    """How a CPU decodes as a GPU would, and what watches it."""
    attention, tapes = WrittenOut(), Tapes()
    return Decoding(attention, tapes if records else None, sizes), attention, tapes
