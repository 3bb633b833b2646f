"""Weights in 8 or 4 bits: how they are kept, how they compute, and how matrices become such while they are read.

Only the matrices of decoder layers are quantized (`dimensions.is_quantizable` says which): embeddings, head, norms,
biases and the routers of experts stay in the compute dtype. Activations are never quantized, so that a row's result
does not depend on what it is batched with: LLM.int8() would look for outliers over all rows of a batch.

`nf4` is the NormalFloat of Dettmers et al., "QLoRA" (2023), section 3: 4 bits for each number and a float32 scale for
each BLOCK numbers, without double quantization. `int8` keeps the vector-wise absolute-maximum quantization of Dettmers
et al., "LLM.int8()" (2022), section 2.1, for the weights: 8 bits for each number and a float32 scale for each row.
bitsandbytes computes both.
"""

import ctypes
import importlib
import logging
import sys
from abc import ABC, abstractmethod
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from molink.shards.dimensions import is_quantizable
from molink.shards.errors import QuantizationUnavailable
from molink.shards.grouping import layer_of
from molink.shards.tensor_parallel import AllReduce, Division, PartialLinear, Shard
from molink.shards.text_part import text_config

BLOCK = 64
"""Numbers of a matrix that share a scale in nf4."""
CHUNK_ELEMENTS = 1 << 22
"""Numbers that are quantized at a time: bitsandbytes needs three times as much room as they take in float32."""
KEPT_FREED_BYTES = 1 << 26
"""Memory of unquantized matrices that the C library may keep for later; else it would end up with nearly all of it."""

PACKED_ROWS = {torch.bfloat16: 4, torch.float32: 2}
"""Up to so many rows a processor is faster at multiplying by bytes as they are kept than at unpacking them before: as
measured on an AMD EPYC with AVX-512."""
PACKED_COLUMNS = 64
"""torch's product with packed bytes reads beyond rows that are not multiples of this."""

Index = int | Tensor | EllipsisType


class QuantizedMatrices(nn.Module, ABC):
    """Matrices [..., rows, columns] in fewer bits, to be had one at a time in the compute dtype."""

    def __init__(self, packed: Tensor, scales: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.scales = nn.Parameter(scales, requires_grad=False)
        self.shape = shape
        self.dtype = dtype
        for parameter in (self.weight, self.scales):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined] # noqa: SLF001 - transformers' mark
        self._is_hf_initialized = True

    @classmethod
    @abstractmethod
    def of(cls, values: Tensor) -> "QuantizedMatrices":
        """Quantizes [..., rows, columns]."""

    @abstractmethod
    def __getitem__(self, index: Index) -> Tensor:
        """[rows, columns], of a stack the one at `index`, in the compute dtype."""

    @abstractmethod
    def part(self, division: Division) -> "QuantizedMatrices":
        """What one rank holds of them, each number as in the whole."""

    @abstractmethod
    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        """`inputs` [..., columns] times the transposed matrix, plus `bias`; not for stacks."""


def rounded_to_int8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Float32 [rows, columns] as int8, and the largest absolute value of each row, which becomes 127: bit for bit what
    `bitsandbytes.functional.int8_vectorwise_quant` gives on processors. On CUDA that takes float16 alone, which cannot
    hold all of bfloat16's numbers, so this is torch's on every device."""
    largest = rows.abs().amax(dim=1)
    return torch.round(rows * (127.0 / largest.unsqueeze(-1))).to(torch.int8), largest


class Int8Matrices(QuantizedMatrices):
    """One byte for each number, [..., rows, columns]; `scales` [..., rows] are what a step of it is worth."""

    @classmethod
    def of(cls, values: Tensor) -> "Int8Matrices":
        rows, columns = values.shape[-2:]
        flat = values.reshape(-1, columns)
        packed = torch.empty(flat.shape, dtype=torch.int8, device=values.device)
        scales = torch.empty(len(flat), device=values.device)
        step = max(1, CHUNK_ELEMENTS // columns)
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            packed[part], largest = rounded_to_int8(flat[part].float())
            scales[part] = largest / 127
        return cls(packed.view(values.shape), scales.view(values.shape[:-1]), (rows, columns), values.dtype)

    def __getitem__(self, index: Index) -> Tensor:
        return self.weight[index].to(self.dtype).mul_(self.scales[index].unsqueeze(-1).to(self.dtype))

    def part(self, division: Division) -> "Int8Matrices":
        packed = division.part(self.weight)
        by_rows = division.dimension == packed.ndim - 2
        scales = division.part(self.scales) if by_rows else self.scales.data
        return Int8Matrices(packed, scales, (packed.shape[-2], packed.shape[-1]), self.dtype)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        if inputs.device.type != "cpu":
            return nn.functional.linear(inputs, self[...], bias)
        if len(rows) <= PACKED_ROWS.get(self.dtype, 0) and self.shape[1] % PACKED_COLUMNS == 0:
            scales = self.scales.to(self.dtype)
            product: Tensor = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), self.weight, scales)  # noqa: SLF001 - torch's own name
            product = product.view(*inputs.shape[:-1], self.shape[0])
        elif (
            self.dtype is torch.bfloat16
        ):  # whole numbers to 127 are exact in it, and sums of them do not overflow
            product = nn.functional.linear(inputs, self.weight.to(self.dtype)).mul_(self.scales)
        else:
            return nn.functional.linear(inputs, self[...], bias)
        return product if bias is None else product.add_(bias)


class Nf4Matrices(QuantizedMatrices):
    """Two numbers in a byte, [..., rows * columns / 2]; `scales` [..., rows * columns / BLOCK]."""

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

    def __getitem__(self, index: Index) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        # A row for each block: on CPUs, bitsandbytes gets blocks wrong that reach from one row into the next.
        scales = self.scales[index]
        blocks: Tensor = dequantize_4bit(
            self.weight[index].view(-1, 1), self._state(scales, (len(scales), BLOCK))
        )
        return blocks.view(self.shape)

    def part(self, division: Division) -> "Nf4Matrices":
        """The parts' rows, like the whole's, have to be whole blocks (`refuse_parts`)."""
        stack, rows = self.weight.shape[:-1], self.shape[0]
        packed = division.part(self.weight.view(*stack, rows, -1))
        scales = division.part(self.scales.view(*stack, rows, -1))
        shape = (packed.shape[-2], 2 * packed.shape[-1])
        return Nf4Matrices(packed.view(*stack, -1), scales.view(*stack, -1), shape, self.dtype)

    def multiply(self, inputs: Tensor, bias: Tensor | None) -> Tensor:
        if not inputs.is_cuda or self.shape[-1] % BLOCK:
            return nn.functional.linear(inputs, self[...], bias)
        from bitsandbytes import matmul_4bit

        product: Tensor = matmul_4bit(inputs, self.weight, self._state(self.scales, self.shape), bias=bias)
        return product

    def _state(self, scales: Tensor, shape: tuple[int, int]) -> Any:  # noqa: ANN401 - bitsandbytes' own
        from bitsandbytes.functional import QuantState

        return QuantState(
            absmax=scales, shape=torch.Size(shape), dtype=self.dtype, blocksize=BLOCK, quant_type="nf4"
        )


_MATRICES: dict[str, type[QuantizedMatrices]] = {"int8": Int8Matrices, "nf4": Nf4Matrices}


def matrices_called(name: str) -> type[QuantizedMatrices]:
    """The kind of quantized matrices whose class has this name. Raises KeyError where there is none."""
    return {kind.__name__: kind for kind in _MATRICES.values()}[name]


class QuantizedLinear(nn.Module):
    """Computes as `nn.Linear` with a quantized matrix; with `all_reduce`, as `PartialLinear`."""

    def __init__(
        self, matrix: QuantizedMatrices, bias: nn.Parameter | None, all_reduce: AllReduce | None = None
    ) -> None:
        super().__init__()
        self.matrix = matrix
        self.bias = bias
        self._all_reduce = all_reduce
        self._is_hf_initialized = True

    @property
    def weight(self) -> nn.Parameter:
        """The packed matrix, for models that look at it before they run."""
        return self.matrix.weight

    def forward(self, inputs: Tensor) -> Tensor:
        if self._all_reduce is None:
            return self.matrix.multiply(inputs, self.bias)
        summed = self._all_reduce(self.matrix.multiply(inputs, None))
        return summed if self.bias is None else summed + self.bias


class StreamingQuantizer(HfQuantizer):  # type: ignore[misc] # transformers has no types
    """Quantizes each matrix as soon as transformers has read it, so that one at a time is in memory unquantized.

    One for each model that is loaded. With a `shard`, matrices are quantized whole, whose rows share scales, and only
    the rank's part of them is kept. Raises QuantizationUnavailable.
    """

    requires_calibration = False
    quantized_element_size = 0.0
    """Bytes that transformers sets aside on a GPU for each number before it reads any: none, each matrix brings its
    own."""

    def __init__(self, quantization: str, shard: Shard | None = None) -> None:
        super().__init__(QuantizationConfigMixin(quant_method=quantization), pre_quantized=False)
        try:
            _import_quietly()
        except ImportError as error:
            raise QuantizationUnavailable(quantization) from error
        self.mismatched: set[tuple[str, tuple[int, ...], tuple[int, ...]]] = set()
        """Name, stored shape, and the shape that the model has."""
        self._matrices = _MATRICES[quantization]
        self._shard = shard
        self._freed_bytes = 0

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_kwargs: object) -> bool:
        if layer_of(param_name) is None:
            return False
        path, _, last = param_name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters.get(last)  # noqa: SLF001 - torch has no public way to ask for one alone
        if parameter is None:
            return False
        division = self._division(model, param_name)
        shape = tuple(parameter.shape) if division is None else division.whole_shape(parameter.shape)
        return is_quantizable(param_name, shape) and (parameter.ndim == 3 or _multiplies(module))

    def refuse_parts(self, model: PreTrainedModel) -> None:
        """Raises ValueError where a rank's part would not be the whole's numbers: nf4 has a scale for each BLOCK."""
        if self._matrices is not Nf4Matrices or self._shard is None:
            return
        for name, parameter in model.named_parameters():
            divided = self._division(model, name) is not None and self.param_needs_quantization(model, name)
            if divided and parameter.shape[-1] % BLOCK:
                raise ValueError(
                    f"ranks cannot share {name} in nf4: its rows of {parameter.shape[-1]} numbers on each rank are no "
                    f"whole blocks of {BLOCK}; choose one device, or int8"
                )

    def _division(self, model: PreTrainedModel, name: str) -> Division | None:
        return None if self._shard is None else self._shard.division(text_config(model.config), name)

    def get_quantize_ops(self) -> "StreamingQuantizer":
        return self

    def convert(
        self, input_dict: dict[str, Any], *, model: PreTrainedModel, missing_keys: set[str], **_kwargs: object
    ) -> dict[str, Tensor]:
        """Puts the quantized matrices into the model; nothing is left for transformers to set."""
        for name, parts in input_dict.items():
            values: Tensor = parts[0] if isinstance(parts, list) else parts
            missing_keys.discard(name)
            path, _, last = name.rpartition(".")
            module = model.get_submodule(path)
            expected = getattr(module, last).shape
            division = self._division(model, name)
            expected = expected if division is None else division.whole_shape(expected)
            if values.shape != expected:
                self.mismatched.add((name, tuple(values.shape), tuple(expected)))
            elif _multiplies(module):
                matrix = self._matrices.of(values.T if isinstance(module, Conv1D) else values)
                matrix = matrix if division is None else matrix.part(division)
                all_reduce = getattr(module, "all_reduce", None)
                model.set_submodule(path, QuantizedLinear(matrix, module.bias, all_reduce))
            else:
                delattr(module, last)
                stack = self._matrices.of(values)
                setattr(
                    module, last, stack if division is None else stack.part(division)
                )  # taken by `[index]`
                module._is_hf_initialized = True  # noqa: SLF001 - transformers' mark
            self._freed_bytes += values.nbytes
        if self._freed_bytes > KEPT_FREED_BYTES:
            self._freed_bytes = 0
            return_freed_memory()
        return {}

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def _multiplies(module: nn.Module) -> bool:
    """Whether it multiplies by its matrix, adds its bias, and does nothing else but sum what ranks make of it."""
    return type(module) in (nn.Linear, PartialLinear, Conv1D) or type(module).__name__ == "FalconLinear"


def _import_quietly() -> None:
    """Imports bitsandbytes, without its warning about an optional kernel, which it would fetch from the Internet."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        importlib.import_module("bitsandbytes")
    finally:
        logger.setLevel(level)


def return_freed_memory() -> None:
    """Gives freed memory back to the operating system where its C library keeps it (Linux); others do so themselves."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
