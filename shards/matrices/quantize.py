"""Weights in 8 or 4 bits: which of a model's matrices become such, while they are read.

Only the matrices of decoder layers are quantized (`dimensions.is_quantizable` says which): embeddings, head, norms,
biases and the routers of experts stay in the compute dtype.
"""

import ctypes
import importlib
import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from molink.safe_import import import_refusal
from molink.shards.checkpoint.dimensions import is_quantizable
from molink.shards.checkpoint.grouping import layer_of
from molink.shards.errors import QuantizationUnavailable
from molink.shards.matrices.nf4_products import BLOCK
from molink.shards.matrices.quantized_matrices import Int8Matrices, Nf4Matrices, QuantizedMatrices
from molink.shards.model.tensor_parallel import AllReduce, Division, PartialLinear, Shard
from molink.shards.model.text_backbone import text_config

KEPT_FREED_BYTES = 1 << 26
"""Memory of unquantized matrices that the C library may keep for later; else it would end up with nearly all of it."""

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

    @property
    def is_whole(self) -> bool:
        """Whether no rank has another part of it."""
        return self._all_reduce is None


def joined(layers: Sequence[nn.Module]) -> QuantizedLinear | None:
    """One layer for several that take the same inputs, its outputs one after the other; None where they are not
    quantized, or not alike. On processors; before products are installed."""
    own = [layer for layer in layers if isinstance(layer, QuantizedLinear) and layer.is_whole]
    biases = [layer.bias for layer in own if layer.bias is not None]
    matrices = [layer.matrix for layer in own]
    kinds = {(type(one), one.dtype, one.shape[1], one.is_stack) for one in matrices}
    if len(own) < len(layers) or len(kinds) > 1 or len(biases) not in (0, len(own)):
        return None
    kind, first = type(matrices[0]), matrices[0]
    rows = sum(one.shape[0] for one in matrices)
    weight = torch.cat([one.weight.data for one in matrices])
    scales = torch.cat([one.scales.data for one in matrices])
    bias = nn.Parameter(torch.cat([one.data for one in biases]), requires_grad=False) if biases else None
    return QuantizedLinear(kind(weight, scales, (rows, first.shape[1]), first.dtype), bias)


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
        refusal = import_refusal("bitsandbytes", "choose --quantization none")
        if refusal is not None:
            raise QuantizationUnavailable(quantization, refusal)
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
