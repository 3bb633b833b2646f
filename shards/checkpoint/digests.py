"""SHA-256 of every tensor in a file of weights, remembered so that a large model is read only once."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from molink.shards.checkpoint.model_files import open_own
from molink.shards.checkpoint.safetensors_header import StoredTensor, StoreError, read_header

READ_BYTES: Final = 2**22
_FORMAT: Final = 3

Progress = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


@dataclass(frozen=True, slots=True)
class KnownFile:
    """What is remembered of a file of weights that nobody has written to since."""

    digests: Mapping[str, str]
    """SHA-256 of its tensors, by name."""
    numbers: frozenset[str]
    """Those of its tensors that were looked through and hold no NaN."""


def known_file(path: Path, cache_dir: Path) -> KnownFile | None:
    """What `tensor_digests` and `remember_numbers` remember of this very file; None if nothing."""
    try:
        return _load(path, path.stat(), cache_dir)
    except OSError:
        return None


def remember_numbers(path: Path, cache_dir: Path, known: KnownFile, names: Iterable[str]) -> None:
    """Notes tensors that hold no NaN, unless the file has changed since it was `known`."""
    try:
        stat = path.stat()
    except OSError:
        return
    current = _load(path, stat, cache_dir)
    if current is not None and current.digests == known.digests:
        _save(path, stat, cache_dir, KnownFile(known.digests, current.numbers.union(names)))


def tensor_digests(
    path: Path, cache_dir: Path | None, progress: Progress
) -> tuple[tuple[StoredTensor, str], ...]:
    """Every tensor of the file with the SHA-256 of its bytes.

    A digest found under the file's path, size and modification time in `cache_dir` is believed; whoever can
    write there can change the weights too. Raises `StoreError` if the file is damaged or changes while it is
    read.
    """
    if not path.is_file():
        raise StoreError(f"{path} is not a file. Fetch the model again.")
    before = path.stat()
    tensors = read_header(path)
    cached = _load(path, before, cache_dir)
    if cached is not None and all(tensor.name in cached.digests for tensor in tensors):
        progress(before.st_size)
        return tuple((tensor, cached.digests[tensor.name]) for tensor in tensors)
    digests = tuple(
        (tensor, digest) for tensor, digest in zip(tensors, _stream(path, tensors, progress), strict=True)
    )
    after = path.stat()
    if _state(after) != _state(before):
        raise StoreError(f"{path} changed while it was read. Wait until it is complete and try again.")
    found = {tensor.name: digest for tensor, digest in digests}
    _save(path, before, cache_dir, KnownFile(found, frozenset()))
    return digests


def read_small(folder: Path, name: str, limit_bytes: int) -> bytes:
    """A small file of a model's folder.

    Raises `StoreError` if it is larger than `limit_bytes`, not a regular file, or not inside the folder.
    """
    with open_own(folder, name) as file:
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise StoreError(
            f"{folder / name} has more than {limit_bytes} bytes, which files of its kind never have."
        )
    return data


def _stream(path: Path, tensors: tuple[StoredTensor, ...], progress: Progress) -> list[str]:
    digests = []
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        for tensor in tensors:
            file.seek(tensor.start)
            digest = hashlib.sha256()
            left = tensor.stop - tensor.start
            while left:
                count = file.readinto(buffer[: min(left, READ_BYTES)])
                if not count:
                    raise StoreError(
                        f"{path} ended while tensor {tensor.name!r} was read. Fetch the file again."
                    )
                digest.update(buffer[:count])
                left -= count
                progress(count)
            digests.append(digest.hexdigest())
    return digests


def _cache_file(path: Path, cache_dir: Path) -> Path:
    return cache_dir / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()}.json"


def _load(path: Path, stat: os.stat_result, cache_dir: Path | None) -> KnownFile | None:
    """What was remembered of this very file; None if nothing or nothing readable was."""
    if cache_dir is None:
        return None
    try:
        remembered = json.loads(_cache_file(path, cache_dir).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(remembered, dict):
        return None
    digests, numbers = remembered.get("tensors"), remembered.get("numbers")
    known = (remembered.get("format"), remembered.get("state"))
    if known != (_FORMAT, _state(stat)) or not isinstance(digests, dict) or not isinstance(numbers, list):
        return None
    if not all(isinstance(text, str) for text in (*digests.values(), *numbers)):
        return None
    return KnownFile(digests, frozenset(numbers))


def _state(stat: os.stat_result) -> list[int]:
    """What changes when a file is written to: its time of change too, which cannot be set back as its time of
    modification can (on Windows it is the time of creation, and says less)."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _save(path: Path, stat: os.stat_result, cache_dir: Path | None, known: KnownFile) -> None:
    """Remembers it, all or nothing. On a full disk it is simply not remembered."""
    if cache_dir is None:
        return
    remembered = {
        "format": _FORMAT,
        "path": str(path),
        "state": _state(stat),
        "tensors": dict(known.digests),
        "numbers": sorted(known.numbers),
    }
    with contextlib.suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=cache_dir, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(remembered, file)
            Path(name).replace(_cache_file(path, cache_dir))
        except OSError:
            Path(name).unlink(missing_ok=True)
