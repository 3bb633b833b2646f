"""Tensors on disk by their contents, for all processes of a user: within a size, the least recently used first out.

blobs/AB/ABCD...       a tensor's bytes; the name is their SHA-256
unfinished/...         tensors on their way, as long as they will be: room for them is taken from the start
notes/KIND/KEY         what is remembered beside: headers, lists of files, which tensor has which contents
users/ID.lock, .json   a process that uses the store, and what may not be removed under it
lock                   held for moments, by whoever changes what is there or in use
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

LOCK_TIMEOUT_S: Final = 60.0
"""Nobody holds the store's lock for longer than it takes to remove some files."""
FETCH_TIMEOUT_S: Final = 1800.0
"""For another process that fetches the same tensors."""
DISK_RESERVE_BYTES: Final = 2**29
"""Left free on the disk, for everybody else."""
_READ_BYTES: Final = 2**22
_NAME: Final = re.compile(r"[0-9A-Za-z.-]{1,200}")


class StoreFull(Exception):
    """There is no room for what is wanted; the sentence says how much there would have to be."""


def default_store_folder() -> Path:
    """Where the user's processes keep weights unless told otherwise."""
    return Path(user_cache_dir("molink", appauthor=False)) / "weights"


@dataclass(frozen=True, slots=True)
class _Stored:
    path: Path
    size_bytes: int
    used_ns: int


class BlobStore:
    """The store, open between `__enter__` and `__exit__`. Several processes may have it open; threads may share it."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes` caps blobs and what is unfinished; None: half of what the disk would have without them."""
        self.folder = folder
        self._limit_bytes = limit_bytes
        self._user = uuid.uuid4().hex
        self._user_lock = FileLock(
            folder / "users" / f"{self._user}.lock", blocking=False, thread_local=False
        )
        self._used: Counter[str] = Counter()
        """What this process uses: paths below the folder, and how often."""

    def __enter__(self) -> Self:
        for name in ("blobs", "unfinished", "notes", "users", "fetching"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():  # nobody takes it for one that a dead process has left
            self._user_lock.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._user_lock.release()
        for suffix in (".lock", ".json"):
            with suppress(OSError):
                (self.folder / "users" / f"{self._user}{suffix}").unlink(missing_ok=True)

    def blob(self, sha256: str) -> Path:
        """Where a tensor's bytes are, if they are there."""
        return self.folder / "blobs" / sha256[:2] / sha256

    def unfinished(self, name: str) -> Path:
        """Where a tensor lies while it is on its way."""
        return self.folder / "unfinished" / _checked(name)

    @contextmanager
    def fetching(self, name: str) -> Iterator[None]:
        """Only one process at a time fetches what has this name.

        Raises:
            StoreFull: another one still does after FETCH_TIMEOUT_S.
        """
        try:
            with FileLock(self.folder / "fetching" / f"{_checked(name)}.lock", timeout=FETCH_TIMEOUT_S):
                yield
        except Timeout:
            raise StoreFull(
                f"another process has been fetching the same weights into {self.folder} for {FETCH_TIMEOUT_S:g} s"
            ) from None

    @contextmanager
    def using(self) -> Iterator["InUse"]:
        """What is marked within stays until the context ends."""
        mark = InUse(self)
        try:
            yield mark
        finally:
            with self._locked(), suppress(OSError):
                self._used.subtract(mark.paths)
                self._tell()

    def reserve(self, sizes: Mapping[Path, int], in_use: "InUse") -> None:
        """Makes files of these sizes, empty where they are new, and marks them; first makes room for them.

        Raises:
            StoreFull: even without all that nobody uses, there would be too little room.
            OSError: the disk refuses.
        """
        with self._locked():
            in_use.mark(sizes)
            new = {path: size for path, size in sizes.items() if not _has_size(path, size)}
            self._make_room(sum(new.values()))
            for path, size in new.items():
                with path.open("wb") as file:
                    file.truncate(size)

    def adopt(self, path: Path, sha256: str, in_use: "InUse") -> None:
        """Makes a file in `unfinished`, of which the contents are known, a blob in use."""
        blob = self.blob(sha256)
        with self._locked():
            in_use.mark([blob])
            blob.parent.mkdir(mode=0o700, exist_ok=True)
            path.replace(blob)

    def take(self, sizes: Mapping[str, int], in_use: "InUse") -> frozenset[str]:
        """Those of the blobs that are there and have their size; they are in use now, and used last."""
        with self._locked():
            there = frozenset(sha256 for sha256, size in sizes.items() if _has_size(self.blob(sha256), size))
            in_use.mark(map(self.blob, there))
        for sha256 in there:
            with suppress(OSError):
                os.utime(self.blob(sha256))
        return there

    def drop_damaged(self, sha256s: Iterable[str]) -> int:
        """Removes those of the blobs that are not what their name says; how many."""
        damaged = [
            path for path in map(self.blob, sha256s) if path.is_file() and hash_file(path) != path.name
        ]
        for path in damaged:
            path.unlink(missing_ok=True)
        return len(damaged)

    def room_bytes(self) -> int:
        """How much could be added, if all that nobody uses were removed."""
        with self._locked():
            in_use = self._everybodys()
            return self._limit() - sum(
                stored.size_bytes for stored in self._stored() if self._key(stored.path) in in_use
            )

    def read_note(self, kind: str, key: str) -> bytes | None:
        """What `write_note` wrote; None if there is nothing."""
        try:
            return (self.folder / "notes" / _checked(kind) / _checked(key)).read_bytes()
        except OSError:
            return None

    def write_note(self, kind: str, key: str, content: bytes) -> None:
        """Remembers small things, all or nothing. On a full disk they are simply not remembered."""
        path = self.folder / "notes" / _checked(kind) / _checked(key)
        with suppress(OSError):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _replace(path, content)

    def read_digests(self, content_id: str) -> dict[str, str]:
        """SHA-256 of the tensors of a file, by name, as far as they are known."""
        try:
            known = json.loads(self.read_note("digests", content_id) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return (
            {name: sha256 for name, sha256 in known.items() if _is_sha256(sha256)}
            if isinstance(known, dict)
            else {}
        )

    def add_digests(self, content_id: str, digests: Mapping[str, str]) -> None:
        """Remembers the contents of tensors of a file."""
        with self._locked():
            known = {**self.read_digests(content_id), **digests}
            self.write_note("digests", content_id, json.dumps(known).encode())

    def forget_digests(self, content_id: str, names: Iterable[str]) -> None:
        """What was remembered of these tensors was wrong."""
        with self._locked():
            gone = set(names)
            known = {name: it for name, it in self.read_digests(content_id).items() if name not in gone}
            self.write_note("digests", content_id, json.dumps(known).encode())

    def _mark(self, paths: Iterable[Path]) -> None:
        """Call it with the store's lock held."""
        self._used.update(map(self._key, paths))
        self._tell()

    def _tell(self) -> None:
        self._used += Counter()  # without those that nobody counts any more
        _replace(self.folder / "users" / f"{self._user}.json", json.dumps(list(self._used)).encode())

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _locked(self) -> FileLock:
        return FileLock(self.folder / "lock", timeout=LOCK_TIMEOUT_S)

    def _stored(self) -> list[_Stored]:
        found = []
        for path in (*(self.folder / "blobs").glob("*/*"), *(self.folder / "unfinished").iterdir()):
            with suppress(OSError):
                stat = path.stat()
                found.append(_Stored(path, stat.st_size, stat.st_mtime_ns))
        return found

    def _limit(self) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        held = sum(stored.size_bytes for stored in self._stored())
        return (shutil.disk_usage(self.folder).free + held) // 2

    def _make_room(self, wanted_bytes: int) -> None:
        """Removes what was used least recently. Call it with the lock held."""
        if not wanted_bytes:
            return
        stored, limit_bytes = self._stored(), self._limit()
        free_bytes = shutil.disk_usage(self.folder).free - DISK_RESERVE_BYTES
        over_bytes = max(
            sum(one.size_bytes for one in stored) + wanted_bytes - limit_bytes, wanted_bytes - free_bytes
        )
        in_use = self._everybodys()
        going = []
        for one in sorted(stored, key=lambda one: one.used_ns):
            if over_bytes > 0 and self._key(one.path) not in in_use:
                going.append(one.path)
                over_bytes -= one.size_bytes
        if over_bytes > 0:
            raise StoreFull(
                f"weights of {wanted_bytes:,} bytes do not fit into {self.folder}: {over_bytes:,} bytes too many for "
                f"its size of {limit_bytes:,} bytes or the room on its disk. Give more --store-size, make room, or "
                "hold fewer layers"
            )
        for path in going:
            path.unlink(missing_ok=True)

    def _everybodys(self) -> frozenset[str]:
        """What living processes use. What dead ones have left is tidied up. Call it with the lock held."""
        used = set(self._used)
        for lock in (self.folder / "users").glob("*.lock"):
            notes = lock.with_suffix(".json")
            if lock.stem == self._user:
                continue
            try:
                with FileLock(lock, blocking=False):
                    notes.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            except Timeout:
                with suppress(OSError, ValueError):
                    used.update(json.loads(notes.read_bytes()))
        return frozenset(used)


class InUse:
    """Files of the store that one task uses. `BlobStore` marks them."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self.paths: list[str] = []

    def mark(self, paths: Iterable[Path]) -> None:
        """Call it with the store's lock held."""
        paths = list(paths)
        self.paths += [self._store._key(path) for path in paths]  # noqa: SLF001 - one class in two
        self._store._mark(paths)  # noqa: SLF001


def hash_file(path: Path) -> str:
    """SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _is_sha256(value: Any) -> bool:  # noqa: ANN401 - out of a file
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or ".." in name:
        raise ValueError(f"{name!r} is no name in the store")
    return name


def _replace(path: Path, content: bytes) -> None:
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
