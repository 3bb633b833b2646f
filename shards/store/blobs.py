"""Tensors on disk by their contents, for all processes of a user: within a size, the least recently used first out.

blobs/AB/ABCD...       a tensor's bytes; the name is their SHA-256
unfinished/...         tensors on their way, as long as they will be: room for them is taken from the start
notes/KIND/KEY         what is remembered beside: headers, lists of files, which tensor has which contents, which blobs
                       were hashed
users/ID.lock, .json   a process that uses the store, and what may not be removed under it
lock                   held for moments, by whoever changes what is there or in use
"""

import errno
import hashlib
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from molink.shards.store.known_blobs import KnownBlobs, file_state
from molink.shards.store.store_notes import StoreNotes, checked_name
from molink.shards.store.store_users import StoreUsers

LOCK_TIMEOUT_S: Final = 60.0
"""Nobody holds the store's lock for longer than it takes to remove some files."""
FETCH_TIMEOUT_S: Final = 1800.0
"""For another process that fetches the same tensors, without one of their files changing."""
DISK_RESERVE_BYTES: Final = 2**29
"""Left free on the disk, for everybody else."""
_READ_BYTES: Final = 2**22
_BLOCK_BYTES: Final = 512
"""The unit of `st_blocks`, whatever the file system's blocks are."""
_OWN_TROUBLE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""What says nothing of the file that cannot be read."""


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
    pending_bytes: int = 0
    """Of its size, what the disk still counts as free: unfinished files are as long as they will be, with holes."""


class BlobStore:
    """The store, open between `__enter__` and `__exit__`. Several processes may have it open; threads may share it."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        """`limit_bytes` caps blobs and what is unfinished; None: half of what the disk would have without them."""
        self.folder = folder
        self._limit_bytes = limit_bytes
        self.notes = StoreNotes(folder / "notes", self._locked)
        self.known = KnownBlobs(self.notes)
        self._users = StoreUsers(folder / "users")

    def __enter__(self) -> Self:
        for name in ("blobs", "unfinished", "notes", "users", "fetching"):
            (self.folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        with self._locked():  # nobody takes it for one that a dead process has left
            self._users.enter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users.leave()

    def blob(self, sha256: str) -> Path:
        """Where a tensor's bytes are, if they are there."""
        return self.folder / "blobs" / sha256[:2] / sha256

    def unfinished(self, name: str) -> Path:
        """Where a tensor lies while it is on its way."""
        return self.folder / "unfinished" / checked_name(name)

    @contextmanager
    def fetching(self, name: str, arriving: Collection[Path] = ()) -> Iterator[None]:
        """Only one process at a time fetches what has this name. Another one is waited for as long as the files change
        in which the same is `arriving`.

        Raises:
            StoreFull: another one still does, and none of them has changed for FETCH_TIMEOUT_S.
        """
        lock = FileLock(self.folder / "fetching" / f"{checked_name(name)}.lock")
        while not lock.is_locked:
            before = [file_state(path) for path in arriving]
            try:
                lock.acquire(timeout=FETCH_TIMEOUT_S)
            except Timeout:
                if [file_state(path) for path in arriving] == before:
                    raise StoreFull(
                        f"another process is fetching the same weights into {self.folder}, and none have come for "
                        f"{FETCH_TIMEOUT_S:g} s: end it, then try again"
                    ) from None
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def using(self) -> Iterator["InUse"]:
        """What is marked within stays until the context ends."""
        mark = InUse(self.folder, self._users)
        try:
            yield mark
        finally:
            with self._locked():
                self._users.let_go(mark.names)

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

    def adopt(self, arrived: Mapping[Path, str], in_use: "InUse") -> None:
        """Makes files in `unfinished`, of which the SHA-256 is known, blobs in use."""
        with self._locked():
            in_use.mark(self.blob(sha256) for sha256 in arrived.values())
            for path, sha256 in arrived.items():
                blob = self.blob(sha256)
                blob.parent.mkdir(mode=0o700, exist_ok=True)
                if _has_size(blob, path.stat().st_size):
                    path.unlink()
                else:
                    path.replace(blob)
                    if (state := file_state(blob)) is not None:
                        self.known.remember(blob, state, holds_numbers=False)

    def take(self, sizes: Mapping[str, int], in_use: "InUse") -> frozenset[str]:
        """Those of the blobs that are there and have their size; they are in use now, and used last."""
        with self._locked():
            there = frozenset(sha256 for sha256, size in sizes.items() if _has_size(self.blob(sha256), size))
            in_use.mark(map(self.blob, there))
        for sha256 in there:
            with suppress(OSError):  # when it was written is part of what is known of it
                os.utime(self.blob(sha256), ns=(time.time_ns(), self.blob(sha256).stat().st_mtime_ns))
        return there

    def drop_damaged(self, sha256s: Iterable[str]) -> int:
        """Removes those of the blobs that are not what their name says, or that the disk cannot read; how many.

        Raises:
            OSError: the process lacks files or memory to look at them; or one cannot be removed.
        """
        damaged = [path for path in map(self.blob, sha256s) if path.is_file() and _is_damaged(path)]
        for path in damaged:
            self.known.forget(path)
            path.unlink(missing_ok=True)
        return len(damaged)

    def drop_unfinished(self, prefix: str) -> None:
        """Removes unfinished files with such names that no living process uses."""
        with self._locked():
            in_use = self._users.everybodys()
            for path in (self.folder / "unfinished").glob(f"{prefix}*"):
                if self._key(path) not in in_use:
                    path.unlink(missing_ok=True)

    def room_bytes(self) -> int:
        """How much could be added, if all that nobody uses were removed."""
        with self._locked():
            in_use = self._users.everybodys()
            return self._limit() - sum(
                stored.size_bytes for stored in self._stored() if self._key(stored.path) in in_use
            )

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _locked(self) -> FileLock:
        return FileLock(self.folder / "lock", timeout=LOCK_TIMEOUT_S)

    def _stored(self) -> list[_Stored]:
        found = []
        for path in (self.folder / "blobs").glob("*/*"):
            with suppress(OSError):
                stat = path.stat()
                found.append(_Stored(path, stat.st_size, max(stat.st_atime_ns, stat.st_mtime_ns)))
        for path in (self.folder / "unfinished").iterdir():
            with suppress(OSError):
                stat = path.stat()
                used_ns = max(stat.st_atime_ns, stat.st_mtime_ns)
                found.append(_Stored(path, stat.st_size, used_ns, max(0, stat.st_size - _taken_bytes(stat))))
        return found

    def _limit(self) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        held = sum(stored.size_bytes - stored.pending_bytes for stored in self._stored())
        return (shutil.disk_usage(self.folder).free + held) // 2

    def _make_room(self, wanted_bytes: int) -> None:
        """Removes what was used least recently. Call it with the lock held."""
        if not wanted_bytes:
            return
        stored, limit_bytes = self._stored(), self._limit()
        pending_bytes = sum(one.pending_bytes for one in stored)
        free_bytes = shutil.disk_usage(self.folder).free - pending_bytes - DISK_RESERVE_BYTES
        over_bytes = max(
            sum(one.size_bytes for one in stored) + wanted_bytes - limit_bytes, wanted_bytes - free_bytes
        )
        in_use = self._users.everybodys()
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
            self.known.forget(path)
            with suppress(PermissionError):  # somebody reads it, on a system where that keeps it
                path.unlink(missing_ok=True)


class InUse:
    """Files of the store that one task uses. `BlobStore` marks them, with its lock held."""

    def __init__(self, folder: Path, users: StoreUsers) -> None:
        self._folder = folder
        self._users = users
        self.names: list[str] = []

    def mark(self, paths: Iterable[Path]) -> None:
        names = [path.relative_to(self._folder).as_posix() for path in paths]
        self.names += names
        self._users.use(names)


def hash_file(path: Path) -> str:
    """SHA-256 of a file of any size."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(_READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _is_damaged(blob: Path) -> bool:
    try:
        return hash_file(blob) != blob.name
    except OSError as error:
        if error.errno in _OWN_TROUBLE:
            raise
        return True


def _taken_bytes(stat: os.stat_result) -> int:
    """What a file takes of the disk: less than its size where it has holes. Windows, which does not say, makes none."""
    blocks: int | None = getattr(stat, "st_blocks", None)
    return stat.st_size if blocks is None else blocks * _BLOCK_BYTES


def _has_size(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False
