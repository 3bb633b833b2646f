"""Serves configuration, tokenizer and chat template by hash, so that a client needs no copy of the model."""

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, Self

from molink.peer.models.model import LocalModel
from molink.peer.serving.request_limits import RequestRefused
from molink.shards.checkpoint.model_files import open_own
from molink.shards.checkpoint.safetensors_header import StoreError
from molink.shards.checkpoint.store import MAX_TOKENIZER_BYTES

PART_BYTES = 1024 * 1024


class ArtifactServer:
    """Serves a model's manifest and small files to whoever asks. Usable from several threads.

    What is handed out is what the manifest names: a file that has changed since is read again, and refused if it is
    not that any more.
    """

    def __init__(self, model_hash: str, manifest: bytes, folder: Path, files: Mapping[str, str]) -> None:
        """`files` maps names in `folder` to the SHA-256 of their contents."""
        self._model_hash = model_hash
        self._manifest = manifest
        self._folder = folder
        self._names = {sha256: name for name, sha256 in files.items()}
        self._lock = threading.Lock()
        self._checked: dict[str, tuple[int, ...]] = {}
        """By hash: what the system said of the file when its contents were found to be those."""

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

    def read_part(self, model_hash: str, sha256: str, offset: int) -> tuple[bytes, int]:
        """Up to PART_BYTES of a file from `offset` on, and the file's whole size. Reads from disk.

        Raises:
            RequestRefused: another model, no such file (any more), or an offset beyond its end.
        """
        self._require(model_hash)
        name = self._names.get(sha256)
        if name is None:
            raise RequestRefused("request", f"no file of this model has the hash {sha256[:12]}")
        try:
            with open_own(self._folder, name) as file:
                total = self._checked_size(file, sha256)
                if offset > total:
                    raise RequestRefused("request", f"offset {offset} is beyond the file's {total} bytes")
                file.seek(offset)
                return file.read(PART_BYTES), total
        except (StoreError, OSError) as error:
            raise RequestRefused("request", "this peer has that file no more") from error

    def _checked_size(self, file: BinaryIO, sha256: str) -> int:
        """The size of the file, whose contents have that hash. Raises StoreError if they have not."""
        found = os.fstat(file.fileno())
        state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        with self._lock:
            if self._checked.get(sha256) != state:
                contents = file.read(MAX_TOKENIZER_BYTES + 1)
                if hashlib.sha256(contents).hexdigest() != sha256:
                    raise StoreError("the file has changed since the model was opened")
                self._checked[sha256] = state
        return found.st_size

    def _require(self, model_hash: str) -> None:
        if model_hash != self._model_hash:
            raise RequestRefused("model", f"this peer serves {self._model_hash[:12]}, not {model_hash[:12]}")
