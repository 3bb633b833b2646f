"""Handing out configuration, tokenizer and chat template by hash, so that a client needs no copy of the model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from molink.peer.models.model import LocalModel
from molink.peer.serving.admission import RequestRefused

PART_BYTES = 1024 * 1024


class Handout:
    """A model's manifest and small files, as peers give them to whoever asks."""

    def __init__(self, model_hash: str, manifest: bytes, folder: Path, files: Mapping[str, str]) -> None:
        """`files` maps names in `folder` to the SHA-256 of their contents."""
        self._model_hash = model_hash
        self._manifest = manifest
        self._paths = {sha256: folder / name for name, sha256 in files.items()}

    @classmethod
    def of(cls, model: LocalModel) -> Self:
        """What there is to hand out of a model whose files are on this machine."""
        manifest = model.manifest
        return cls(model.spec.model_hash, manifest.to_bytes(), model.folder, manifest.files)

    def manifest(self, model_hash: str) -> tuple[bytes, int]:
        """The manifest and its size.

        Raises:
            RequestRefused: this peer serves another model.
        """
        self._require(model_hash)
        return self._manifest, len(self._manifest)

    def part(self, model_hash: str, sha256: str, offset: int) -> tuple[bytes, int]:
        """Up to PART_BYTES of a file from `offset` on, and the file's whole size. Reads from disk.

        Raises:
            RequestRefused: another model, no such file, or an offset beyond its end.
        """
        self._require(model_hash)
        path = self._paths.get(sha256)
        if path is None:
            raise RequestRefused("request", f"no file of this model has the hash {sha256[:12]}")
        total = path.stat().st_size
        if offset > total:
            raise RequestRefused("request", f"offset {offset} is beyond the file's {total} bytes")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(PART_BYTES), total

    def _require(self, model_hash: str) -> None:
        if model_hash != self._model_hash:
            raise RequestRefused("model", f"this peer serves {self._model_hash[:12]}, not {model_hash[:12]}")
