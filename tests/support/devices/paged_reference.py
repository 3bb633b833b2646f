"""Paged attention written out for a CPU, and a recorder of steps: what a GPU's kernels and graphs must do."""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from support.models.circuit_runs import DEVICE
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from molink.shards.attention.attention import AttentionRules, attend_sequence
from molink.shards.batching.decode import BATCH_SIZES, Decoding, decoding_on
from molink.shards.device.cuda_graphs import Recorder
from molink.shards.paged_attention.paged import (
    BlockAddresses,
    Logits,
    PagedAttention,
    PagedLatentAttention,
    RotaryAngles,
)
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
    query: Tensor,
    blocks: Tensor,
    bounds: Tensor,
    slot: int,
    key_heads: int,
    scaling: float,
    softcap: float | None,
    sinks: Tensor | None,
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
        rules = AttentionRules(scaling, None, softcap, sinks)
        attended[:, :, row : row + 1] = attend_sequence(query[:, :, row : row + 1], keys, values, rules)
    return attended


class WrittenOut:
    """`paged.PagedAttention` on a CPU, one row and block after the other."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Of each call of `attend`."""
        self.rotations = 0
        """Calls of `rotate_and_store`."""

    def store(self, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int) -> None:
        _store(keys, values, *places, slot)

    def rotate_and_store(
        self, turned: RotaryAngles, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int
    ) -> None:
        self.rotations += 1
        cos, sin = turned.cos[:, None], turned.sin[:, None]
        half = keys.shape[3] // 2
        query, key = (
            states * cos + torch.cat((-states[..., half:], states[..., :half]), -1) * sin
            for states in (turned.query, keys)
        )
        turned.query.copy_(query)
        _store(key.contiguous(), values, *places, slot)

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        self.rows.append(query.shape[2])
        return _attend(query, *places, slot, key_heads, *logits)


def _of_latents(blocks: Tensor, row: int, part: int) -> list[tuple[int, int]]:
    """Address and extent's tokens of each block of a row: of latents, or of the keys beside them."""
    return [tuple(entry) for entry in blocks[row].view(-1, 4)[:, 2 * part : 2 * part + 2].tolist()]


@torch.library.custom_op("molink_tests::store_latents", mutates_args=())
def _store_latents(latents: Tensor, keys: Tensor, blocks: Tensor, bounds: Tensor, slot: int) -> None:
    for row in range(latents.shape[2]):
        token = int(bounds[1, row]) - 1
        if token < 0:
            continue
        for part, states in enumerate((latents, keys)):
            address, extent_tokens = _of_latents(blocks, row, part)[token // KV_BLOCK_TOKENS]
            vector = slot * extent_tokens + token % KV_BLOCK_TOKENS
            dim = states.shape[3]
            memory_at(address + vector * dim * states.itemsize, (dim,), states.dtype).copy_(states[0, 0, row])


@torch.library.custom_op("molink_tests::attend_latents", mutates_args=())
def _attend_latents(
    query: Tensor, turned: Tensor, blocks: Tensor, bounds: Tensor, slot: int, scaling: float
) -> Tensor:
    attended = torch.zeros_like(query)
    for row in range(query.shape[1]):
        start, stop = bounds[:, row].tolist()
        if stop == 0:
            continue
        latents, keys = (
            torch.cat(
                [
                    memory_at(
                        address + slot * tokens * dim * query.itemsize, (KV_BLOCK_TOKENS, dim), query.dtype
                    )
                    for address, tokens in _of_latents(blocks, row, part)[: -(-stop // KV_BLOCK_TOKENS)]
                ]
            )[start:stop]
            for part, dim in enumerate((query.shape[2], turned.shape[2]))
        )
        logits = (query[:, row] @ latents.T + turned[:, row] @ keys.T) * scaling
        attended[:, row] = torch.softmax(logits, -1) @ latents
    return attended


class WrittenLatents:
    """`paged.PagedLatentAttention` on a CPU, one row and block after the other."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        """Of each call of `attend`."""

    def store(self, latents: Tensor, keys: Tensor, places: BlockAddresses, slot: int) -> None:
        _store_latents(latents, keys, *places, slot)

    def attend(
        self, query: Tensor, turned: Tensor, places: BlockAddresses, slot: int, scaling: float
    ) -> Tensor:
        self.rows.append(query.shape[1])
        return _attend_latents(query, turned, *places, slot, scaling)


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


class WatchedAttention:
    """A device's own paged attention, and what was asked of it."""

    def __init__(self, own: PagedAttention) -> None:
        self._own = own
        self.rows: list[int] = []
        self.rotations = 0

    def store(self, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int) -> None:
        self._own.store(keys, values, places, slot)

    def rotate_and_store(
        self, turned: RotaryAngles, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int
    ) -> None:
        self.rotations += 1
        self._own.rotate_and_store(turned, keys, values, places, slot)

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        self.rows.append(query.shape[2])
        return self._own.attend(query, places, slot, key_heads, logits)


class WatchedLatents:
    """The same of latents."""

    def __init__(self, own: PagedLatentAttention) -> None:
        self._own = own
        self.rows: list[int] = []

    def store(self, latents: Tensor, keys: Tensor, places: BlockAddresses, slot: int) -> None:
        self._own.store(latents, keys, places, slot)

    def attend(
        self, query: Tensor, turned: Tensor, places: BlockAddresses, slot: int, scaling: float
    ) -> Tensor:
        self.rows.append(query.shape[1])
        return self._own.attend(query, turned, places, slot, scaling)


class WatchedGraphs:
    """A device's own recorder, watched as `Tapes` are."""

    def __init__(self, own: Recorder) -> None:
        self._own = own
        self.sizes: list[int] = []
        self.replays = 0

    def record(self, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorded = self._own.record(step)
        played = False

        def replay() -> Tensor:
            nonlocal played
            result = recorded()
            if played:
                self.replays += 1
            else:
                self.sizes.append(len(result))
                played = True
            return result

        return replay


def decoding_here(
    *, records: bool = True, sizes: tuple[int, ...] = BATCH_SIZES, fuses: bool = False
) -> tuple[Decoding, WrittenOut | WatchedAttention, Tapes | WatchedGraphs]:
    """How tests' device decodes, and what watches it: a GPU by its own kernels and graphs, a CPU as a GPU would."""
    own = decoding_on(DEVICE, fuses=fuses)
    if own is None or own.recorder is None or own.latents is None:
        attention, tapes = WrittenOut(), Tapes()
        return (
            Decoding(attention, tapes if records else None, sizes, fuses, WrittenLatents()),
            attention,
            tapes,
        )
    watched, graphs = WatchedAttention(own.attention), WatchedGraphs(own.recorder)
    recorder = graphs if records else None
    return Decoding(watched, recorder, sizes, fuses, WatchedLatents(own.latents)), watched, graphs
