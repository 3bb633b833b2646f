"""Knowing a hub's model by its contents, where nobody can say what they are: everything is read once.

A hub gives the SHA-256 of whole files, a model's identity is of single layers. So whoever founds a swarm with a hub's
model reads all of it; those who join compare what they fetch with what the founder found (`hub_weights`).
"""

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.safetensors_header import StoredTensor
from molink.shards.hub.fetching import ByteCounter, Job, Progress, run_all
from molink.shards.hub.hub import HubClient, HubError, HubFile, RemoteTensor
from molink.shards.hub.hub_checkpoint import HubCheckpoint
from molink.shards.hub.partial_download import PartialDownload
from molink.shards.store.blobs import BlobStore, InUse

TIMES: Final = 2
"""A file that is not what its hash says is read so often before that is taken for the truth."""


def unread_bytes(checkpoint: HubCheckpoint, store: BlobStore) -> int:
    """How much `identify` would have to read."""
    return sum(file.size_bytes for file in _unknown(checkpoint, store))


def identify(
    checkpoint: HubCheckpoint,
    store: BlobStore,
    open_client: Callable[[str], HubClient],
    keep: Collection[str],
    progress: Progress,
) -> Manifest:
    """Reads every file of which the contents are not known yet, as a stream, and says what the model is.

    The tensors named in `keep` are stored on the way if there is room for them; of the others nothing stays but their
    SHA-256. Those are remembered file by file: after an interruption, whole files need not be read again.

    Raises:
        HubError: a file cannot be read, or is not what the hub says it is.
        StoreError: the tensors are not those of one model.
        OSError: the disk refuses.
    """
    files = _unknown(checkpoint, store)
    counter = ByteCounter(progress, sum(file.size_bytes for file in files))
    kept = [remote for name, remote in checkpoint.tensors.items() if name in keep and remote.file in files]
    with ExitStack() as stack:
        in_use = stack.enter_context(store.using())
        arriving: dict[HubFile, dict[StoredTensor, PartialDownload]] = {file: {} for file in files}
        if sum(remote.size_bytes for remote in kept) <= store.room_bytes():
            own = secrets.token_hex(8)
            for remote in kept:
                arriving[remote.file][remote.tensor] = _arriving(store, remote, own)
            for file in files:
                store.drop_unfinished(_prefix(file))  # a process that was killed has left them
            paths = {one.path: one.file_bytes for tensors in arriving.values() for one in tensors.values()}
            stack.callback(_remove, paths)
            store.reserve(paths, in_use)
        client = stack.enter_context(open_client(checkpoint.commit))

        def job(file: HubFile) -> Job:
            tensors = [remote.tensor for remote in checkpoint.tensors.values() if remote.file == file]
            reading = _Reading(file, tensors, arriving[file], store, in_use)
            return lambda stop: reading.run(client, counter, stop)

        run_all([job(file) for file in files])
    digests: dict[str, str] = {}
    for file in checkpoint.files:
        digests |= store.notes.digests(file.content_id)
    return checkpoint.manifest(digests)


def _unknown(checkpoint: HubCheckpoint, store: BlobStore) -> list[HubFile]:
    unknown = []
    for file in checkpoint.files:
        known = store.notes.digests(file.content_id)
        if any(remote.file == file and name not in known for name, remote in checkpoint.tensors.items()):
            unknown.append(file)
    return unknown


def _prefix(file: HubFile) -> str:
    return f"{file.content_id}-read-"


def _arriving(store: BlobStore, remote: RemoteTensor, own: str) -> PartialDownload:
    """Where the tensor arrives for this reader alone. Its SHA-256 is that of the stream, not of the file: if others
    wrote to the same file, it could be remembered of bytes that are not its own."""
    tensor = remote.tensor
    name = f"{_prefix(remote.file)}{tensor.start}-{tensor.stop}-{own}"
    return PartialDownload(store.unfinished(name), tensor.start, tensor.stop)


def _remove(paths: Iterable[Path]) -> None:
    """What was not adopted: nobody goes on with it."""
    for path in paths:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class _Reading:
    """One file, read from its beginning to its end."""

    def __init__(
        self,
        file: HubFile,
        tensors: list[StoredTensor],
        arriving: dict[StoredTensor, PartialDownload],
        store: BlobStore,
        in_use: InUse,
    ) -> None:
        self._file = file
        self._tensors = sorted(tensors, key=lambda tensor: (tensor.start, tensor.stop), reverse=True)
        self._arriving = arriving
        self._store = store
        self._in_use = in_use

    def run(self, client: HubClient, counter: ByteCounter, stop: threading.Event) -> None:
        """Remembers the SHA-256 of each tensor, once the whole file is known to be the right one."""
        for _ in range(TIMES):
            digests: dict[str, str] = {}
            whole = self._file.new_hash()
            left = list(self._tensors)
            digest = hashlib.sha256()
            at = 0
            for data in client.stream(self._file, 0, self._file.size_bytes):
                if stop.is_set():
                    return
                whole.update(data)
                end = at + len(data)
                while left and (left[-1].start < end or left[-1].stop <= end):
                    tensor = left[-1]
                    part = data[max(tensor.start - at, 0) : max(tensor.stop - at, 0)]
                    digest.update(part)
                    if tensor in self._arriving:
                        self._arriving[tensor].write(max(tensor.start, at), part)
                    if tensor.stop > end:
                        break
                    digests[tensor.name] = digest.hexdigest()
                    digest = hashlib.sha256()
                    left.pop()
                counter.add(len(data))
                at = end
            if whole.hexdigest() == self._file.content_id:
                self._keep(digests)
                self._store.notes.add_digests(self._file.content_id, digests)
                return
        raise HubError(
            f"{self._file.name} of {client.model} is damaged: what the hub sends is not what its hash says. Try again"
        )

    def _keep(self, digests: dict[str, str]) -> None:
        arrived = {one.finish(): digests[tensor.name] for tensor, one in self._arriving.items()}
        self._store.adopt(arrived, self._in_use)
