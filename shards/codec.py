"""Activations as bytes and back.

An encoding says how the numbers of a [rows, hidden] tensor travel. `float32`, `bfloat16` and `float16` are the numbers
themselves, row after row, little-endian; that of the model's own dtype is lossless, and copies nothing where the
machine allows it. `int8` is blockwise absolute-maximum quantization (Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022, section 2.1, here linear): one float32 scale for each BLOCK values of a row (the last block of
a row may be shorter), all scales first, then one signed byte for each value.
"""

import torch
from torch import Tensor

from molink.shards.spec import INT8_BLOCK as BLOCK
from molink.shards.spec import row_bytes

LEAST_SCALE = 2.0**-120
"""Scales are never smaller: blocks of zeros need no case of their own, and no scale loses bits as a subnormal."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST = 127
_SCALE_BYTES = 4
_ROUNDING = 2.0**-20
"""More than the division and the product in float32 are off, relative to the result."""


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name in `spec.DTYPE_BYTES`. Raises ValueError for any other."""
    try:
        return _DTYPES[name]
    except KeyError:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {name!r}") from None


def encoded_bytes(encoding: str, rows: int, hidden_size: int) -> int:
    """What `encode` makes of a [rows, hidden_size] tensor. Raises ValueError for an unknown encoding."""
    return rows * row_bytes(encoding, hidden_size)


def encode(tensor: Tensor, encoding: str | None = None) -> memoryview:
    """The bytes of a [rows, hidden] tensor; None: in the tensor's own numbers.

    For finite values, `int8` is off by at most half of the block's scale, which is 1/127 of the block's largest value,
    and `float16` beyond its range gives its largest number. Where a lossless encoding keeps them, `int8` has no NaN
    and no infinities: they become 0 and the largest number. A view of the tensor's own memory where it is contiguous,
    on the CPU and of that dtype, so do not write to either while it is in use. Raises ValueError for another shape,
    dtype or encoding.
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
    if encoding == "int8":
        return bytes_of(_quantized(tensor))
    if encoding is not None:
        tensor = _cast(tensor, dtype_of(encoding))
    return bytes_of(tensor)


def encoded(tensor: Tensor, encoding: str) -> Tensor:
    """The numbers that `encode` gives the bytes of, where the [rows, hidden] tensor is, so that few bytes leave a GPU.
    Nothing is waited for there."""
    tensor = _quantized(tensor) if encoding == "int8" else _cast(tensor, dtype_of(encoding))
    return tensor.contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; a view of its own memory where it is contiguous and on the CPU."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.to("cpu").contiguous()
    return tensor.view(torch.uint8).numpy().data.cast("B") if tensor.numel() else memoryview(b"")


def decode(
    buffer: bytes | bytearray | memoryview,
    rows: int,
    hidden_size: int,
    dtype: torch.dtype | str,
    encoding: str | None = None,
) -> Tensor:
    """The [rows, hidden_size] CPU tensor in `dtype` that `buffer` encodes; encoding None: in numbers of that dtype.

    Of the dtype's own numbers a view of a writable, aligned buffer; else a copy, since torch has no read-only tensors.
    Raises ValueError, before anything is allocated, where the buffer has another length; and where `int8` bytes stand
    for a number that is not finite in `dtype`.
    """
    kind = dtype_of(dtype) if isinstance(dtype, str) else dtype
    if rows < 0 or hidden_size < 1:
        raise ValueError(f"activations need rows >= 0 and hidden_size >= 1, got {rows} and {hidden_size}")
    name = encoding or str(kind).removeprefix("torch.")
    view = memoryview(buffer)
    expected = encoded_bytes(name, rows, hidden_size)
    if view.nbytes != expected:
        raise ValueError(
            f"{rows} rows of {hidden_size} {name} numbers are {expected} bytes, but {view.nbytes} came"
        )
    if rows == 0:
        return torch.empty(0, hidden_size, dtype=kind)
    if view.readonly:
        view = memoryview(bytearray(view))
    if name == "int8":
        return _dequantized(view, rows, hidden_size, kind)
    return _numbers(view, dtype_of(name)).view(rows, hidden_size).to(kind)


def rows_apart(payload: memoryview, rows: int, hidden_size: int, encoding: str) -> memoryview:
    """What `encode` made of [rows, hidden_size], with each row encoded by itself, one after the other: `row_bytes` of
    the encoding each. The same bytes but in `int8`, whose scales come before all rows."""
    if encoding != "int8":
        return payload
    scale_bytes = _blocks(hidden_size) * _SCALE_BYTES
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    scales, values = flat.split_with_sizes((rows * scale_bytes, rows * hidden_size))
    return bytes_of(torch.cat((scales.view(rows, scale_bytes), values.view(rows, hidden_size)), 1))


def decode_apart(
    content: bytes, rows: int, hidden_size: int, dtype: torch.dtype | str, encoding: str
) -> Tensor:
    """The [rows, hidden_size] CPU tensor of rows that are encoded each by itself. Raises as `decode`."""
    if encoding == "int8" and len(content) == encoded_bytes(encoding, rows, hidden_size):
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(rows, -1)
        scales, values = flat.split_with_sizes((_blocks(hidden_size) * _SCALE_BYTES, hidden_size), 1)
        content = bytes(bytes_of(torch.cat((scales.reshape(-1), values.reshape(-1)))))
    return decode(content, rows, hidden_size, dtype, encoding)


def _blocks(hidden_size: int) -> int:
    """Scales of a row."""
    return -(-hidden_size // BLOCK)


def _numbers(view: memoryview, kind: torch.dtype) -> Tensor:
    """All numbers of a writable buffer; a copy where it is not aligned."""
    flat = torch.frombuffer(view, dtype=torch.uint8)
    if flat.data_ptr() % kind.itemsize:
        flat = flat.clone()
    return flat.view(kind)


def _cast(tensor: Tensor, kind: torch.dtype) -> Tensor:
    if kind is torch.float16 and tensor.dtype is not kind:
        most = torch.finfo(kind).max
        tensor = tensor.clamp(-most, most)
    return tensor.to(kind)


def _quantized(tensor: Tensor) -> Tensor:
    """The scales of all blocks, then the values, as bytes; computed where the tensor is."""
    rows, hidden = tensor.shape
    blocks = _blocks(hidden)
    values = tensor.float()
    if hidden % BLOCK:
        values = torch.nn.functional.pad(values, (0, blocks * BLOCK - hidden))
    values = values.reshape(rows, blocks, BLOCK)
    least, greatest = values.aminmax(dim=-1, keepdim=True)
    largest = torch.maximum(greatest, -least)
    if not tensor.is_cpu or not bool(torch.isfinite(largest).all()):  # to look would be to wait for a device
        most = torch.finfo(tensor.dtype).max
        values = values.nan_to_num(nan=0.0, posinf=most, neginf=-most)
        largest = values.abs().amax(dim=-1, keepdim=True)
    scales = (largest / _LARGEST).clamp_min_(LEAST_SCALE)
    quantized = (values / scales).round_().to(torch.int8).view(rows, blocks * BLOCK)[:, :hidden]
    scale_bytes = scales.view(torch.uint8).reshape(-1)
    return torch.cat((scale_bytes, quantized.reshape(-1).view(torch.uint8)))


def _dequantized(view: memoryview, rows: int, hidden: int, kind: torch.dtype) -> Tensor:
    blocks = _blocks(hidden)
    split = rows * blocks * _SCALE_BYTES
    scales = _numbers(view[:split], torch.float32).view(rows, blocks, 1)
    least, greatest = (float(scale) for scale in scales.aminmax())
    most = torch.finfo(kind).max
    if not LEAST_SCALE <= least <= greatest <= most / _LARGEST * (1 + _ROUNDING):
        raise ValueError(f"scales of int8 activations are out of range: {least:g} to {greatest:g}")
    values = torch.frombuffer(view, dtype=torch.int8, offset=split).view(rows, hidden)
    if hidden % BLOCK:
        values = torch.nn.functional.pad(values, (0, blocks * BLOCK - hidden))
    numbers = values.view(rows, blocks, BLOCK) * scales
    if greatest * (_LARGEST + 1) >= most:  # products may round to infinity
        numbers.clamp_(-most, most)
    numbers = numbers.view(rows, blocks * BLOCK)[:, :hidden]
    return numbers.to(kind).contiguous()
