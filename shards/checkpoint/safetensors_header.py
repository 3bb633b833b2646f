"""What a safetensors file says about its tensors, read without its numbers and without trusting any length in
it.

The format: 8 bytes, the header's length as a little-endian integer; the header, a JSON object; the tensors'
bytes.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""
MAX_DIMENSIONS: Final = 8
MAX_TENSOR_BYTES: Final = 2**44
DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


class StoreError(ValueError):
    """A model's files are missing, damaged or not what they say."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file; its bytes are [start, stop) of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


INFINITIES = ("Infinity", "-Infinity")
INFINITY_TAG = "__float__"
"""Transformers' way to say in JSON that a number is infinite: an object with this key and one of those values."""


def parse_json(data: bytes | str, what: str, *, tag_infinities: bool = False) -> Any:  # noqa: ANN401 - JSON has any shape
    """Strict JSON: no duplicate keys, no NaN or Infinity, no nesting without end. Raises `StoreError` naming
    `what`. With `tag_infinities`, infinite numbers come back as transformers writes them.
    """

    def refuse_constant(constant: str) -> dict[str, str]:
        if tag_infinities and constant in INFINITIES:
            return {INFINITY_TAG: constant}
        raise StoreError(f"{what} holds {constant}, which is no finite number. Fetch the model again.")

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise StoreError(f"{what} names the same key twice. Fetch the model again.")
        return made

    try:
        parsed = json.loads(data, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates)
    except StoreError:
        raise
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{what} is not JSON ({error}). It is damaged: fetch the model again.") from error
    return parsed


def read_header(path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of the file in the order of their bytes.

    Raises `StoreError` if the file is cut short, if its header is damaged, or if tensors overlap, leave gaps
    or lie beyond the file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            data = file.read(header_length(str(path), prefix, size))
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror or error}.") from error
    return parse_header(str(path), data, size)


def header_length(what: str, prefix: bytes, size: int) -> int:
    """Bytes of the header that follows the first LENGTH_BYTES of a file of `size` bytes.

    Raises `StoreError` naming `what` if such a file cannot have it.
    """
    length = int.from_bytes(prefix, "little")
    if len(prefix) != LENGTH_BYTES or length > size - LENGTH_BYTES or length > MAX_HEADER_BYTES:
        raise StoreError(
            f"{what} is not a whole safetensors file: its header should be {length} bytes long, the "
            f"file has {size}. The download was probably cut short: fetch the file again."
        )
    return length


def parse_header(what: str, data: bytes, size: int) -> tuple[StoredTensor, ...]:
    """As `read_header`, from the header's bytes of a file of `size` bytes. `what` is how errors call it."""
    header = parse_json(data, f"the header of {what}")
    if not isinstance(header, dict):
        raise StoreError(f"the header of {what} is not a JSON object. Fetch the file again.")
    start = LENGTH_BYTES + len(data)
    tensors = [_entry(what, name, value, start) for name, value in header.items() if name != "__metadata__"]
    return _contiguous(what, tensors, start, size)


def _entry(what: str, name: str, value: object, data_start: int) -> StoredTensor:
    """One header entry, checked by itself."""
    damaged = StoreError(
        f"the header of {what} describes tensor {name[:200]!r} wrongly. Fetch the file again."
    )
    if not isinstance(value, dict):
        raise damaged
    dtype, shape, offsets = value.get("dtype"), _sizes(value.get("shape")), _sizes(value.get("data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS or shape is None or offsets is None:
        raise damaged
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if len(offsets) != 2 or bits % 8 or bits // 8 > MAX_TENSOR_BYTES or offsets[1] - offsets[0] != bits // 8:
        raise damaged
    return StoredTensor(name, dtype, shape, data_start + offsets[0], data_start + offsets[1])


def _sizes(value: object) -> tuple[int, ...] | None:
    """A list of few integers that sizes may have, as a tuple; None if it is anything else."""
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        return None
    if not all(type(size) is int and 0 <= size <= MAX_TENSOR_BYTES for size in value):
        return None
    return tuple(value)


def _contiguous(
    what: str, tensors: Iterable[StoredTensor], start: int, size: int
) -> tuple[StoredTensor, ...]:
    """The tensors sorted, after checking that they fill the file exactly."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop, tensor.name))
    for tensor in ordered:
        if tensor.start != start:
            raise StoreError(
                f"{what} is damaged: tensor {tensor.name[:200]!r} starts at byte {tensor.start}, not at "
                f"{start}. "
                "Fetch the file again."
            )
        start = tensor.stop
    if start != size:
        raise StoreError(
            f"{what} has {size} bytes, its header promises {start}. The download was probably cut short: "
            "fetch the file again."
        )
    return tuple(ordered)


def weight_files(folder: Path) -> tuple[tuple[Path, ...], frozenset[str]]:
    """The safetensors files of a model folder, and the tensors that its index says they hold (none without
    index).

    Raises `StoreError` if there is none, if the index is damaged or names a file that is missing or outside.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if single.is_file():
            return (single,), frozenset()
        raise StoreError(
            f"{folder} has no weights: neither model.safetensors nor model.safetensors.index.json is there. "
            "Models in other formats must be converted to safetensors first."
        )
    weight_map = read_index(index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise StoreError(
            f"{folder} lacks {len(missing)} of {len(names)} weight files, first {missing[0]}. "
            "The download was probably interrupted: fetch the model again."
        )
    return tuple(folder / name for name in names), frozenset(weight_map)


def read_index(path: Path) -> dict[str, str]:
    """Tensor name to file name, of a `model.safetensors.index.json`."""
    if path.stat().st_size > MAX_HEADER_BYTES:
        raise StoreError(f"{path} is larger than an index can be. Fetch the model again.")
    index = parse_json(path.read_bytes(), str(path))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise StoreError(f"{path} has no weight_map. Fetch the model again.")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or is_unsafe_name(name):
            raise StoreError(
                f"{path} says that {tensor[:200]!r} is in {str(name)[:200]!r}, which is no file beside it."
            )
    return weight_map


def is_unsafe_name(name: str) -> bool:
    """Whether joining it to a folder could lead outside the folder, on any system."""
    return name in ("", ".", "..") or any(mark in name for mark in ("/", "\\", ":", "\0", os.sep))
