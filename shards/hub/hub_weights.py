"""The weights of a model of a hub, of which only those that are asked for are fetched, and each only once."""

import errno
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from molink.shards.checkpoint.grouping import layer_of
from molink.shards.checkpoint.manifest import Manifest, group_digest
from molink.shards.checkpoint.verification import groups_of
from molink.shards.errors import WeightsError
from molink.shards.hub.fetching import ByteCounter, Progress, fetch_missing
from molink.shards.hub.hub import HubClient, HubError, RemoteTensor
from molink.shards.hub.hub_checkpoint import HubCheckpoint
from molink.shards.hub.partial_download import PartialDownload
from molink.shards.spec import Span
from molink.shards.store.blob_part import BlobPart
from molink.shards.store.blobs import BlobStore, InUse, StoreFull, hash_file

RATE_BYTES: Final = 2**24
"""Less says nothing of how fast the hub's bytes come."""
TIMES: Final = 2
"""Wrong bytes are fetched so often before they are taken for what the hub has."""


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """What one call of `ready` works with."""

    client: HubClient
    in_use: InUse
    counter: ByteCounter


class HubWeights:
    """One model's weights. Threads may share it."""

    def __init__(
        self, checkpoint: HubCheckpoint, store: BlobStore, open_client: Callable[[str], HubClient]
    ) -> None:
        self.checkpoint = checkpoint
        self._store = store
        self._open_client = open_client
        self.bytes_per_s: float | None = None
        """At which the last large group came from the hub; None: none has yet."""

    @contextmanager
    def ready(
        self, span: Span, manifest: Manifest, progress: Progress, held: Collection[int] = ()
    ) -> Iterator[dict[str, BlobPart]]:
        """The tensors of `span` by name, fetched unless the store has them. They are there until the context ends.
        Those of layers that are `held` in another form are not needed.

        Raises:
            WeightsError: they cannot be fetched, are not the manifest's, or do not fit on the disk. What has been
                fetched stays: another try goes on from there.
        """
        tensors = self.checkpoint.tensors
        groups = list(groups_of(span, tensors, len(manifest.layers), manifest, held))
        with self._store.using() as in_use, self._open_client(self.checkpoint.commit) as client:
            digests: dict[str, str] = {}
            try:
                names = {name for _, names, _ in groups for name in names}
                lacking = names - self._held(names, in_use).keys()
                counter = ByteCounter(progress, sum(tensors[name].size_bytes for name in lacking))
                for title, group, expected in groups:
                    digests |= self._group(title, group, expected.sha256, _Task(client, in_use, counter))
            except (HubError, StoreFull) as error:
                raise WeightsError(self.checkpoint.folder, str(error)) from error
            except OSError as error:
                raise WeightsError(self.checkpoint.folder, self._disk_trouble(error)) from error
            yield {
                name: BlobPart(self._store.blob(sha256), tensors[name].tensor, self._store.known)
                for name, sha256 in digests.items()
            }

    def drop_damaged(self, span: Span, manifest: Manifest) -> bool:
        """Removes what the disk has spoiled of `span`; whether there was anything."""
        groups = groups_of(span, self.checkpoint.tensors, len(manifest.layers), manifest)
        known = self._known({name for _, names, _ in groups for name in names})
        return self._store.drop_damaged(known.values()) > 0

    def _group(self, title: str, names: Sequence[str], expected: str, task: _Task) -> dict[str, str]:
        """SHA-256 of the tensors of one group by name; they are there now, and are the manifest's."""
        if not names:
            return {}
        wanted = {name: self.checkpoint.tensors[name] for name in names}
        layer = layer_of(names[0])
        lock = f"{self.checkpoint.files[0].content_id}-{'ends' if layer is None else layer}"
        arriving = [PartialDownload.of(self._store, it).path for it in wanted.values()]
        with self._store.fetching(lock, arriving):
            for _ in range(TIMES):
                held = self._held(names, task.in_use)
                held |= self._fetch({name: wanted[name] for name in names if name not in held}, task)
                entries = [
                    (name, it.tensor.dtype, it.tensor.shape, held[name]) for name, it in wanted.items()
                ]
                if group_digest(entries) == expected:
                    return held
                for file in {it.file for it in wanted.values()}:
                    self._store.notes.forget_digests(file.content_id, names)
        raise WeightsError(
            self.checkpoint.folder,
            f"the weights of {title} at the hub are not those of the model that is served: the model at the hub was "
            "changed, or what it sends is damaged. Try again, or give a directory with the right model",
            names,
        )

    def _known(self, names: Collection[str]) -> dict[str, str]:
        """SHA-256 of those of the tensors of which it is known, whether they are there or not."""
        known: dict[str, str] = {}
        for file in {self.checkpoint.tensors[name].file for name in names}:
            known |= self._store.notes.digests(file.content_id)
        return {name: known[name] for name in names if name in known}

    def _held(self, names: Collection[str], in_use: InUse) -> dict[str, str]:
        """SHA-256 of those of the tensors that the store has. They are in use now."""
        known = self._known(names)
        there = self._store.take(
            {sha256: self.checkpoint.tensors[name].size_bytes for name, sha256 in known.items()}, in_use
        )
        return {name: sha256 for name, sha256 in known.items() if sha256 in there}

    def _fetch(self, wanted: Mapping[str, RemoteTensor], task: _Task) -> dict[str, str]:
        """Fetches tensors; their SHA-256 by name."""
        if not wanted:
            return {}
        arriving = {name: PartialDownload.of(self._store, it) for name, it in wanted.items()}
        self._store.reserve({one.path: one.file_bytes for one in arriving.values()}, task.in_use)
        missing_bytes = sum(piece.stop - piece.start for one in arriving.values() for piece in one.missing())
        began_s = time.monotonic()
        fetch_missing(task.client, [(wanted[name].file, one) for name, one in arriving.items()], task.counter)
        if missing_bytes >= RATE_BYTES:
            self.bytes_per_s = missing_bytes / max(time.monotonic() - began_s, 1e-3)
        digests = {name: hash_file(one.finish()) for name, one in arriving.items()}
        self._store.adopt({one.path: digests[name] for name, one in arriving.items()}, task.in_use)
        for file in {it.file for it in wanted.values()}:
            own = {name: sha256 for name, sha256 in digests.items() if wanted[name].file == file}
            self._store.notes.add_digests(file.content_id, own)
        return digests

    def _disk_trouble(self, error: OSError) -> str:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"the disk of {self._store.folder} is full: make room, then try again. What has been fetched is kept"
        return f"the weights cannot be stored in {self._store.folder}: {error.strerror or error}"
