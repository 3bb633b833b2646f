"""Tensors on disk, in the form in which the loader takes tensors that are read when needed."""

import math
import mmap
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from molink.shards.checkpoint.safetensors_header import StoredTensor
from molink.shards.store.known_blobs import KnownBlobs

CACHE_LINE_BYTES: Final = 64
_OWN_MAPPING_BYTES: Final = 2**20
_DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


@dataclass(frozen=True, slots=True)
class BlobPart:
    """A tensor that is a file of the store: read whole each time it is indexed, with no file left open, or mapped."""

    path: Path
    tensor: StoredTensor
    known: KnownBlobs | None = None
    """Who remembers that the file was hashed; None: nobody."""

    def __getitem__(self, index: object) -> torch.Tensor:
        """In memory of its own."""
        return _read(self.path, 0, self.tensor)[index]  # type: ignore[index]

    def mapped(self, file: torch.Tensor) -> torch.Tensor:
        """The tensor, which is the whole file."""
        return file.view(torch_dtype(self.tensor.dtype)).view(self.tensor.shape)

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.tensor.dtype


@dataclass(frozen=True, slots=True)
class FilePart:
    """A tensor of a safetensors file: read each time it is indexed, or mapped."""

    path: Path
    tensor: StoredTensor

    def __getitem__(self, index: object) -> torch.Tensor:
        """In memory of its own."""
        return _read(self.path, self.tensor.start, self.tensor)[index]  # type: ignore[index]

    def mapped(self, file: torch.Tensor) -> torch.Tensor:
        """The tensor in its file's bytes."""
        raw = file[self.tensor.start : self.tensor.stop]
        return raw.view(torch_dtype(self.tensor.dtype)).view(self.tensor.shape)

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.tensor.dtype


def map_file(path: Path) -> torch.Tensor:
    """The bytes of a file as a tensor that is the file: nothing is read before it is needed, no memory is set aside,
    and nobody may write to it. On most systems the mapping outlives the file's name."""
    with path.open("rb") as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
        return torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=torch.uint8)


def _room(size: int) -> torch.Tensor:
    """Memory for so many bytes. What is large goes back to the system at once when it is not needed any more: of what
    passes through to another device or is quantized, a C library would keep most."""
    if size < _OWN_MAPPING_BYTES:
        return torch.empty(size, dtype=torch.uint8)
    flags = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}
    return torch.frombuffer(mmap.mmap(-1, size, **flags), dtype=torch.uint8)


def _read(path: Path, at: int, tensor: StoredTensor) -> torch.Tensor:
    """The tensor whose bytes begin at `at` in the file. It begins in memory as many bytes after a cache line as it does
    in the model's own file: matrix kernels round by that, and where steps are exact, a model computes the same whether
    its file is there or not."""
    dtype = torch_dtype(tensor.dtype)
    size = tensor.stop - tensor.start
    room = _room(size + CACHE_LINE_BYTES)
    start = (tensor.start - room.data_ptr()) % CACHE_LINE_BYTES
    if start % dtype.itemsize:
        start = 0
    raw = room[start : start + size]
    left = raw.numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(at)
        while left:
            count = file.readinto(left)
            if not count:
                raise OSError(f"{path} is shorter than the tensor {tensor.name[:200]!r}")
            left = left[count:]
    return raw.view(dtype).view(tensor.shape)


@dataclass(frozen=True, slots=True)
class StandIn:
    """A tensor of random numbers, for measurements that ask only how long it takes to compute with it."""

    tensor: StoredTensor
    scale: float = 0.02

    def __getitem__(self, index: object) -> torch.Tensor:
        dtype = torch_dtype(self.tensor.dtype)
        generator = torch.Generator().manual_seed(0)
        count = math.prod(self.tensor.shape)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            return torch.zeros(self.tensor.shape, dtype=dtype)[index]  # type: ignore[index]
        block = torch.randn(min(count, 2**20), generator=generator).mul_(self.scale).to(dtype)
        whole = block.repeat(-(-count // max(1, len(block))))[:count].view(self.tensor.shape)
        return whole[index]  # type: ignore[index]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.tensor.dtype


def torch_dtype(stored: str) -> torch.dtype:
    """The dtype that safetensors calls so.

    Raises:
        ValueError: torch has none.
    """
    try:
        return _DTYPES[stored]
    except KeyError:
        raise ValueError(f"tensors of type {stored} cannot be computed with") from None


def stored_dtype(dtype: torch.dtype) -> str:
    """The name of the dtype in safetensors.

    Raises:
        ValueError: it has none.
    """
    for name, found in _DTYPES.items():
        if found is dtype:
            return name
    raise ValueError(f"tensors of {dtype} cannot be stored")
