"""What identifies a model, as one value that fits into a message."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    model_validator,
)

from molink.shards.checkpoint.model_files import TOKENIZER_FILES
from molink.shards.checkpoint.safetensors_header import DTYPE_BITS, StoreError, parse_json
from molink.shards.spec import DTYPE_BYTES, QUANTIZATIONS

MAX_MANIFEST_BYTES: Final = 2**20
MAX_LAYERS: Final = 1024
MAX_ELEMENTS: Final = 2**48
CONFIGURATION_FILES: Final = ("config.json", "generation_config.json")

Sha256 = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
Elements = Annotated[int, Field(ge=0, le=MAX_ELEMENTS)]
Settings = dict[str, JsonValue]


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TensorGroup(_Value):
    """The tensors that are loaded together: the embeddings, one decoder layer, or the head."""

    sha256: Sha256
    """Over the sorted (tensor name, stored dtype, shape, SHA-256 of its bytes)."""
    elements: dict[str, Elements]
    """Numbers held, by stored dtype as safetensors writes it (`BF16`); buffers that models recompute are left
    out.
    """
    matrix_elements: Elements
    """How many of them are in matrices, which quantization shrinks."""
    matrix_rows: Elements
    """Rows of these matrices; row-wise quantization keeps one scale for each."""

    @model_validator(mode="after")
    def _dtypes_exist(self) -> "TensorGroup":
        if not self.elements.keys() <= DTYPE_BITS.keys():
            raise ValueError("unknown stored dtype")
        return self


class Manifest(_Value):
    """Everything that identifies a model. Equal manifests are the same model, wherever the files lie.

    Anyone who holds it can say what each part of the model costs (`molink.shards.checkpoint.store.describe`) and can
    check the files that a stranger hands out.
    """

    format: Literal[1] = 1
    configuration: Settings
    """config.json without what changes from copy to copy."""
    generation: Settings | None
    """generation_config.json likewise."""
    embed: TensorGroup
    layers: Annotated[tuple[TensorGroup, ...], Field(min_length=1, max_length=MAX_LAYERS)]
    head: TensorGroup
    files: dict[str, Sha256]
    """SHA-256 of each tokenizer and chat template file, by name."""

    @model_validator(mode="after")
    def _files_are_known(self) -> "Manifest":
        if not self.files.keys() <= set(TOKENIZER_FILES):
            raise ValueError("a file is named that no tokenizer has")
        return self

    def to_bytes(self) -> bytes:
        """Canonical JSON: sorted keys, no spaces, ASCII only. Equal manifests give equal bytes."""
        return canonical_json(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes) -> "Manifest":
        """Read what `to_bytes` wrote. Raises `StoreError` for anything else, even for the same JSON spelled
        otherwise.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise StoreError(f"a manifest has at most {MAX_MANIFEST_BYTES} bytes, this one has {len(data)}.")
        parsed = parse_json(data, "the manifest")
        try:
            manifest = cls.model_validate_json(data)
        except (ValidationError, RecursionError) as error:
            raise StoreError(f"this is not a model's manifest: {_first(error)}.") from error
        if canonical_json(parsed) != data or manifest.to_bytes() != data:
            raise StoreError("the manifest is not in canonical form, so its hash would not be the model's.")
        return manifest

    @property
    def content_hash(self) -> str:
        """64 hexadecimal digits: the SHA-256 of `to_bytes()`."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


def canonical_json(value: Mapping[str, Any]) -> bytes:
    """The one spelling of a JSON object that hashes are taken of."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise StoreError(f"this cannot be written as canonical JSON: {error}.") from error


def model_hash(content_hash: str, dtype: str, quantization: str) -> str:
    """Content, dtype and quantization in 64 hexadecimal digits: equal hashes serve the same numbers."""
    if dtype not in DTYPE_BYTES or quantization not in QUANTIZATIONS:
        raise ValueError(f"no model is computed in {dtype!r} with quantization {quantization!r}")
    return hashlib.sha256(f"molink-model 1\n{content_hash}\n{dtype}\n{quantization}\n".encode()).hexdigest()


def group_digest(tensors: list[tuple[str, str, tuple[int, ...], str]]) -> str:
    """SHA-256 over (name, stored dtype, shape, SHA-256 of the bytes) of each tensor, in the order of the
    names.

    A peer that has loaded a layer's tensors compares this with the manifest before it announces the layer.
    """
    lines = [[name, dtype, list(shape), sha256] for name, dtype, shape, sha256 in sorted(tensors)]
    return hashlib.sha256(json.dumps(lines, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """A group's bytes in memory."""

    dense: int
    """Numbers that stay as they are in the compute dtype, integers in their own."""
    matrices: int
    """Matrices, in the compute dtype or quantized."""

    @property
    def total(self) -> int:
        return self.dense + self.matrices


def group_bytes(group: TensorGroup, dtype: str, quantization: str) -> GroupSizes:
    """What the group takes in memory.

    int8 keeps a byte per number of a matrix and a float32 scale per row; nf4 half a byte and a float32 scale
    for each 64 numbers (Dettmers et al., QLoRA, section 3).
    """
    floats = sum(count for stored, count in group.elements.items() if "F" in stored)
    others = sum(
        count * DTYPE_BITS[stored] // 8 for stored, count in group.elements.items() if "F" not in stored
    )
    matrix_elements = min(group.matrix_elements, floats)
    dense = (floats - matrix_elements) * DTYPE_BYTES[dtype] + others
    if quantization == "int8":
        matrices = matrix_elements + 4 * group.matrix_rows
    elif quantization == "nf4":
        matrices = -(-matrix_elements // 2) + 4 * -(-matrix_elements // 64)
    else:
        matrices = matrix_elements * DTYPE_BYTES[dtype]
    return GroupSizes(dense, matrices)


def _first(error: ValidationError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    details = error.errors(include_input=False, include_url=False)[0]
    return f"{'.'.join(str(part) for part in details['loc']) or 'it'}: {details['msg']}"
