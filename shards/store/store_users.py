"""Which processes use the store, and which of its files: those may not be removed under them.

ID.lock   held by a living process
ID.json   the files that it uses
"""

import json
import uuid
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from molink.shards.store.store_notes import replace_file


class StoreUsers:
    """This process among the users of a store. Call its methods with the store's lock held, `leave` excepted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._id = uuid.uuid4().hex
        self._lock = FileLock(folder / f"{self._id}.lock", blocking=False, thread_local=False)
        self._used: Counter[str] = Counter()
        """What this process uses, and how often."""

    def enter(self) -> None:
        """This process is a user from now on."""
        self._lock.acquire()

    def leave(self) -> None:
        """This process uses nothing any more."""
        self._lock.release()
        for suffix in (".lock", ".json"):
            with suppress(OSError):
                (self._folder / f"{self._id}{suffix}").unlink(missing_ok=True)

    def use(self, names: Iterable[str]) -> None:
        """Raises OSError if that cannot be written down."""
        self._used.update(names)
        self._write()

    def let_go(self, names: Iterable[str]) -> None:
        """The counterpart of `use`."""
        self._used.subtract(names)
        self._used += Counter()  # only what is still counted
        with suppress(OSError):
            self._write()

    def everybodys(self) -> frozenset[str]:
        """What living processes use. What dead ones have left is tidied up."""
        used = set(self._used)
        for lock in self._folder.glob("*.lock"):
            if lock.stem == self._id:
                continue
            names = lock.with_suffix(".json")
            try:
                with FileLock(lock, blocking=False):
                    names.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            except Timeout:
                with suppress(OSError, ValueError):
                    used.update(json.loads(names.read_bytes()))
        return frozenset(used)

    def _write(self) -> None:
        replace_file(self._folder / f"{self._id}.json", json.dumps(list(self._used)).encode())
