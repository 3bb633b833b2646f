"""Matrices in 8 or 4 bits, and the products with them.

`nf4` is the NormalFloat of Dettmers et al., "QLoRA" (2023), section 3: 4 bits for each number and a float32 scale for
each BLOCK numbers, without double quantization. `int8` keeps the vector-wise absolute-maximum quantization of Dettmers
et al., "LLM.int8()" (2022), section 2.1, for the weights: 8 bits for each number and a float32 scale for each row.
bitsandbytes makes both. Activations are never quantized, so that a row's result does not depend on what it is batched
with: LLM.int8() would look for outliers over all rows of a batch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from molink.shards.attention.attention import BatchSlot
from molink.shards.matrices import int8_products, nf4_products, products
from molink.shards.matrices.by_bytes import ByteProducts, gpu_product
from molink.shards.matrices.int8_products import BytePacking, byte_product, torch_byte_product
from molink.shards.matrices.matrix_of_stack import Index, MatrixOfStack
from molink.shards.matrices.nf4_products import (
    BLOCK,
    kernel_product,
    kernel_takes,
    torch_unpack_into,
    unpack_into,
)
from molink.shards.model.tensor_parallel import Division
from molink.shards.native.few_rows import FewRowsMatrix
from molink.shards.native.native_way import NativeWay

CHUNK_ELEMENTS = 1 << 22
"""Numbers that are quantized at a time: bitsandbytes needs three times as much room as they take in float32."""
PACKED_ROWS = {torch.bfloat16: 4, torch.float32: 2}
"""Where nothing was measured, so many rows at most are multiplied by bytes as they are kept, more by unpacked ones."""
PACKED_COLUMNS = 64
"""torch's product with packed bytes reads beyond rows that are not multiples of this."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWays:
    """How one stage's matrices are multiplied on a processor."""

    slot: BatchSlot
    scratch: products.Scratch
    choice: "products.Choice[QuantizedWay] | None"
    """None: as where nothing was measured."""
    packing: BytePacking
    without: frozenset[str] = frozenset()
    """Native ways that are not used on this machine."""


class QuantizedMatrices(nn.Module, ABC):
    """Matrices [..., rows, columns] in fewer bits, to be had one at a time in the compute dtype."""

    kernel_way: ClassVar[NativeWay]
    unpacking_way: ClassVar[NativeWay] = NativeWay.LINEAR

    def __init__(self, packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.shape = shape
        self.dtype = dtype
        self.ways = QuantizedWays(BatchSlot(None), products.Scratch(), None, BytePacking())
        self.few_rows: FewRowsMatrix | None = None
        for parameter in (self.weight, self.scales):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined] # noqa: SLF001 - transformers' mark
        self._is_hf_initialized = True

    @classmethod
    @abstractmethod
    def of(cls, values: Tensor) -> "QuantizedMatrices":
        """Quantizes [..., rows, columns]."""

    @property
    @abstractmethod
    def is_stack(self) -> bool: ...

    @property
    @abstractmethod
    def has_kernel(self) -> bool:
        """Whether there is a product that takes them in another layout, here."""

    @abstractmethod
    def kernel_form(self, index: Index) -> tuple[Tensor, Tensor]:
        """Weights and scales of the matrix at `index` in that layout, in memory of their own."""

    def kept_form(self, index: Index) -> tuple[Tensor, Tensor]:
        """The same, of matrices that were brought into that layout."""
        return self.weight[index], self.scales[index]

    @abstractmethod
    def multiply_form(self, form: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        """Rows [count, columns] times the transposed matrix in that layout."""

    def __getitem__(self, index: Index) -> "Tensor | MatrixOfStack":
        """[rows, columns] in the compute dtype; of a stack, what stands for the one at `index`, and is multiplied as it
        is kept."""
        return self.unpacked() if index is ... else MatrixOfStack(self, index)

    def unpacked(self, index: Index = ...) -> Tensor:
        """[rows, columns] in the compute dtype, of a stack the one at `index`, in memory of its own."""
        return self.unpack(index, 0, self.shape[0], torch.empty(self.shape, dtype=self.dtype))

    @abstractmethod
    def unpack(self, index: Index, start: int, stop: int, into: Tensor) -> Tensor:
        """`into`, filled with the rows [start, stop) of the matrix at `index`. On processors."""

    @abstractmethod
    def part(self, division: Division) -> "QuantizedMatrices":
        """What one rank holds of them, each number as in the whole."""

    @abstractmethod
    def multiply_unmeasured(self, index: Index, inputs: Tensor) -> Tensor:
        """As `multiply` on processors: the same bits for the same inputs, however long what took."""

    @abstractmethod
    def multiply_on_gpu(self, inputs: Tensor, bias: Tensor | None, index: Index = ...) -> Tensor:
        """As `multiply`."""

    @abstractmethod
    def ways_here(self) -> "tuple[QuantizedWay, ...]":
        """What there is to choose from on this processor."""

    @abstractmethod
    def prepare(self) -> None:
        """Brings the matrices into the layout of that product, if it is what was chosen."""

    def chosen_ways(self) -> set[NativeWay]:
        """Names of the ways that were chosen, but for those by which unpacked parts are multiplied."""
        ways = {way for _, way in self.ways.choice or ()}
        found = {self.kernel_way} if by_kernel in ways else set()
        found |= {NativeWay.TORCH_BYTES} if _by_bytes in ways else set()
        return found or {self.unpacking_way} - self.ways.without

    def uses_kernel(self) -> bool:
        """Whether it is what was chosen."""
        return any(way is by_kernel for _, way in self.ways.choice or ())

    def multiply(self, inputs: Tensor, bias: Tensor | None, index: Index = ...) -> Tensor:
        """`inputs` [..., columns] times the transposed matrix at `index`, plus `bias`."""
        if inputs.device.type != "cpu":
            return self.multiply_on_gpu(inputs, bias, index)
        choice = self.ways.choice
        if choice is None and NativeWay.LINEAR in self.ways.without:
            rows = inputs.reshape(-1, inputs.shape[-1])
            product = self.ways_here()[0](self, index, rows).view(*inputs.shape[:-1], -1)
        elif choice is None or (self.ways.slot.bitwise and NativeWay.LINEAR not in self.ways.without):
            product = self.multiply_unmeasured(index, inputs)
        else:
            rows = inputs.reshape(-1, inputs.shape[-1])
            product = products.used_for(choice, len(rows))(self, index, rows).view(*inputs.shape[:-1], -1)
        return product if bias is None else product.add_(bias)

    def in_scratch(self, index: Index) -> Tensor:
        """The matrix at `index`, until the next product."""
        if self.weight.device.type != "cpu":
            return self.unpacked(index)
        return self.unpack(index, 0, self.shape[0], self.ways.scratch.take(self.shape, self.dtype))


QuantizedWay: TypeAlias = Callable[[QuantizedMatrices, Index, Tensor], Tensor]
"""Of matrices, the one at an index, and rows [count, columns]: [count, rows of the matrix]."""


def by_kernel(matrices: QuantizedMatrices, index: Index, rows: Tensor) -> Tensor:
    """Multiplies in the layout that the matrices were brought into."""
    if matrices.few_rows is not None and matrices.few_rows.takes(rows):
        return matrices.few_rows.product(rows)
    return matrices.multiply_form(matrices.kept_form(index), rows)


def _unpacking(dtype: torch.dtype, product: products.DenseProduct) -> QuantizedWay:
    """Unpacks in parts, to this dtype, and multiplies by each while it is in the processor's caches."""

    def multiply(matrices: QuantizedMatrices, index: Index, rows: Tensor) -> Tensor:
        def unpack(start: int, stop: int) -> Tensor:
            into = matrices.ways.scratch.take((stop - start, matrices.shape[1]), dtype)
            return matrices.unpack(index, start, stop, into)

        result = products.multiply_in_parts(rows, matrices.shape[0], dtype, unpack, product)
        return result.to(matrices.dtype)

    return multiply


def _unpacking_ways(dtype: torch.dtype, without: frozenset[str]) -> tuple[QuantizedWay, ...]:
    widened = tuple(_unpacking(torch.float32, product) for product in products.dense_products(without))
    if dtype is torch.float32:
        return widened
    plain = () if NativeWay.LINEAR in without else (_unpacking(dtype, nn.functional.linear),)
    return (*plain, widened[-1])


class Int8Matrices(QuantizedMatrices):
    """One byte for each number, [..., rows, columns]; `scales` [..., rows] are what a step of it is worth.

    They may be packed for oneDNN's integer product (see `int8_products`), each matrix of a stack by itself, in `each`.
    """

    by_bytes: ByteProducts | None = None
    kernel_way = NativeWay.ONEDNN_BYTES

    def __init__(self, packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__(packed, scales, shape, dtype)
        self.each: nn.ParameterList | None = None

    @classmethod
    def of(cls, values: Tensor) -> "Int8Matrices":
        rows, columns = values.shape[-2:]
        flat = values.reshape(-1, columns)
        packed = torch.empty(flat.shape, dtype=torch.int8, device=values.device)
        scales = torch.empty(len(flat), device=values.device)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            values_there = flat[part].float()  # bitsandbytes' kernel takes float16 alone; this is the same
            largest = values_there.abs().amax(dim=1)
            packed[part] = torch.round(values_there * (127.0 / largest.unsqueeze(-1)))
            scales[part] = largest / 127
        return cls(packed.view(values.shape), scales.view(values.shape[:-1]), (rows, columns), values.dtype)

    @property
    def is_stack(self) -> bool:
        return self.each is not None or self.weight.ndim > 2

    def unpacked(self, index: Index = ...) -> Tensor:
        return self._plain(index).to(self.dtype).mul_(self.scales[index].unsqueeze(-1).to(self.dtype))

    def unpack(self, index: Index, start: int, stop: int, into: Tensor) -> Tensor:
        scales = self.scales[index][start:stop].unsqueeze(-1)
        return into.copy_(self._plain(index)[start:stop]).mul_(scales.to(into.dtype))

    def _plain(self, index: Index) -> Tensor:
        if self.each is None:
            return int8_products.plain(self.weight) if self.weight.is_mkldnn else self.weight[index]
        if index is ...:
            return torch.stack([int8_products.plain(one) for one in self.each])
        return int8_products.plain(self.each[int(index)])

    @property
    def has_kernel(self) -> bool:
        dropped = NativeWay.ONEDNN_BYTES in self.ways.without
        return not dropped and self.ways.packing.takes(*self.shape, self.dtype)

    def kernel_form(self, index: Index) -> tuple[Tensor, Tensor]:
        return self.ways.packing.pack(self.weight.data[index]), self.scales[index]

    def kept_form(self, index: Index) -> tuple[Tensor, Tensor]:
        if self.each is None or index is ...:
            return self.weight, self.scales
        return self.each[int(index)], self.scales[index]

    def multiply_form(self, form: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        return byte_product(rows, *form)

    def prepare(self) -> None:
        if not self.uses_kernel() or self.weight.is_mkldnn or self.each is not None:
            return
        pack = self.ways.packing.pack
        if self.is_stack:
            packed = [nn.Parameter(pack(one), requires_grad=False) for one in self.weight.data]
            self.each = nn.ParameterList(packed)
            self.weight = nn.Parameter(self.weight.data.new_empty(0), requires_grad=False)
        else:
            self.weight = nn.Parameter(pack(self.weight.data), requires_grad=False)

    def part(self, division: Division) -> "Int8Matrices":
        packed = division.part(self.weight)
        by_rows = division.dimension == packed.ndim - 2
        scales = division.part(self.scales) if by_rows else self.scales.data
        return Int8Matrices(packed, scales, (packed.shape[-2], packed.shape[-1]), self.dtype)

    def multiply_on_gpu(self, inputs: Tensor, bias: Tensor | None, index: Index = ...) -> Tensor:
        return gpu_product(self.by_bytes, inputs, (self.weight[index], self.scales[index]), self.dtype, bias)

    def multiply_unmeasured(self, index: Index, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        by_bytes = self._has_whole_columns and NativeWay.TORCH_BYTES not in self.ways.without
        if len(rows) <= PACKED_ROWS.get(self.dtype, 0) and by_bytes and not self.is_stack:
            return _by_bytes(self, index, rows).view(*inputs.shape[:-1], self.shape[0])
        if self.dtype is torch.bfloat16 and not self.is_stack:
            # whole numbers to 127 are exact in it, and sums of them do not overflow
            whole = self.ways.scratch.take(self.shape, self.dtype).copy_(self.weight)
            return nn.functional.linear(inputs, whole).mul_(self.scales)
        return nn.functional.linear(inputs, self.in_scratch(index))

    @property
    def _has_whole_columns(self) -> bool:
        return self.shape[1] % PACKED_COLUMNS == 0

    def ways_here(self) -> tuple[QuantizedWay, ...]:
        # in float32 torch has no fast product with bytes
        takes = self._has_whole_columns and self.dtype is torch.bfloat16
        by_bytes = (_by_bytes,) if takes and NativeWay.TORCH_BYTES not in self.ways.without else ()
        return (*_unpacking_ways(self.dtype, self.ways.without), *by_bytes)


def _by_bytes(matrices: QuantizedMatrices, index: Index, rows: Tensor) -> Tensor:
    """Multiplies by bytes as they are kept."""
    return torch_byte_product(rows, matrices.weight[index], matrices.scales[index])


class Nf4Matrices(QuantizedMatrices):
    """Two numbers in a byte, [..., rows * columns / 2]; `scales` [..., rows * columns / BLOCK].

    Where `paneled`, both are in the layout that bitsandbytes' product takes (see `nf4_products`).
    """

    paneled = False
    kernel_way = NativeWay.BITSANDBYTES_PRODUCT
    unpacking_way = NativeWay.BITSANDBYTES

    @classmethod
    def of(cls, values: Tensor) -> "Nf4Matrices":
        from bitsandbytes.functional import quantize_4bit

        rows, columns = values.shape[-2:]
        flat = values.reshape(-1)
        packed = torch.empty(len(flat) // 2, dtype=torch.uint8, device=values.device)
        scales = torch.empty(len(flat) // BLOCK, device=values.device)
        for start in range(0, len(flat), CHUNK_ELEMENTS):
            stop = min(start + CHUNK_ELEMENTS, len(flat))
            part, state = quantize_4bit(flat[start:stop], blocksize=BLOCK, quant_type="nf4")
            packed[start // 2 : stop // 2] = part.view(-1)
            scales[start // BLOCK : stop // BLOCK] = state.absmax
        stack = values.shape[:-2]
        return cls(packed.view(*stack, -1), scales.view(*stack, -1), (rows, columns), values.dtype)

    def unpacked(self, index: Index = ...) -> Tensor:
        if NativeWay.BITSANDBYTES in self.ways.without:
            return self.unpack(index, 0, self.shape[0], torch.empty(self.shape, dtype=self.dtype))
        from bitsandbytes.functional import dequantize_4bit

        packed, scales = self._plain(index)
        # A row for each block: on CPUs, bitsandbytes gets blocks wrong that reach from one row into the next.
        blocks: Tensor = dequantize_4bit(packed.view(-1, 1), self._state(scales, (len(scales), BLOCK)))
        return blocks.view(self.shape)

    def unpack(self, index: Index, start: int, stop: int, into: Tensor) -> Tensor:
        columns = self.shape[1]
        packed, scales = self._plain(index)
        part = packed[start * columns // 2 : stop * columns // 2]
        fill = torch_unpack_into if NativeWay.BITSANDBYTES in self.ways.without else unpack_into
        return fill(into, part, scales[start * columns // BLOCK : stop * columns // BLOCK])

    def _plain(self, index: Index) -> tuple[Tensor, Tensor]:
        """Bytes and scales of one matrix as the quantizer makes them."""
        packed, scales = self.weight[index], self.scales[index]
        if not self.paneled:
            return packed, scales
        packed = packed.clone()
        nf4_products.from_panels(packed, *self.shape)
        return packed, scales.view(-1, self.shape[0]).t().float().reshape(-1)

    def kernel_form(self, index: Index) -> tuple[Tensor, Tensor]:
        return nf4_products.panels_of(self.weight.data[index], self.scales.data[index], *self.shape)

    def multiply_form(self, form: tuple[Tensor, Tensor], rows: Tensor) -> Tensor:
        return kernel_product(rows, *form, self.shape[0])

    def prepare(self) -> None:
        if self.paneled or not self.uses_kernel():
            return
        rows, columns = self.shape
        for one in self.weight.data.view(-1, rows * columns // 2):
            nf4_products.to_panels(one, rows, columns)
        scales = nf4_products.panel_scales(self.scales.data, rows)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.paneled = True

    def part(self, division: Division) -> "Nf4Matrices":
        """The parts' rows, like the whole's, have to be whole blocks (`refuse_parts`)."""
        stack, rows = self.weight.shape[:-1], self.shape[0]
        packed = division.part(self.weight.view(*stack, rows, -1))
        scales = division.part(self.scales.view(*stack, rows, -1))
        shape = (packed.shape[-2], 2 * packed.shape[-1])
        return Nf4Matrices(packed.view(*stack, -1), scales.view(*stack, -1), shape, self.dtype)

    def multiply_unmeasured(self, index: Index, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.in_scratch(index))

    def multiply_on_gpu(self, inputs: Tensor, bias: Tensor | None, index: Index = ...) -> Tensor:
        if not inputs.is_cuda or self.shape[-1] % BLOCK:
            return nn.functional.linear(inputs, self.unpacked(index), bias)
        from bitsandbytes import matmul_4bit

        weight, scales = self.weight[index], self.scales[index]
        return matmul_4bit(inputs, weight, self._state(scales, self.shape), bias=bias)  # type: ignore[no-any-return]

    @property
    def is_stack(self) -> bool:
        return self.weight.ndim > 1

    @property
    def has_kernel(self) -> bool:
        dropped = NativeWay.BITSANDBYTES_PRODUCT in self.ways.without
        return not dropped and kernel_takes(*self.shape, self.dtype)

    def ways_here(self) -> tuple[QuantizedWay, ...]:
        return _unpacking_ways(self.dtype, self.ways.without)

    def _state(self, scales: Tensor, shape: tuple[int, int]) -> Any:  # noqa: ANN401 - bitsandbytes' own
        from bitsandbytes.functional import QuantState

        return QuantState(
            absmax=scales, shape=torch.Size(shape), dtype=self.dtype, blocksize=BLOCK, quant_type="nf4"
        )
