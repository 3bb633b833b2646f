"""Jobs that the native ways of a stage are tried with before it computes: each distinct matrix, by its shape and
where its memory begins, in each way that it may be multiplied."""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

from molink.shards.attention.attention import TILED_QUERIES, BatchSlot
from molink.shards.kernels.fused_layers import GATED, HEADS
from molink.shards.matrices import products
from molink.shards.matrices.int8_products import PANEL
from molink.shards.matrices.linear import plain_layers
from molink.shards.matrices.nf4_products import BLOCK, PANEL_ROWS
from molink.shards.matrices.products import ALIGNED_BYTES, STREAMED_ROWS, UNPACKED_ELEMENTS
from molink.shards.matrices.quantize import QuantizedLinear
from molink.shards.matrices.quantized_matrices import (
    PACKED_COLUMNS,
    PACKED_ROWS,
    Int8Matrices,
    QuantizedMatrices,
)
from molink.shards.matrices.quantized_products import quantized_layers
from molink.shards.native.few_rows import FewRows
from molink.shards.native.native_way import NativeWay, TrialJob

COUNTS: Final = tuple(sorted({1, 4, 128, STREAMED_ROWS + 1, max(PACKED_ROWS.values()) + 1}))
"""Rows: one beyond each number from which on another way is taken, among them."""
QUERIES: Final = (1, 4, TILED_QUERIES + 1, 128)


def jobs_of(model: nn.Module, config: Any, slot: BatchSlot, few_rows: FewRows | None) -> list[TrialJob]:  # noqa: ANN401 - transformers has no types
    """The jobs of a model on a processor, each once. `config` is the text decoder's."""
    jobs = [job for layer in plain_layers(model) for job in _plain_jobs(layer.weight, slot, few_rows)]
    for _, matrices in quantized_layers(model):
        begins = matrices.weight.data_ptr() % ALIGNED_BYTES
        jobs += _quantized_jobs(matrices, matrices.shape[0], begins, slot, few_rows)
    for matrices, rows in _joined(model):
        jobs += _quantized_jobs(matrices, rows, 0, slot, few_rows)
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    for layer in config.per_layer_config if getattr(config, "is_heterogeneous", False) else (config,):
        heads = int(getattr(layer, "num_attention_heads", 0) or 0)
        dim = int(getattr(layer, "head_dim", 0) or 0) or int(config.hidden_size) // max(1, heads)
        shape = (heads, dim)
        jobs += [_job(NativeWay.ATTENTION, dtype, shape, counts=QUERIES) for dtype in dtypes if all(shape)]
    return list(dict.fromkeys(jobs))


def _plain_jobs(weight: Tensor, slot: BatchSlot, few_rows: FewRows | None) -> Iterator[TrialJob]:
    shape, dtype, begins = (weight.shape[0], weight.shape[1]), weight.dtype, weight.data_ptr() % ALIGNED_BYTES
    yield _job(NativeWay.LINEAR, dtype, shape, begins)
    if weight.numel() >= products.LEAST_WEIGHTS:
        if dtype is torch.float32:
            yield _job(NativeWay.ONEDNN, dtype, shape, begins)
            yield _job(NativeWay.DIVIDED, dtype, shape, begins)
        else:
            yield _job(NativeWay.ONEDNN, torch.float32, _part(shape))
        if not slot.exact:
            yield _job(NativeWay.ONEDNN_PACKED, dtype, shape, begins)
    takes = dtype in (torch.float32, torch.bfloat16) and FewRows.has_shape(weight)
    if few_rows is not None and takes:
        yield _job(NativeWay.COMPILED, dtype, shape, begins)


def _quantized_jobs(
    matrices: QuantizedMatrices, rows: int, begins: int, slot: BatchSlot, few_rows: FewRows | None
) -> Iterator[TrialJob]:
    """Yields the jobs of a matrix of so many rows, kept as `matrices` are."""
    shape, dtype = (rows, matrices.shape[1]), matrices.dtype
    yield _job(NativeWay.LINEAR, dtype, _part(shape))
    yield _job(NativeWay.ONEDNN, torch.float32, _part(shape))
    is_int8, halves = isinstance(matrices, Int8Matrices), dtype is torch.bfloat16
    form = "int8" if is_int8 else "nf4"
    if not is_int8:
        yield _job(NativeWay.BITSANDBYTES, dtype, shape, begins, form)
    elif dtype in PACKED_ROWS and shape[1] % PACKED_COLUMNS == 0:
        few = tuple(count for count in COUNTS if halves or count <= PACKED_ROWS[dtype])
        yield _job(NativeWay.TORCH_BYTES, dtype, shape, begins, form, few)
    if not halves or slot.exact:
        return
    units = (PANEL, PANEL) if is_int8 else (PANEL_ROWS, BLOCK)
    if any(size % unit for size, unit in zip(shape, units, strict=True)):
        return
    yield _job(
        NativeWay.ONEDNN_BYTES if is_int8 else NativeWay.BITSANDBYTES_PRODUCT, dtype, shape, begins, form
    )
    if few_rows is not None and not matrices.is_stack:
        yield _job(NativeWay.COMPILED, dtype, shape, begins, form)


def _joined(model: nn.Module) -> Iterator[tuple[QuantizedMatrices, int]]:
    """The rows of matrices that `fuse_layers` may make one of, and how they are kept."""
    for module in model.modules():
        for names in (HEADS, GATED):
            parts = [getattr(module, name, None) for name in names]
            own = [part.matrix for part in parts if isinstance(part, QuantizedLinear)]
            if len(own) == len(names) and own[0].weight.device.type == "cpu":
                yield own[0], sum(one.shape[0] for one in own)


def _part(shape: tuple[int, int]) -> tuple[int, int]:
    """The shape that is unpacked of such a matrix at a time (`products.multiply_in_parts`)."""
    return min(shape[0], max(64, UNPACKED_ELEMENTS // shape[1] // 64 * 64)), shape[1]


def _job(
    way: NativeWay,
    dtype: torch.dtype,
    shape: tuple[int, int],
    begins: int = 0,
    form: str = "none",
    counts: tuple[int, ...] = COUNTS,
) -> TrialJob:
    kept = str(dtype).removeprefix("torch.")
    return TrialJob(way, form, kept, shape[0], shape[1], begins, counts, torch.get_num_threads())
