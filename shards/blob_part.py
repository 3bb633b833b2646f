"""A tensor of the store, in the form in which the loader takes tensors that are read when needed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from molink.shards.safetensors_header import StoredTensor

CACHE_LINE_BYTES: Final = 64
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
    """Reads the file `path`, whole, each time it is indexed: no file stays open, and no memory mapped."""

    path: Path
    tensor: StoredTensor

    def __getitem__(self, index: object) -> torch.Tensor:
        """The tensor begins in memory as many bytes after a cache line as it does in the model's own file: matrix
        kernels round by that, and a model computes the same whether its file is there or not."""
        dtype = torch_dtype(self.tensor.dtype)
        size = self.tensor.stop - self.tensor.start
        room = torch.empty(size + CACHE_LINE_BYTES, dtype=torch.uint8)
        start = (self.tensor.start - room.data_ptr()) % CACHE_LINE_BYTES
        if start % dtype.itemsize:
            start = 0
        raw = room[start : start + size]
        left = raw.numpy().data
        with self.path.open("rb", buffering=0) as file:
            while left:
                count = file.readinto(left)
                if not count:
                    raise OSError(f"{self.path} is shorter than the tensor {self.tensor.name[:200]!r}")
                left = left[count:]
        whole: torch.Tensor = raw.view(dtype).view(self.tensor.shape)
        return whole[index]  # type: ignore[index]

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        return self.tensor.dtype


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
