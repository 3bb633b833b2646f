"""What ranks have of one whole: their parts of exported keys and values, and where they read tensors that a hub has."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from molink.shards.checkpoint.safetensors_header import StoredTensor
from molink.shards.checkpoint.verification import StoredPart
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import KV_BLOCK_TOKENS
from molink.shards.store.blob_part import BlobPart, StandIn

Bytes = bytes | bytearray | memoryview


def raw_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, in order."""
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)


def exported_sizes(cache: SequenceCache, start: int, stop: int) -> list[int]:
    """Bytes of each layer's keys and of its values in what `cache.export` gives of these tokens, in their order: in
    each, heads come one after the other."""
    sizes: list[int] = []
    for table in cache.tables:
        tokens = stop - max(start, table.kept_from(stop) * KV_BLOCK_TOKENS)
        for layer in table.kind.layers:
            layout = cache.layouts[layer - cache.span.start]
            token_bytes = (layout.key_heads * layout.key_dim, layout.value_heads * layout.value_dim)
            sizes += (tokens * count * layout.dtype.itemsize for count in token_bytes)
    return sizes


def joined(parts: Sequence[Bytes], sizes: Sequence[int]) -> bytearray:
    """What one device would have exported, of what each rank has: an equal number of the heads, in order of ranks."""
    whole, at = bytearray(), 0
    for size in sizes:
        for part in parts:
            whole += part[at : at + size]
        at += size
    return whole


def part_of(whole: Bytes, sizes: Sequence[int], rank: int, ranks: int) -> bytearray:
    """The reverse: the part of one rank, whose own sizes these are. Raises ValueError where they are another's."""
    if len(whole) != ranks * sum(sizes):
        raise ValueError(f"{len(whole)} bytes are not the {ranks * sum(sizes)} of so many tokens")
    view, part, at = memoryview(whole), bytearray(), 0
    for size in sizes:
        part += view[at + rank * size : at + (rank + 1) * size]
        at += ranks * size
    return part


def described(parts: Mapping[str, BlobPart | StandIn]) -> list[list[object]]:
    """Tensors of a store, or stand-ins for them, as JSON values."""
    return [
        [
            name,
            str(part.path) if isinstance(part, BlobPart) else None,
            part.tensor.name,
            part.tensor.dtype,
            list(part.tensor.shape),
            part.tensor.start,
            part.tensor.stop,
        ]
        for name, part in parts.items()
    ]


def parts_of(description: Sequence[Sequence[object]]) -> dict[str, StoredPart]:
    """The reverse."""
    found: dict[str, StoredPart] = {}
    for name, path, stored_name, dtype, shape, start, stop in description:
        tensor = StoredTensor(str(stored_name), str(dtype), tuple(shape), start, stop)  # type: ignore[arg-type]
        found[str(name)] = StandIn(tensor) if path is None else BlobPart(Path(str(path)), tensor)
    return found
