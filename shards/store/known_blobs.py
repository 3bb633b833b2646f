"""What is known of blobs, of each for as long as nobody writes to its file: that it is what its name says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from molink.shards.store.store_notes import StoreNotes

FileState = tuple[int, int, int]
"""Size, time of modification and inode: what changes when a file is written to, and not when it is used."""
_KIND: Final = "verified"


@dataclass(frozen=True, slots=True)
class KnownBlob:
    """A blob that was hashed once."""

    holds_numbers: bool
    """It was looked through as well, and holds no NaN."""


class KnownBlobs:
    """The blobs of a store that were hashed, by this process or another. Threads may share it."""

    def __init__(self, notes: StoreNotes) -> None:
        self._notes = notes

    def of(self, blob: Path) -> KnownBlob | None:
        """What is known of the file as it is now; None: it is to be hashed."""
        try:
            state, holds_numbers = json.loads(self._notes.read(_KIND, blob.name) or b"")
        except (ValueError, TypeError, RecursionError):
            return None
        now = file_state(blob)
        return None if now is None or state != list(now) else KnownBlob(holds_numbers is True)

    def remember(self, blob: Path, state: FileState, *, holds_numbers: bool) -> None:
        """The file's SHA-256 was its name when it was in this state. If it has changed since, that says nothing."""
        self._notes.write(_KIND, blob.name, json.dumps([state, holds_numbers]).encode())

    def forget(self, blob: Path) -> None:
        """It is not there any more."""
        self._notes.remove(_KIND, blob.name)


def file_state(path: Path) -> FileState | None:
    """None: there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
