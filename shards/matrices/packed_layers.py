"""Quantized layers in the store, so that each is read and quantized once: one file for each layer, all that it holds.

A file is a blob of the store, named by the SHA-256 of its bytes; a note says which blob is which layer of which model
in which quantization. Both are written here alone and never come from anybody else. What a file was made of was
verified against the model's manifest, whose hash is in the note's name: so a layer that is held packed needs nothing of
the checkpoint.
"""

import hashlib
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from molink.shards.checkpoint.safetensors_header import LENGTH_BYTES
from molink.shards.codec import dtype_of
from molink.shards.matrices.products import ALIGNED_BYTES, aligned
from molink.shards.matrices.quantize import QuantizedLinear, matrices_called
from molink.shards.matrices.quantized_matrices import QuantizedMatrices
from molink.shards.spec import ModelSpec, Span
from molink.shards.store.blob_part import stored_dtype
from molink.shards.store.blobs import BlobStore, InUse, StoreFull, hash_file

FORMAT: Final = 1
"""Of the files. Whoever changes how matrices are packed, or what a file says of them, counts it up."""
_NOTES: Final = "packed"
_UNFINISHED: Final = "packed-"
_HEADER_BYTES: Final = 2**20
"""More than what a file says of its tensors takes."""
_HASHED_AT_ONCE: Final = 4
_log = logging.getLogger(__name__)


class PackedUnusable(Exception):
    """A layer's packed file is not what it should be."""

    def __init__(self, layer: int, reason: str) -> None:
        super().__init__(f"the packed layer {layer} cannot be used: {reason}")
        self.layer = layer


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayers:
    """The packed layers of one model in one quantization. Threads may share it."""

    store: BlobStore
    """Open."""
    spec: ModelSpec

    @contextmanager
    def ready(self, span: Span) -> Iterator[Mapping[int, Path]]:
        """The files of those layers of `span` that are there, by layer. Each has been read and has the digest that was
        noted when it was written; others are removed. They stay until the context ends."""
        with self.store.using() as in_use:
            noted = {layer: note for layer in span if (note := self._note(layer)) is not None}
            there = self.store.take(dict(noted.values()), in_use)
            found = {layer: sha256 for layer, (sha256, _) in noted.items() if sha256 in there}
            with ThreadPoolExecutor(_HASHED_AT_ONCE) as pool:
                sound = dict(zip(found, pool.map(self._is_sound, found.values()), strict=True))
            for layer in (layer for layer, is_sound in sound.items() if not is_sound):
                _log.warning("the packed layer %d is damaged: it is made anew", layer)
            yield {layer: self.store.blob(sha256) for layer, sha256 in found.items() if sound[layer]}

    def keep(self, layer: int, module: nn.Module) -> None:
        """Stores a layer, all of it or nothing. Where there is no room it is simply not stored."""
        unfinished = self.store.unfinished(f"{_UNFINISHED}{uuid.uuid4().hex}")
        try:
            tensors, matrices = _taken_apart(module)
            with self.store.using() as in_use:
                self._write(layer, unfinished, tensors, matrices, in_use)
        except (OSError, StoreFull, SafetensorError, ValueError, RuntimeError) as error:
            _log.warning("layer %d is not kept packed: %s", layer, error)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def drop(self, layer: int) -> None:
        """Removes the layer's file."""
        note = self._note(layer)
        self.store.notes.write(_NOTES, self._key(layer), b"{}")
        if note is not None:
            with suppress(OSError):
                self.store.blob(note[0]).unlink(missing_ok=True)

    def clear_unfinished(self) -> None:
        """Removes what processes that were killed have left of packed layers; what living ones write stays."""
        self.store.drop_unfinished(_UNFINISHED)

    def _write(
        self,
        layer: int,
        unfinished: Path,
        tensors: dict[str, torch.Tensor],
        matrices: Mapping[str, Mapping[str, Any]],
        in_use: InUse,
    ) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values()) + _HEADER_BYTES
        self.store.reserve({unfinished: size}, in_use)
        write_aligned(unfinished, tensors, {"matrices": json.dumps(matrices)})
        sha256, size = hash_file(unfinished), unfinished.stat().st_size
        self.store.adopt({unfinished: sha256}, in_use)
        note = json.dumps({"sha256": sha256, "bytes": size}).encode()
        self.store.notes.write(_NOTES, self._key(layer), note)

    def _key(self, layer: int) -> str:
        what = (self.spec.model_hash, layer, self.spec.quantization, self.spec.dtype, FORMAT)
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()

    def _note(self, layer: int) -> tuple[str, int] | None:
        """SHA-256 and bytes of the layer's file, if one was written."""
        try:
            note = json.loads(self.store.notes.read(_NOTES, self._key(layer)) or b"{}")
            sha256, size = note["sha256"], note["bytes"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        is_right = (
            isinstance(size, int) and isinstance(sha256, str) and len(sha256) == 64 and sha256.isalnum()
        )
        return (sha256, size) if is_right else None

    def _is_sound(self, sha256: str) -> bool:
        return self.store.drop_damaged((sha256,)) == 0


def write_aligned(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Writes contiguous tensors of the host as a safetensors file, the same bytes for the same tensors.

    Tensors begin at multiples of ALIGNED_BYTES, behind them those whose size is none. safetensors' own writer promises
    multiples of 8 alone.

    Raises:
        ValueError: two of the tensors have memory in common, which the file could not say.
    """
    names = sorted(tensors, key=lambda name: _place_in_file(name, tensors[name]))
    _refuse_overlaps([tensors[name] for name in names])
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    stop = 0
    for name in names:
        tensor, start = tensors[name], stop
        stop += tensor.nbytes
        header[name] = {
            "dtype": stored_dtype(tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
    said = json.dumps(header).encode()
    said += b" " * (-(LENGTH_BYTES + len(said)) % ALIGNED_BYTES)
    with path.open("wb") as file:
        file.write(len(said).to_bytes(LENGTH_BYTES, "little"))
        file.write(said)
        for name in names:
            file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)


def _place_in_file(name: str, tensor: torch.Tensor) -> tuple[bool, int, str]:
    """Sorts what ends between two multiples of ALIGNED_BYTES behind everything else, by the size of its numbers."""
    return tensor.nbytes % ALIGNED_BYTES != 0, -tensor.itemsize, name


def _refuse_overlaps(tensors: Iterable[torch.Tensor]) -> None:
    """Raises ValueError where two of them have memory in common."""
    places = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.nbytes)
    if any(start + size > other for (start, size), (other, _) in pairwise(places)):
        raise ValueError("some of its tensors have memory in common")


def put_together(layer: int, module: nn.Module, path: Path, device: torch.device) -> None:
    """Fills a layer that was made without memory with what its file holds: mapped on processors, and copied where the
    file has it at an address that is not aligned.

    Raises:
        PackedUnusable: it does not hold what the layer needs.
    """
    try:
        with safe_open(path, framework="pt", device="cpu") as file:

            def tensor_of(name: str) -> torch.Tensor:
                tensor: torch.Tensor = file.get_tensor(name)
                return aligned(tensor) if device.type == "cpu" else tensor.to(device)

            said = file.metadata() or {}
            matrices: dict[str, dict[str, Any]] = json.loads(said.get("matrices", "null"))
            names = set(file.keys())
            for at, facts in matrices.items():
                own = {name: tensor_of(f"{at}.{name}") for name in facts["tensors"]}
                names -= {f"{at}.{name}" for name in facts["tensors"]}
                kind = matrices_called(facts["kind"])
                rows, columns = facts["shape"]
                matrix = kind(own["weight"], own["scales"], (rows, columns), dtype_of(facts["dtype"]))
                _place(module, at, matrix, multiplies=facts["multiplies"])
            for name in names:
                _set(module, name, tensor_of(name))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise PackedUnusable(layer, str(error)) from error
    missing = [name for name, tensor in _tensors(module) if tensor.is_meta]
    if missing:
        raise PackedUnusable(layer, f"it lacks {missing[0]}")
    module.eval()


def _taken_apart(module: nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    """All tensors of a layer by name, on the host, and what its quantized matrices are by theirs."""
    matrices: dict[str, dict[str, Any]] = {}
    for at, matrix in module.named_modules():
        if isinstance(matrix, QuantizedMatrices):
            own = [name for name, _ in _tensors(matrix)]
            if sorted(own) != ["scales", "weight"]:
                raise ValueError(f"{at} consists of {own}")
            matrices[at] = {
                "kind": type(matrix).__name__,
                "shape": list(matrix.shape),
                "dtype": str(matrix.dtype).removeprefix("torch."),
                "multiplies": isinstance(module.get_submodule(at.rpartition(".")[0]), QuantizedLinear),
                "tensors": own,
            }
    return {name: tensor.detach().cpu().contiguous() for name, tensor in _tensors(module)}, matrices


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _place(layer: nn.Module, at: str, matrix: QuantizedMatrices, *, multiplies: bool) -> None:
    """Puts a matrix where its layer had the unquantized one."""
    path, _, last = at.rpartition(".")
    owner = layer.get_submodule(path)
    if multiplies:
        layer.set_submodule(path, QuantizedLinear(matrix, owner.bias, None))  # type: ignore[arg-type]
    else:
        delattr(owner, last)
        setattr(owner, last, matrix)


def _set(layer: nn.Module, name: str, tensor: torch.Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = layer.get_submodule(path)
    if last in owner._buffers:  # noqa: SLF001 - torch has no public way to ask which of the two it is
        owner._buffers[last] = tensor  # noqa: SLF001 - as above
    elif last in owner._parameters:  # noqa: SLF001 - as above
        setattr(owner, last, nn.Parameter(tensor, requires_grad=False))
    else:
        raise KeyError(f"the layer has no {name}")
