"""What earlier starts found out about the tensors of a folder or of the store, while nobody writes to their files."""

from collections.abc import Mapping
from pathlib import Path

import torch

from molink.shards.checkpoint.digests import KnownFile, known_file, remember_numbers
from molink.shards.checkpoint.verification import StoredPart
from molink.shards.store.blob_part import CACHE_LINE_BYTES, BlobPart, FilePart, map_file
from molink.shards.store.known_blobs import FileState, file_state


class KnownWeights:
    """The tensors of the files that were looked up. Threads may ask at once."""

    def __init__(self, cache_dir: Path) -> None:
        """`cache_dir` is where `digests.tensor_digests` remembers what it has read."""
        self._cache_dir = cache_dir
        self._files: dict[Path, KnownFile] = {}
        self._blobs: dict[str, tuple[BlobPart, FileState]] = {}
        self._digests: dict[str, str] = {}
        self._numbers: set[str] = set()
        self._mapped: dict[Path, torch.Tensor] = {}

    def look_up(self, path: Path) -> None:
        """Maps a file of which something is remembered. It is mapped first: what is remembered speaks of a file that
        nobody has written to since then.

        Raises OSError where it cannot be opened.
        """
        mapped = map_file(path)
        known = known_file(path, self._cache_dir)
        if known is not None:
            self._mapped[path] = mapped
            self._files[path] = known
            self._digests |= known.digests
            self._numbers |= known.numbers

    def look_up_blobs(self, parts: Mapping[str, StoredPart], *, exact: bool) -> None:
        """Maps the blobs of which something is remembered; if steps are to be `exact`, only those that begin as many
        bytes after a cache line as in the model's own file.

        Raises OSError where one cannot be opened.
        """
        for name, part in parts.items():
            if not isinstance(part, BlobPart) or part.known is None:
                continue
            size, state = part.tensor.stop - part.tensor.start, file_state(part.path)
            if not size or state is None or state[0] != size:
                continue
            self._blobs[name] = part, state
            mapped = map_file(part.path)
            known = part.known.of(part.path)
            if known is not None:
                self._digests[name] = part.path.name
                if not exact or part.tensor.start % CACHE_LINE_BYTES == 0:
                    self._mapped[part.path] = mapped
                if known.holds_numbers:
                    self._numbers.add(name)

    def digest(self, name: str) -> str | None:
        """The SHA-256 of a tensor; None: it is to be found out."""
        return self._digests.get(name)

    def whole(self, part: FilePart | BlobPart) -> torch.Tensor:
        """A tensor of a file that was looked up and is remembered, where it lies if that is where it can stay."""
        mapped = self._mapped.get(part.path)
        return part[...] if mapped is None else part.mapped(mapped)

    def holds_numbers(self, name: str) -> bool:
        """Whether the tensor was looked through and holds no NaN."""
        return name in self._numbers

    def remember(self, loaded: set[str]) -> None:
        """Tensors that were loaded now, are what they should be and hold no NaN."""
        for path, known in self._files.items():
            new = loaded.intersection(known.digests) - known.numbers
            if new:
                remember_numbers(path, self._cache_dir, known, new)
        for name in loaded.intersection(self._blobs) - self._numbers:
            part, state = self._blobs[name]
            if part.known is not None:
                part.known.remember(part.path, state, holds_numbers=True)
