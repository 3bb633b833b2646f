"""Checkpoints whose weights arrive quantized: which of them can be served, and which matrices their tensors stand for.

AWQ, GPTQ and block-wise fp8 are formats on disk only: a peer unpacks a matrix as it reads it (`unpacking.py`) and keeps
it in the compute dtype, or in int8 or nf4. So every device serves them, without the kernels that were written for
them. Every other quantized tensor is refused: without its scales it would be loaded as other numbers. No torch here: a
manifest of such a checkpoint counts the matrices, not what they are packed into.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

WORD_BITS = 32
"""Numbers are packed into int32."""
_KEY: Final = "quantization_config"
_SUFFIX = {"awq": ".qweight", "gptq": ".qweight", "fp8": ".weight_scale_inv"}
"""What the name of one tensor of each packed matrix ends with."""

_NARROW_FLOATS: Final = ("F8_", "F6_", "F4")
"""Their numbers span so little that no model stores matrices in them without scales."""
_PACKED_INTEGERS: Final = frozenset({"I8", "U8", "I16", "U16", "U32"})
_WORDS: Final = re.compile(r"weight|pack|zeros|proj")
"""Found in the names of matrices that are packed into int32; tables of token ids have that type as well."""
_OF_QUANTIZATION: Final = re.compile(
    r"scale|scb|zero_?point|zeros|quant|absmax|amax|codebook|packed", re.IGNORECASE
)
_OF_ACTIVATIONS: Final = re.compile(
    r"(?:^|_)(?:input|output|act|activation|[qkv]|kv|prob)(?:_global)?_(?:scale|zero_point)\w*$"
)
"""Tensors that say how others round activations, keys and values; the weights are what they are without them."""
_ADVICE: Final = "use the checkpoint with plain weights and --quantization int8 or nf4"


class UnsupportedStorage(ValueError):
    """Weights are stored in a way that is not known here; the message is a clause about the model."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """How a checkpoint's matrices are packed."""

    method: str
    """`awq`, `gptq` or `fp8`."""
    bits: int
    group_size: int
    """Inputs that share a scale, of awq and gptq; -1: all."""
    zero_offset: int
    """What is added to stored zero points: the first GPTQ format keeps them less one."""
    block: tuple[int, int]
    """Rows and columns that share a scale, of fp8."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix and where it comes from."""

    name: str
    """`....weight`, as in the checkpoint with plain weights."""
    shape: tuple[int, int]
    dtype: str
    """That of the numbers before they were quantized, or close to it, as safetensors writes it."""
    parts: tuple[str, ...]
    """Names of the tensors that it is packed into."""


def stored_quantization(configuration: Mapping[str, Any]) -> StoredQuantization | None:
    """How the weights that `config.json` describes are packed; None: they are plain.

    Raises:
        UnsupportedStorage: in a way that is not known here.
    """
    text = configuration.get("text_config")
    places = (configuration, text if isinstance(text, Mapping) else getattr(text, "__dict__", {}))
    settings = next((place[_KEY] for place in places if place.get(_KEY) is not None), None)
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        raise UnsupportedStorage("its quantization_config is not an object")
    method = str(settings.get("quant_method"))
    if method not in _SUFFIX:
        raise UnsupportedStorage(
            f"its weights are stored quantized as {method[:40]!r}, and of such only awq, gptq and fp8 are served; "
            f"{_ADVICE}"
        )
    bits = settings.get("bits", 8 if method == "fp8" else 4)
    version, form = (
        str(settings.get(key, usual)) for key, usual in (("version", "gemm"), ("checkpoint_format", "gptq"))
    )
    group = settings.get("group_size", 128)
    block = settings.get("weight_block_size") or (0, 0)
    if method == "awq" and (bits != 4 or version.lower() != "gemm"):
        raise UnsupportedStorage(
            f"its awq weights have {bits} bits in version {version}; only 4 bits in gemm are served"
        )
    if method == "gptq" and (bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2")):
        raise UnsupportedStorage(
            f"its gptq weights have {bits} bits in format {form}; only 2, 4 and 8 bits are served"
        )
    if not isinstance(group, int) or (group < 1 and group != -1):
        raise UnsupportedStorage(f"its groups have {group!r} weights")
    if (
        not isinstance(block, list | tuple)
        or len(block) != 2
        or not all(isinstance(size, int) and size >= 0 for size in block)
    ):
        raise UnsupportedStorage(f"its blocks are {repr(block)[:80]}")
    return StoredQuantization(method, bits, group, int(method == "gptq" and form == "gptq"), tuple(block))


def packed_matrices(
    stored: StoredQuantization, tensors: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, PackedMatrix]:
    """The packed matrices among `tensors` (name -> dtype and shape), by name. The rest are plain tensors.

    Raises:
        UnsupportedStorage: a part of one is missing or has no such shape.
    """
    found: dict[str, PackedMatrix] = {}
    suffix = _SUFFIX[stored.method]
    for name in tensors:
        if not name.endswith(suffix):
            continue
        base = name.removesuffix(suffix)
        parts = _parts(stored, base, tensors)
        absent = [part for part in parts if part not in tensors]
        if absent:
            raise UnsupportedStorage(f"{name} is there without {absent[0]}")
        weight = f"{base}.weight"
        dtype, shape = tensors[weight] if stored.method == "fp8" else tensors[name]
        if len(shape) != 2:
            raise UnsupportedStorage(f"{name} belongs to no matrix")
        if stored.method != "fp8":
            packed = WORD_BITS // stored.bits
            rows, columns = shape
            shape = (columns * packed, rows) if stored.method == "awq" else (columns, rows * packed)
            dtype = tensors[f"{base}.scales"][0]
        else:
            dtype = "BF16"
        _check_scales(stored, parts, (shape[0], shape[1]), tensors)
        found[weight] = PackedMatrix(weight, (shape[0], shape[1]), dtype, parts)
    return found


def plain_shapes(
    configuration: Mapping[str, Any], tensors: Iterable[tuple[str, str, tuple[int, ...]]]
) -> Iterable[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape) of tensors as they are once they are unpacked.

    Raises:
        UnsupportedStorage: as above, or a tensor stays quantized.
    """
    stored = stored_quantization(configuration)
    by_name = {name: (dtype, shape) for name, dtype, shape in tensors}
    matrices = {} if stored is None else packed_matrices(stored, by_name)
    packed = {part for matrix in matrices.values() for part in matrix.parts}
    plain = [(name, *what) for name, what in by_name.items() if name not in packed]
    for name, dtype, shape in plain:
        if _is_quantized(name, dtype, shape):
            form = (
                "as MLX does it" if isinstance(configuration.get("quantization"), Mapping) else f"to {dtype}"
            )
            raise UnsupportedStorage(
                f"{name} is quantized {form}, and its scales would not be applied; {_ADVICE}"
            )
    return [*plain, *((matrix.name, matrix.dtype, matrix.shape) for matrix in matrices.values())]


def unused_refusal(names: Iterable[str]) -> str | None:
    """Why a model is refused that has not used the tensors of these names; None where it needs none of them."""
    ends = ((name, name.rpartition(".")[2]) for name in sorted(names))
    unused = [name for name, end in ends if _OF_QUANTIZATION.search(end) and not _OF_ACTIVATIONS.search(end)]
    if not unused:
        return None
    rest = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    return f"{unused[0]}{rest} would not be applied, so that weights would be other numbers; {_ADVICE}"


def _is_quantized(name: str, dtype: str, shape: tuple[int, ...]) -> bool:
    """True if the tensor, as it is, stands for other numbers. Masks of attention have the shape [1, 1, n, n]."""
    if dtype.startswith(_NARROW_FLOATS):
        return True
    if len(shape) < 2 or shape[:2] == (1, 1):
        return False
    return dtype in _PACKED_INTEGERS or (
        dtype == "I32" and _WORDS.search(name.rpartition(".")[2]) is not None
    )


def _check_scales(
    stored: StoredQuantization,
    parts: tuple[str, ...],
    shape: tuple[int, int],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
) -> None:
    """Raises UnsupportedStorage where there is not one scale for each block or group of the matrix."""
    rows, columns = shape
    if stored.method == "fp8":
        name = parts[1]
        found = tensors[name][1]
        if all(size == 1 for size in found):
            return
        high, wide = stored.block
        expected = (-(-rows // high), -(-columns // wide)) if high and wide else (1,)
    else:
        name = parts[2]
        found = tensors[name][1]
        expected = (1 if stored.group_size == -1 else -(-columns // stored.group_size), rows)
    if found != expected:
        raise UnsupportedStorage(
            f"{name} has the shape {list(found)} and not {list(expected)}, as quantization_config says; {_ADVICE}"
        )


def _parts(stored: StoredQuantization, base: str, tensors: Mapping[str, object]) -> tuple[str, ...]:
    if stored.method == "fp8":
        return (f"{base}.weight", f"{base}.weight_scale_inv")
    parts = (f"{base}.qweight", f"{base}.qzeros", f"{base}.scales")
    order = f"{base}.g_idx"
    return (*parts, order) if order in tensors else parts
