"""Activations as raw bytes and back, without copies where the machine allows it."""

import torch
from torch import Tensor

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name in `spec.DTYPE_BYTES`. Raises ValueError for any other."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}") from None


def encode(tensor: Tensor) -> memoryview:
    """The bytes of a [rows, hidden] tensor: row after row, little-endian.

    A view of the tensor's own memory where it is contiguous and on the CPU, so do not write to either while
    it is in use. Raises ValueError for another shape or dtype.
    """
    if tensor.ndim != 2:
        raise ValueError(f"activations are [rows, hidden], got a tensor of shape {tuple(tensor.shape)}")
    if tensor.dtype not in _DTYPES.values():
        raise ValueError(f"activations are {', '.join(_DTYPES)}, got {tensor.dtype}")
    if tensor.numel() == 0:
        return memoryview(b"")
    # Of a decode step's few numbers each call costs more than the copy: none is made that has no effect.
    if tensor.requires_grad:
        tensor = tensor.detach()
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.to("cpu").contiguous()
    return tensor.view(torch.uint8).numpy().data.cast("B")


def decode(
    buffer: bytes | bytearray | memoryview, rows: int, hidden_size: int, dtype: torch.dtype | str
) -> Tensor:
    """The [rows, hidden_size] CPU tensor that `buffer` encodes.

    A view of a writable, aligned buffer; of any other a copy, since torch has no read-only tensors. Raises
    ValueError, before anything is allocated, where the buffer has another length.
    """
    kind = dtype_of(dtype) if isinstance(dtype, str) else dtype
    if rows < 0 or hidden_size < 1:
        raise ValueError(f"activations need rows >= 0 and hidden_size >= 1, got {rows} and {hidden_size}")
    view = memoryview(buffer)
    expected = rows * hidden_size * kind.itemsize
    if view.nbytes != expected:
        raise ValueError(
            f"{rows} rows of {hidden_size} {str(kind).removeprefix('torch.')} numbers are {expected} bytes, "
            f"but {view.nbytes} came"
        )
    if rows == 0:
        return torch.empty(0, hidden_size, dtype=kind)
    if view.readonly:
        return torch.frombuffer(bytearray(view), dtype=kind).view(rows, hidden_size)
    flat = torch.frombuffer(view, dtype=torch.uint8)
    if flat.data_ptr() % kind.itemsize:
        flat = flat.clone()
    return flat.view(kind).view(rows, hidden_size)
