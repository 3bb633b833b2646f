"""What earlier starts found out about the tensors of a folder, for as long as nobody writes to its files."""

from pathlib import Path

import torch

from molink.shards.checkpoint.digests import KnownFile, known_file, remember_numbers
from molink.shards.store.blob_part import FilePart, map_file


class KnownWeights:
    """The tensors of the files that were looked up. Threads may ask at once."""

    def __init__(self, cache_dir: Path) -> None:
        """`cache_dir` is where `digests.tensor_digests` remembers what it has read."""
        self._cache_dir = cache_dir
        self._files: dict[Path, KnownFile] = {}
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

    def digest(self, name: str) -> str | None:
        """The SHA-256 of a tensor; None: it is to be found out."""
        return self._digests.get(name)

    def mapped(self, part: FilePart) -> torch.Tensor:
        """A tensor of a file that was looked up and is remembered, where it lies."""
        return part.mapped(self._mapped[part.path])

    def holds_numbers(self, name: str) -> bool:
        """Whether the tensor was looked through and holds no NaN."""
        return name in self._numbers

    def remember(self, loaded: set[str]) -> None:
        """Tensors that were loaded now and hold no NaN."""
        for path, known in self._files.items():
            new = loaded.intersection(known.digests) - known.numbers
            if new:
                remember_numbers(path, self._cache_dir, known, new)
