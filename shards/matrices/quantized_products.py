"""Which product each quantized matrix of a model on a processor is multiplied by: measured when the span is loaded."""

from collections.abc import Iterator
from functools import partial

from torch import nn

from molink.shards.attention.attention import BatchSlot
from molink.shards.matrices import products
from molink.shards.matrices.int8_products import BytePacking, memory_of
from molink.shards.matrices.matrix_of_stack import Index
from molink.shards.matrices.quantized_matrices import (
    Int8Matrices,
    QuantizedMatrices,
    QuantizedWay,
    QuantizedWays,
    by_kernel,
)
from molink.shards.native.few_rows import FewRows, Form


def install_quantized(
    model: nn.Module,
    slot: BatchSlot,
    scratch: products.Scratch,
    few_rows: FewRows | None = None,
    without: frozenset[str] = frozenset(),
) -> set[str]:
    """Lets the model's quantized matrices on a processor multiply in the fastest way, as `slot` says, all of them in
    memory that is kept. What their kernels' layouts hold is multiplied by few rows by `few_rows`. Ways `without` which
    this machine does are not used. Returns the names of those that were chosen."""
    chosen: set[str] = set()
    large: dict[tuple[object, ...], list[QuantizedMatrices]] = {}
    packing = BytePacking()
    for module, matrices in quantized_layers(model):
        matrices.ways = QuantizedWays(slot, scratch, None, packing, without)
        rows, columns = matrices.shape
        if rows * columns >= products.LEAST_WEIGHTS and not getattr(module, "is_transposed", False):
            kind = (type(matrices), matrices.dtype, matrices.has_kernel)
            large.setdefault(kind, []).append(matrices)
    for alike in large.values():
        timed = products.few_of(alike, lambda matrices: matrices.shape[0] * matrices.shape[1])
        ways = QuantizedWays(slot, scratch, _fastest(timed), packing, without)
        for matrices in alike:
            matrices.ways = ways
            matrices.prepare()
            chosen |= matrices.chosen_ways()
            if few_rows is not None and matrices.uses_kernel() and not matrices.is_stack:
                few_rows.describe(matrices, partial(_describe, few_rows))
    packing.forget()
    return chosen


def quantized_layers(model: nn.Module) -> Iterator[tuple[nn.Module, QuantizedMatrices]]:
    """The quantized matrices on a processor, each behind the module that has it."""
    for module in model.modules():
        for matrices in module.children():
            if isinstance(matrices, QuantizedMatrices) and matrices.weight.device.type == "cpu":
                yield module, matrices


def _describe(few_rows: FewRows, matrices: QuantizedMatrices) -> None:
    """Notes how the matrix lies, for products with few rows."""
    weight, scales = matrices.weight.data, matrices.scales.data
    if isinstance(matrices, Int8Matrices):
        form, address = Form.BYTE_PANELS, memory_of(weight).data_ptr()
    else:
        form, address = Form.NF4_PANELS, weight.data_ptr()
    found = few_rows.matrix(form, address, matrices.shape, scales)
    matrices.few_rows = few_rows.alike(found, lambda row: matrices.multiply_form((weight, scales), row))


def _fastest(timed: list[QuantizedMatrices]) -> products.Choice[QuantizedWay]:
    ways = timed[0].ways_here()
    first: list[Index] = [0 if matrices.is_stack else ... for matrices in timed]

    def trial(way: QuantizedWay) -> products.Way:
        return lambda at, rows: way(timed[at], first[at], rows)

    columns, dtype = [matrices.shape[1] for matrices in timed], timed[0].dtype
    trials = [trial(way) for way in ways]
    if not timed[0].has_kernel or timed[0].ways.slot.exact:
        return products.time_ways(trials, columns, dtype).choose(ways)
    forms = [matrices.kernel_form(index) for matrices, index in zip(timed, first, strict=True)]
    trials.append(lambda at, rows: timed[at].multiply_form(forms[at], rows))
    timings = products.time_ways(trials, columns, dtype)
    if timings.pays(len(ways)):
        return ((1, by_kernel),)
    return timings.without(len(ways)).choose(ways)
