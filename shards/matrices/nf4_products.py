"""What bitsandbytes' library computes with nf4 on processors, called with memory of ours.

Its functions for processors are called as its own `backends/cpu/ops.py` calls them, but what they fill is given to
them instead of being made anew for each product. Its product with packed weights, `gemv_4bit_inference`, is for
bfloat16 on processors that multiply such (AVX512-BF16). It takes another layout of the same bits than the quantizer
makes: of PANEL_ROWS rows, both numbers of each pair of columns lie together, and scales are bfloat16, [blocks, rows].
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCK = 64
"""Numbers of a matrix that share a scale."""
PANEL_ROWS = 32
"""Rows whose numbers lie together in the kernel's layout."""
REPACKED_BYTES = 1 << 22
"""Of a matrix that are brought into the kernel's layout at a time."""

CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""NormalFloat's numbers: Dettmers et al., "QLoRA" (2023), appendix E."""

_UNPACKING = {
    torch.float32: "cdequantize_blockwise_cpu_nf4_fp32",
    torch.bfloat16: "cdequantize_blockwise_cpu_nf4_bf16",
    torch.float16: "cdequantize_blockwise_cpu_nf4_fp16",
}
_KERNEL = "gemv_4bit_inference_cpu_nf4_bf16"


def unpack_into(values: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """`values`, filled with what the bytes `packed` and the float32 `scales` of their blocks stand for."""
    blocks = scales.numel()
    unpack = _function(_UNPACKING[values.dtype])
    if unpack is None:
        return values.copy_(_unpacked(packed, scales, values.dtype).view(values.shape))
    # A row for each block: on processors, bitsandbytes gets blocks wrong that reach from one row into the next.
    sizes = (ctypes.c_longlong(BLOCK), ctypes.c_longlong(blocks), ctypes.c_longlong(BLOCK))
    unpack(_address(packed), _address(scales), _address(values), *sizes)
    return values


def torch_unpack_into(values: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    """Unpacks as `unpack_into` does, by torch's operations alone: for machines on which bitsandbytes' library fails."""
    codes = torch.stack((packed.reshape(-1) >> 4, packed.reshape(-1) & 0x0F), -1).view(-1).int()
    numbers = torch.tensor(CODES).index_select(0, codes).view(-1, BLOCK).mul_(scales.reshape(-1, 1).float())
    return values.copy_(numbers.view(values.shape))


def _unpacked(packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    shape = torch.Size((scales.numel(), BLOCK))
    state = QuantState(absmax=scales.reshape(-1), shape=shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
    values: Tensor = dequantize_4bit(packed.reshape(-1, 1), state)
    return values


def kernel_takes(rows: int, columns: int, dtype: torch.dtype) -> bool:
    """Whether the product with packed weights can be used for matrices of this shape, here."""
    if dtype is not torch.bfloat16 or rows % PANEL_ROWS or columns % BLOCK:
        return False
    from bitsandbytes.functional import has_avx512bf16

    return bool(has_avx512bf16()) and _function(_KERNEL) is not None


def kernel_product(rows: Tensor, panels: Tensor, scales: Tensor, out: int) -> Tensor:
    """Rows [count, columns] in bfloat16 times a matrix [out, columns] in the kernel's layout: [count, out]."""
    rows = rows.contiguous()
    count, columns = rows.shape
    result = rows.new_empty(count, out)
    kernel = _function(_KERNEL)
    if kernel is None:
        raise RuntimeError("bitsandbytes' library for processors is not loaded")
    sizes = (ctypes.c_int64(size) for size in (count, out, columns))
    strides = (ctypes.c_int64(size) for size in (BLOCK, columns, out))
    kernel(*sizes, _address(rows), _address(panels), _address(scales), _address(result), *strides)
    return result


def to_panels(packed: Tensor, rows: int, columns: int) -> None:
    """Brings the bytes of one matrix [rows, columns], a number of the even columns in the higher half of each, into the
    kernel's layout, in their place."""
    _rearrange(packed, rows, columns, _paneled)


def from_panels(packed: Tensor, rows: int, columns: int) -> None:
    """Undoes `to_panels`."""
    _rearrange(packed, rows, columns, _unpaneled)


def panels_of(packed: Tensor, scales: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """A copy of one matrix in the kernel's layout."""
    panels = packed.clone()
    to_panels(panels, rows, columns)
    return panels, panel_scales(scales, rows)


def panel_scales(scales: Tensor, rows: int) -> Tensor:
    """[..., rows * blocks] as the quantizer makes them to [..., blocks * rows] as the kernel takes them."""
    by_blocks = scales.view(*scales.shape[:-1], rows, -1).transpose(-1, -2).to(torch.bfloat16)
    return by_blocks.reshape(scales.shape)


def _rearrange(packed: Tensor, rows: int, columns: int, panels_of: Callable[[Tensor], Tensor]) -> None:
    width = columns // 2
    panels = packed.view(rows // PANEL_ROWS, PANEL_ROWS * width)
    step = max(1, REPACKED_BYTES // (PANEL_ROWS * width))
    for start in range(0, len(panels), step):
        part = panels[start : start + step]
        part.copy_(panels_of(part.view(len(part), -1, width)).view(part.shape))


def _paneled(panels: Tensor) -> Tensor:
    """[panels, PANEL_ROWS, pairs] bytes to [panels, pairs, PANEL_ROWS]: for each pair of columns, and each of the first
    16 rows, a byte of the left column and one of the right, this row's number in the lower half, that of the 16th row
    after it in the higher."""
    upper, lower = panels[:, : PANEL_ROWS // 2], panels[:, PANEL_ROWS // 2 :]
    both = torch.empty(*upper.shape, 2, dtype=torch.uint8)
    torch.bitwise_or(upper >> 4, lower & 0xF0, out=both[..., 0])
    torch.bitwise_or(upper & 0x0F, lower << 4, out=both[..., 1])
    pairs = both.view(torch.int16)[..., 0].transpose(1, 2).contiguous()
    return pairs.view(torch.uint8)


def _unpaneled(panels: Tensor) -> Tensor:
    count, height, width = panels.shape
    pairs = panels.reshape(count, width, height // 2, 2).view(torch.int16)[..., 0].transpose(1, 2)
    both = pairs.contiguous().view(torch.uint8).view(count, height // 2, width, 2)
    left, right = both[..., 0], both[..., 1]
    return torch.cat(((left << 4) | (right & 0x0F), (left & 0xF0) | (right >> 4)), 1)


def import_library() -> None:
    """Imports bitsandbytes, which takes seconds."""
    import bitsandbytes.functional  # noqa: F401 - for later calls


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _function(name: str) -> Callable[..., Any] | None:
    """One of the library's, or None where it is not loaded or lacks it."""
    from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib

    if isinstance(lib, ErrorHandlerMockBNBNativeLibrary):
        return None
    return getattr(lib._lib, name, None)  # noqa: SLF001 - the wrapper answers with a function that raises
