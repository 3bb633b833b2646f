"""Linear layers that multiply in the fastest way that was measured for their matrices.

Torch's linear layers are not always the fastest. On a processor that is not Intel's, MKL takes half again to three
times as long as it has to for one to eight rows of float32. Weights as they lie give oneDNN half of the memory's speed;
those that it has packed, nearly all of it. And a processor that cannot multiply bfloat16 takes three times as long for
many rows of it as for float32. Where a stage is `exact`, steps of one session keep to torch's product, so that their
numbers are those of transformers bit for bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from molink.shards.attention.attention import BatchSlot
from molink.shards.matrices import products
from molink.shards.matrices.int8_products import memory_of
from molink.shards.matrices.known_products import KnownProducts
from molink.shards.matrices.products import (
    Choice,
    Scratch,
    dense_products,
    divided_product,
    few_of,
    has_onednn,
    multiply_in_parts,
    onednn_product,
    packed_for_onednn,
    packed_product,
    time_ways,
    used_for,
)
from molink.shards.matrices.quantized_products import install_quantized
from molink.shards.model.later_packing import LaterPacking
from molink.shards.native.few_rows import FewRows, FewRowsMatrix, Form
from molink.shards.native.native_way import NativeWay

Product: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Of rows [..., in], weights [out, in] and, if there is one, a bias [out]: [..., out]."""
FEW_ROWS: Final = "few_rows"
"""Under this name a linear layer has its `FewRowsMatrix`; it may get one, and another one, between two steps."""


def widened_product(scratch: Scratch, without: frozenset[str] = frozenset()) -> Product:
    """As `torch.nn.functional.linear`, computed in float32, a part of the weights after the other."""
    multiply = dense_products(without)[-1]

    def product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        def widen(start: int, stop: int) -> Tensor:
            part = scratch.take((stop - start, weight.shape[1]), torch.float32)
            return part.copy_(weight[start:stop])

        flat = rows.reshape(-1, rows.shape[-1])
        result = multiply_in_parts(flat, len(weight), torch.float32, widen, multiply)
        if bias is not None:
            result += bias
        return result.to(rows.dtype).view(*rows.shape[:-1], -1)

    return product


def ways_for(
    dtype: torch.dtype, scratch: Scratch, without: frozenset[str] = frozenset()
) -> tuple[Product, ...]:
    """Products to choose from, torch's own first, `without` what was dropped."""
    if dtype is not torch.float32:
        plain = () if NativeWay.LINEAR in without else (functional.linear,)
        return (*plain, widened_product(scratch, without))
    named: tuple[tuple[NativeWay, Product], ...] = (
        (NativeWay.LINEAR, functional.linear),
        *(((NativeWay.ONEDNN, onednn_product),) if has_onednn() else ()),
        (NativeWay.DIVIDED, divided_product),
    )
    return tuple(product for name, product in named if name not in without) or (functional.linear,)


def way_of(product: Product) -> NativeWay:
    """The native way that a product of `ways_for` goes."""
    if product is functional.linear:
        return NativeWay.LINEAR
    return NativeWay.DIVIDED if product is divided_product else NativeWay.ONEDNN


def install_products(
    model: nn.Module,
    slot: BatchSlot,
    known: KnownProducts | None = None,
    later: LaterPacking | None = None,
    few_rows: FewRows | None = None,
    without: frozenset[str] = frozenset(),
) -> frozenset[str]:
    """Lets the model's large matrices on a processor multiply in the fastest way, as `slot` says: in every step, or
    only in those that need not be bitwise. Where it pays, weights are packed for it, each in the place of what it
    was: now, or `later`. What is `known` is not measured. Few rows are multiplied by `few_rows` where they can be.
    Ways `without` which this machine does are not used. Returns the names of those that were chosen."""
    scratch = Scratch()
    chosen: set[str] = set()
    layers = plain_layers(model)
    least = 0 if NativeWay.LINEAR in without else products.LEAST_WEIGHTS
    large = [layer for layer in layers if layer.weight.numel() >= least]
    for dtype in {layer.weight.dtype for layer in large}:
        alike = [one for one in large if one.weight.dtype is dtype]
        ways = ways_for(dtype, scratch, without)
        choice, packs = _decided(alike, slot, ways, known, without)
        chosen |= {NativeWay.ONEDNN_PACKED} if packs else {way_of(product) for _, product in choice}
        tied = _tied(model) if packs else set()
        packable = frozenset(id(layer) for layer in alike if packs and id(layer.weight) not in tied)
        _install(alike, packable, slot, choice, later, few_rows, torchs=NativeWay.LINEAR not in without)
    if few_rows is not None:
        for layer in layers:
            if FewRows.has_shape(layer.weight):
                few_rows.describe(layer, partial(_describe, few_rows))
    chosen |= install_quantized(model, slot, scratch, few_rows, without)
    if few_rows is not None and few_rows.is_bound:
        chosen.add(NativeWay.COMPILED)
    return frozenset(chosen)


def plain_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers on a processor whose matrices are not quantized."""
    return [
        module
        for module in model.modules()
        if type(module) is nn.Linear
        and "forward" not in module.__dict__
        and module.weight.device.type == "cpu"
        and module.weight.is_floating_point()
    ]


def _install(
    layers: Sequence[nn.Linear],
    packable: frozenset[int],
    slot: BatchSlot,
    choice: Choice[Product],
    later: LaterPacking | None,
    few_rows: FewRows | None,
    *,
    torchs: bool,
) -> None:
    """Gives layers their products; those that are `packable`, by their ids, are packed. `torchs` as `_forward`."""

    def pack(layer: nn.Linear) -> bool:
        return _pack(layer, few_rows)

    for layer in layers:
        packs = id(layer) in packable
        if packs and later is None and pack(layer):
            continue
        if few_rows is not None or any(product is not functional.linear for _, product in choice):
            layer.__dict__["forward"] = _forward(layer, slot, choice, torchs=torchs)
        if packs and later is not None:
            later.add(layer, pack)


def _decided(
    layers: Sequence[nn.Linear],
    slot: BatchSlot,
    ways: Sequence[Product],
    known: KnownProducts | None,
    without: frozenset[str],
) -> tuple[Choice[Product], bool]:
    """As `fastest`, remembered or measured."""
    timed = [layer.weight for layer in few_of(layers, lambda layer: layer.weight.nbytes)]
    kind = (str(timed[0].dtype), slot.exact, [list(weight.shape) for weight in timed], *sorted(without))
    found = None if known is None else known.find(kind, len(ways))
    if found is not None:
        return tuple((rows, ways[way]) for rows, way in found[0]), found[1]
    may_pack = not slot.exact and NativeWay.ONEDNN_PACKED not in without
    choice, packs = fastest(timed, ways, _packed(timed) if may_pack else None)
    if known is not None:
        known.decided(kind, (tuple((rows, ways.index(way)) for rows, way in choice), packs))
    return choice, packs


def _pack(layer: nn.Linear, few_rows: FewRows | None) -> bool:
    """Packs the layer's weights in the place of what they were; whether that could be done."""
    weight = packed_for_onednn(layer.weight)
    if weight is None:
        return False
    found_at_once = "weight" in layer.__dict__  # as `stage.shorten_lookups` leaves it
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if found_at_once:
        layer.__dict__["weight"] = layer.weight
    if few_rows is not None and few_rows.is_bound:
        _describe(few_rows, layer)
    layer.__dict__["forward"] = _packed_forward(layer, weight)
    return True


def _describe(few_rows: FewRows, layer: nn.Linear) -> None:
    """Notes how the layer's weights lie, as they are now, for products with few rows."""
    weight = layer.weight.data
    found = _panels_of(weight, few_rows) if weight.is_mkldnn else few_rows.rows_of(weight)
    layer.__dict__[FEW_ROWS] = found


def _panels_of(packed: Tensor, few_rows: FewRows) -> FewRowsMatrix | None:
    """The packed weights [out, in] for one row, if they lie as is expected."""
    rows, columns = packed.shape
    form = Form.FLOAT_PANELS if packed.dtype is torch.float32 else Form.HALF_PANELS
    memory = memory_of(packed)
    if (
        packed.dtype not in (torch.float32, torch.bfloat16)
        or memory.nbytes != packed.numel() * packed.itemsize
    ):
        return None
    found = few_rows.matrix(form, memory.data_ptr(), (rows, columns))
    return few_rows.alike(found, lambda row: packed_product(row, packed))


def fastest(
    weights: Sequence[Tensor], ways: Sequence[Product], packed: Sequence[Tensor] | None
) -> tuple[Choice[Product], bool]:
    """Which way multiplies rows by such matrices fastest, and whether `packed` ones, used for any number of rows, are
    faster still."""

    def timed(way: Product) -> products.Way:
        return lambda at, rows: way(rows, weights[at], None)

    trials = [timed(way) for way in ways]
    if packed is not None:
        trials.append(lambda at, rows: packed_product(rows, packed[at]))
    timings = time_ways(trials, [weight.shape[1] for weight in weights], weights[0].dtype)
    if packed is None:
        return timings.choose(ways), False
    return timings.without(len(ways)).choose(ways), timings.pays(len(ways))


def _packed(weights: Sequence[Tensor]) -> list[Tensor] | None:
    packed = [packed_for_onednn(weight) for weight in weights]
    found = [weight for weight in packed if weight is not None]
    return found if len(found) == len(weights) else None


def _tied(model: nn.Module) -> set[int]:
    """Weights that another module looks up, here or at the circuit's other end."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    tied = {parameter for parameter, count in uses.items() if count > 1}
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        head: nn.Module | None = model.get_output_embeddings()  # type: ignore[operator] # a transformers' model has it
        tied |= {id(parameter) for parameter in head.parameters()} if head is not None else set()
    return tied


def _packed_forward(layer: nn.Linear, weight: Tensor) -> Callable[[Tensor], Tensor]:
    bias, found = layer.bias, layer.__dict__

    def forward(rows: Tensor) -> Tensor:
        few: FewRowsMatrix | None = found.get(FEW_ROWS)
        if few is not None and few.takes(rows):
            return _biased(few.product(rows), bias)
        return packed_product(rows, weight, bias)

    return forward


def _biased(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product.add_(bias)


def _forward(
    layer: nn.Linear, slot: BatchSlot, choice: Choice[Product], *, torchs: bool
) -> Callable[[Tensor], Tensor]:
    """`torchs`: torch's own product may be used."""
    found = layer.__dict__

    def forward(rows: Tensor) -> Tensor:
        if slot.bitwise and torchs:
            return functional.linear(rows, layer.weight, layer.bias)
        few: FewRowsMatrix | None = found.get(FEW_ROWS)
        # whoever shares the weights with another stage has put other memory in their place
        if few is not None and few.takes(rows) and few.fields.numbers == layer.weight.data_ptr():
            return _biased(few.product(rows), layer.bias)
        return used_for(choice, rows.numel() // rows.shape[-1])(rows, layer.weight, layer.bias)

    return forward
