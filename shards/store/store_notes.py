"""Small things that the store remembers beside tensors: headers, lists of files, which tensor has which contents."""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from filelock import FileLock

_NAME: Final = re.compile(r"[0-9A-Za-z.-]{1,200}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class StoreNotes:
    """Notes by kind and key, in a folder. What is lost or damaged is found out anew."""

    def __init__(self, folder: Path, lock: Callable[[], FileLock]) -> None:
        """`lock` gives the lock under which digests are changed."""
        self._folder = folder
        self._lock = lock

    def read(self, kind: str, key: str) -> bytes | None:
        """What `write` wrote; None if there is nothing."""
        try:
            return (self._folder / checked_name(kind) / checked_name(key)).read_bytes()
        except OSError:
            return None

    def write(self, kind: str, key: str, content: bytes) -> None:
        """Remembers it, all or nothing. On a full disk it is simply not remembered."""
        path = self._folder / checked_name(kind) / checked_name(key)
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, content)

    def remove(self, kind: str, key: str) -> None:
        """Nothing is remembered under the key any more."""
        with suppress(OSError):
            (self._folder / checked_name(kind) / checked_name(key)).unlink(missing_ok=True)

    def digests(self, content_id: str) -> dict[str, str]:
        """SHA-256 of the tensors of a file, by name, as far as they are known."""
        try:
            known = json.loads(self.read("digests", content_id) or b"{}")
        except (ValueError, RecursionError):
            return {}
        if not isinstance(known, dict):
            return {}
        return {name: sha256 for name, sha256 in known.items() if _is_sha256(sha256)}

    def add_digests(self, content_id: str, digests: Mapping[str, str]) -> None:
        """Remembers the contents of tensors of a file."""
        with self._lock():
            known = {**self.digests(content_id), **digests}
            self.write("digests", content_id, json.dumps(known).encode())

    def forget_digests(self, content_id: str, names: Iterable[str]) -> None:
        """What was remembered of these tensors was wrong."""
        with self._lock():
            gone = set(names)
            known = {name: sha256 for name, sha256 in self.digests(content_id).items() if name not in gone}
            self.write("digests", content_id, json.dumps(known).encode())


def checked_name(name: str) -> str:
    """The same name, if it can be a file's on any system and leads nowhere else.

    Raises:
        ValueError: it cannot.
    """
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} is no name in the store")
    return name


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file at once: a reader sees the old content or the new."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _is_sha256(value: Any) -> bool:  # noqa: ANN401 - out of a file
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
