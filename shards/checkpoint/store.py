"""Describe a model without loading it: its identity, and what each part of it costs.

Only headers and bytes of the files are read; torch is not needed.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from molink.shards.checkpoint.digests import read_small, tensor_digests
from molink.shards.checkpoint.dimensions import (
    Dimensions,
    dimensions,
    matrix_size,
    stated_dtype,
    stop_token_ids,
    stored_dtype,
)
from molink.shards.checkpoint.grouping import group_names, layer_of
from molink.shards.checkpoint.manifest import (
    CONFIGURATION_FILES,
    MAX_LAYERS,
    Manifest,
    Settings,
    TensorGroup,
    group_bytes,
    group_digest,
    model_hash,
)
from molink.shards.checkpoint.model_files import TOKENIZER_FILES, own_file
from molink.shards.checkpoint.safetensors_header import StoredTensor, StoreError, parse_json, weight_files
from molink.shards.checkpoint.stored_quantization import UnsupportedStorage, plain_shapes
from molink.shards.spec import DTYPE_BYTES, ModelSpec

__all__ = [
    "SMALL_FILES",
    "Manifest",
    "StoreError",
    "TensorGroup",
    "describe",
    "layer_of",
    "manifest_of",
    "model_hash",
    "read_manifest",
    "read_settings",
    "small_files",
]

SMALL_FILES: Final = (*CONFIGURATION_FILES, *TOKENIZER_FILES)
MAX_CONFIGURATION_BYTES: Final = 2**19
MAX_TOKENIZER_BYTES: Final = 2**26
_VOLATILE: Final = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"})
_STATE_BYTES: Final = DTYPE_BYTES["float32"]
_RECOMPUTED: Final = re.compile(r"(?:inv_freq|masked_bias)$")
_CAUSAL_MASK: Final = re.compile(r"\.att(?:n|ention)\.bias$")

Entry = tuple[StoredTensor, str]


def read_manifest(
    folder: Path, cache_dir: Path | None = None, progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Read what identifies the model in `folder` (Hugging Face format: config.json, safetensors, tokenizer).

    The weights are read once; their digests are kept in `cache_dir`. `progress(done_bytes, total_bytes)` is
    called as they are read. Raises `StoreError` if a file is missing, damaged or cut short. A tokenizer may
    be missing: peers need none.
    """
    _configuration(folder)  # without one, the weights need not be read
    paths, promised = weight_files(folder)
    total = sum(path.stat().st_size for path in paths)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(min(done, total), total)

    entries = [entry for path in paths for entry in tensor_digests(path, cache_dir, advance)]
    lost = promised - {tensor.name for tensor, _ in entries}
    if lost:
        raise StoreError(
            f"{folder} lacks {len(lost)} tensors that its index names, such as {min(lost)[:200]}. "
            "Its files are not of one version: fetch the model again."
        )
    return manifest_of(folder, entries)


def manifest_of(folder: Path, entries: list[Entry]) -> Manifest:
    """What identifies a model: the small files in `folder`, and its tensors with the SHA-256 of each.

    Raises `StoreError` if the files are damaged or the tensors are not those of one model.
    """
    configuration = _configuration(folder)
    embed, layers, head = _groups(folder, configuration, entries)
    return Manifest(
        configuration=configuration,
        generation=read_settings(folder / "generation_config.json"),
        embed=embed,
        layers=layers,
        head=head,
        files={name: digest for name, digest in small_files(folder).items() if name in TOKENIZER_FILES},
    )


def small_files(folder: Path) -> dict[str, str]:
    """The SHA-256 of each configuration, tokenizer and chat template file: what peers hand to clients, by
    hash. Raises `StoreError` for one that is not a regular file inside the folder.
    """
    files = {}
    for name in SMALL_FILES:
        if own_file(folder, name) is not None:
            limit = MAX_CONFIGURATION_BYTES if name in CONFIGURATION_FILES else MAX_TOKENIZER_BYTES
            files[name] = hashlib.sha256(read_small(folder, name, limit)).hexdigest()
    return files


def describe(
    source: Manifest | Path, dtype: str = "auto", quantization: str = "none", *, name: str | None = None
) -> ModelSpec:
    """What the model is and what each part costs in `dtype` and `quantization`.

    `dtype` "auto" is the configuration's, else that of the stored numbers. `name` is the label that people
    see; without one it is the folder's name, or the architecture's. A manifest from a stranger is enough: no
    file is read.
    """
    manifest = source if isinstance(source, Manifest) else read_manifest(source)
    label = name or (manifest_label(manifest) if isinstance(source, Manifest) else source.resolve().name)
    size = dimensions(manifest.configuration)
    if size.layers > len(manifest.layers):
        raise StoreError(
            f"config.json speaks of {size.layers} layers, the weights hold {len(manifest.layers)}. "
            "Parts of the model are missing: fetch it again."
        )
    dtype = resolve_dtype(manifest) if dtype == "auto" else dtype
    content_hash = manifest.content_hash
    embed_bytes, head_bytes = (
        group_bytes(group, dtype, "none").total for group in (manifest.embed, manifest.head)
    )
    return ModelSpec(
        model_hash=model_hash(content_hash, dtype, quantization),
        content_hash=content_hash,
        name=label,
        architecture=str(manifest.configuration.get("model_type")),
        layers=size.layers,
        hidden_size=size.hidden_size,
        vocabulary_size=size.vocabulary_size,
        context_length=size.context_length,
        dtype=dtype,
        quantization=quantization,
        layer_bytes=tuple(
            group_bytes(group, dtype, quantization).total for group in manifest.layers[: size.layers]
        ),
        embed_bytes=embed_bytes,
        head_bytes=head_bytes,
        kv_bytes_per_token=tuple(count * DTYPE_BYTES[dtype] for count in size.kv_elements),
        stop_token_ids=stop_token_ids(manifest.configuration, manifest.generation),
        kv_windows=size.kv_windows,
        shared_bytes=min(size.shared_elements * DTYPE_BYTES[dtype], embed_bytes, head_bytes),
        state_bytes=_state_bytes(size, dtype),
    )


def _state_bytes(size: Dimensions, dtype: str) -> tuple[int, ...]:
    sizes = [
        state.in_model_type * DTYPE_BYTES[dtype] + state.in_float32 * _STATE_BYTES for state in size.states
    ]
    return tuple(sizes) if any(sizes) else ()


def resolve_dtype(manifest: Manifest) -> str:
    """The dtype that "auto" means: the configuration's, else the stored numbers', else float32."""
    stated = stated_dtype(manifest.configuration)
    if stated in DTYPE_BYTES:
        return stated
    return stored_dtype(manifest.layers[0].elements) or "float32"


def manifest_label(manifest: Manifest) -> str:
    """A label for a model of which nobody has told the name."""
    return f"{manifest.configuration.get('model_type')}-{manifest.content_hash[:8]}"


def read_settings(path: Path) -> Settings | None:
    """A configuration file without the keys that differ from copy to copy; None if there is none."""
    if own_file(path.parent, path.name) is None:
        return None
    data = read_small(path.parent, path.name, MAX_CONFIGURATION_BYTES)
    parsed = parse_json(data, str(path), tag_infinities=True)
    if not isinstance(parsed, dict):
        raise StoreError(f"{path} is not a JSON object. Fetch the model again.")
    return {key: value for key, value in parsed.items() if key not in _VOLATILE}


def _configuration(folder: Path) -> Settings:
    configuration = read_settings(folder / "config.json")
    if configuration is None:
        raise StoreError(
            f"{folder} has no config.json, so it is no model in Hugging Face format. Check the path."
        )
    return configuration


def _groups(
    folder: Path, configuration: Settings, entries: list[Entry]
) -> tuple[TensorGroup, tuple[TensorGroup, ...], TensorGroup]:
    """The tensors as embeddings, layers and head."""
    by_name = {entry[0].name: entry for entry in entries}
    if len(by_name) != len(entries):
        raise StoreError(f"{folder} stores a tensor twice. Remove weight files that belong to another model.")
    groups = group_names(by_name, configuration)
    count = len(groups.layers)
    if not 1 <= count <= MAX_LAYERS or set(groups.layers) != set(range(count)):
        raise StoreError(
            f"{folder} holds {count} decoder layers, numbered up to {max(groups.layers, default=0)}; a model has 1 "
            f"to {MAX_LAYERS} without gaps. Parts may be missing: fetch the model again."
        )
    embed, head = ([by_name[name] for name in names] for names in (groups.embed, groups.head))
    layers = ([by_name[name] for name in groups.layers[index]] for index in range(count))
    try:
        return (
            _group(configuration, embed),
            tuple(_group(configuration, layer) for layer in layers),
            _group(configuration, head),
        )
    except UnsupportedStorage as error:
        raise StoreError(f"{folder} cannot be served: {error}.") from error


def _group(configuration: Settings, entries: list[Entry]) -> TensorGroup:
    elements: dict[str, int] = {}
    matrix_elements = matrix_rows = 0
    stored = [(tensor.name, tensor.dtype, tensor.shape) for tensor, _ in entries]
    for name, dtype, shape in plain_shapes(configuration, stored):
        if _RECOMPUTED.search(name) or (_CAUSAL_MASK.search(name) and len(shape) == 4):
            continue
        count = 1
        for size in shape:
            count *= size
        elements[dtype] = elements.get(dtype, 0) + count
        in_matrices, rows = matrix_size(name, shape)
        matrix_elements += in_matrices
        matrix_rows += rows
    digest = group_digest([(tensor.name, tensor.dtype, tensor.shape, sha256) for tensor, sha256 in entries])
    return TensorGroup(
        sha256=digest, elements=elements, matrix_elements=matrix_elements, matrix_rows=matrix_rows
    )
