"""Tensors of a folder that are read when they are needed, and how much of them has been."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from molink.shards.checkpoint.safetensors_header import StoreError, read_header
from molink.shards.checkpoint.verification import Fingerprints
from molink.shards.errors import WeightsError, name_some
from molink.shards.store.blob_part import CACHE_LINE_BYTES, FilePart
from molink.shards.store.known_weights import KnownWeights

Progress = Callable[[int, int], None]
"""Called with the bytes loaded so far and in all, in memory. From any thread, one call at a time."""

_SUMMED = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})


def open_tensors(folder: Path, known: KnownWeights | None = None) -> tuple[dict[str, FilePart], list[str]]:
    """Every tensor in the folder's readable safetensors files, and what is wrong with other files. `known` finds out
    which of them are remembered."""
    tensors: dict[str, FilePart] = {}
    unreadable: list[str] = []
    for path in _weight_files(folder):
        try:
            header = read_header(path)
            if known is not None:
                known.look_up(path)
        except (StoreError, OSError) as error:
            unreadable.append(f"{path.name} is truncated or altered: {error}")
            continue
        tensors |= {tensor.name: FilePart(path, tensor) for tensor in header}
    if not tensors:
        raise WeightsError(folder, "; ".join(unreadable) or "there are no safetensors files in it")
    return tensors, unreadable


def _weight_files(folder: Path) -> list[Path]:
    """Those that the index names and that are here, or all where there is no index."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(folder, f"{index.name} is not a safetensors index: {error!r}") from error
    outside = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if outside:
        raise WeightsError(folder, f"{index.name} names files outside the folder: {outside[0]!r}")
    return sorted(path for name in names if (path := folder / name).exists())


class LoadCounter:
    """How much of a partial model has been read. Transformers reads tensors from several threads."""

    def __init__(self, progress: Progress | None, element_bytes: int) -> None:
        self.expected_elements = 0
        self.used: set[str] = set()
        """Names of the tensors that have been read."""
        self._progress = progress
        self._element_bytes = element_bytes
        self._elements = 0
        self._not_numbers: set[str] = set()
        self._lock = threading.Lock()

    def use(self, name: str) -> None:
        with self._lock:
            self.used.add(name)

    def add(self, elements: int) -> None:
        if self._progress is None:
            return
        with self._lock:
            self._elements = min(self._elements + elements, self.expected_elements - 1)
            self._progress(self._elements * self._element_bytes, self.expected_elements * self._element_bytes)

    def inspect(self, name: str, tensor: torch.Tensor) -> None:
        """Notes a tensor that holds NaN. Only where its sum is NaN is a second look, which takes memory, needed."""
        if tensor.dtype in _SUMMED and bool(tensor.sum().isnan()) and bool(tensor.isnan().any()):
            with self._lock:
                self._not_numbers.add(name)

    def refuse_not_numbers(self, folder: Path) -> None:
        """Raises WeightsError if a tensor held NaN."""
        if self._not_numbers:
            message = f"tensors hold what is not a number (NaN): {name_some(self._not_numbers)}"
            raise WeightsError(
                folder, f"{message}. The checkpoint is broken: fetch it again", self._not_numbers
            )

    def finish(self) -> None:
        if self._progress is not None:
            total = self.expected_elements * self._element_bytes
            self._progress(total, total)


class CountedTensor:
    """A tensor still on disk, in the form in which transformers takes tensors that it reads when needed.

    What is read is in memory of its own, so that a stage neither changes nor crashes when the file does; except what
    was verified before (`known`) in a file that nobody has written to since: that is used where it lies.
    """

    def __init__(
        self,
        name: str,
        part: Any,  # noqa: ANN401 - untyped
        counter: LoadCounter,
        fingerprints: Fingerprints | None,
        known: KnownWeights | None = None,
    ) -> None:
        self._name = name
        self._part = part
        self._counter = counter
        self._fingerprints = fingerprints
        self._known = known

    def __getitem__(self, index: object) -> torch.Tensor:
        self._counter.use(self._name)
        digest = None if self._known is None else self._known.digest(self._name)
        if self._known is None or digest is None:
            whole: torch.Tensor = self._part[...]
            if self._fingerprints is not None:
                self._fingerprints.add(self._name, self._part, whole)
        else:
            whole = self._known.whole(self._part)
            if self._fingerprints is not None:
                self._fingerprints.trust(self._name, self._part, digest)
        read: torch.Tensor = whole if index is ... else _copy_in_phase(whole[index])  # type: ignore[index] # a slice
        self._counter.add(read.numel())
        if self._known is None or not self._known.holds_numbers(self._name):
            self._counter.inspect(self._name, read)
        return read

    def get_shape(self) -> list[int]:
        shape: list[int] = self._part.get_shape()
        return shape

    def get_dtype(self) -> str:
        dtype: str = self._part.get_dtype()
        return dtype


def _copy_in_phase(part: torch.Tensor) -> torch.Tensor:
    """A copy that begins as many bytes after a cache line as the original: matrix kernels round differently by that."""
    raw = torch.empty(part.nbytes + CACHE_LINE_BYTES, dtype=torch.uint8)
    start = (part.data_ptr() - raw.data_ptr()) % CACHE_LINE_BYTES
    if start % part.itemsize or part.numel() == 0:
        return part.clone()
    return raw[start : start + part.nbytes].view(part.dtype).view(part.shape).copy_(part)
