"""What a hub says about a model's weights, without the weights: the headers of its safetensors files."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from molink.shards.checkpoint.grouping import group_names
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.safetensors_header import (
    LENGTH_BYTES,
    StoredTensor,
    StoreError,
    header_length,
    parse_header,
    read_index,
)
from molink.shards.checkpoint.store import manifest_of, read_settings
from molink.shards.hub.fetching import CONNECTIONS
from molink.shards.hub.hub import HubClient, HubError, HubFile, RemoteTensor, parse_listing
from molink.shards.spec import Span
from molink.shards.store.blobs import BlobStore

_FIRST_BYTES: Final = 2**16
"""Holds most headers whole, so that one request is enough."""
_UNKNOWN: Final = "0" * 64


@dataclass(frozen=True, slots=True, eq=False)
class HubCheckpoint:
    """A model of a hub at one commit, as its headers describe it."""

    model: str
    commit: str
    folder: Path
    """Holds the configuration, the tokenizer and the index."""
    files: tuple[HubFile, ...]
    tensors: Mapping[str, RemoteTensor]

    @property
    def size_bytes(self) -> int:
        """Of all weight files."""
        return sum(file.size_bytes for file in self.files)

    def names_of(self, span: Span) -> set[str]:
        """The tensors that a peer with this span holds."""
        groups = group_names(self.tensors, read_settings(self.folder / "config.json"))
        names = {name for layer in span for name in groups.layers.get(layer, ())}
        names.update(groups.embed if span.start == 0 else ())
        names.update(groups.head if span.stop >= len(groups.layers) else ())
        return names

    def manifest(self, digests: Mapping[str, str]) -> Manifest:
        """The model's manifest, given the SHA-256 of each tensor.

        Raises:
            StoreError: the tensors are not those of one model.
        """
        entries = [(remote.tensor, digests[name]) for name, remote in self.tensors.items()]
        return manifest_of(self.folder, entries)

    def outline(self) -> Manifest:
        """The model's manifest but for the contents of its tensors, without which it has another hash."""
        return self.manifest(dict.fromkeys(self.tensors, _UNKNOWN))

    def fits(self, manifest: Manifest) -> bool:
        """Whether the manifest may be this model's, as far as can be said without reading weights."""
        return _without_digests(self.outline()) == _without_digests(manifest)


def read_checkpoint(
    model: str, folder: Path, store: BlobStore, open_client: Callable[[str], HubClient]
) -> HubCheckpoint:
    """Reads headers, from the hub or as the store remembers them.

    `folder` is the snapshot with the model's small files; its name is the commit. `open_client` makes a client for
    that commit.

    Raises:
        HubError: the hub cannot be reached.
        StoreError: there are no weights, or headers and index are damaged or contradict each other.
    """
    commit = folder.name
    with open_client(commit) as client:
        listing = _listing(client, store)
        promised = _index(folder)
        names = sorted(set(promised.values())) if promised else ["model.safetensors"]
        missing = [name for name in names if name not in listing]
        if missing:
            raise StoreError(
                f"{model} lacks {len(missing)} of {len(names)} weight files at the hub, first {missing[0]}. "
                "Only models with safetensors files and a right index can be served."
            )
        files = tuple(listing[name] for name in names)
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            headers = list(pool.map(lambda file: _header(client, store, file), files))
    tensors = {
        tensor.name: RemoteTensor(file, tensor)
        for file, header in zip(files, headers, strict=True)
        for tensor in header
    }
    if len(tensors) != sum(map(len, headers)):
        raise StoreError(f"{model} stores a tensor twice, so that nobody can say which is meant.")
    lost = promised.keys() - tensors.keys()
    if lost:
        raise StoreError(
            f"{model} lacks {len(lost)} tensors that its index names, such as {min(lost)[:200]}. "
            "Its files at the hub are not of one version."
        )
    return HubCheckpoint(model, commit, folder, files, tensors)


def _listing(client: HubClient, store: BlobStore) -> Mapping[str, HubFile]:
    key = hashlib.sha256(f"{client.model}\n{client.commit}".encode()).hexdigest()
    known = store.notes.read("listings", key)
    if known is not None:
        try:
            return parse_listing(known)
        except HubError:
            pass  # what was remembered is damaged
    listing = client.listing()
    siblings = [
        {"rfilename": file.name, "size": file.size_bytes, "blobId": file.content_id}
        for file in listing.values()
    ]
    store.notes.write("listings", key, json.dumps({"siblings": siblings}).encode())
    return listing


def _header(client: HubClient, store: BlobStore, file: HubFile) -> tuple[StoredTensor, ...]:
    what = f"{file.name} of {client.model}"
    known = store.notes.read("headers", file.content_id)
    if known is not None:
        try:
            return parse_header(what, known, file.size_bytes)
        except StoreError:
            pass  # what was remembered is damaged
    if file.size_bytes < LENGTH_BYTES:
        raise StoreError(f"{what} is too short for a safetensors file.")
    first = b"".join(client.stream(file, 0, min(_FIRST_BYTES, file.size_bytes)))
    length = header_length(what, first[:LENGTH_BYTES], file.size_bytes)
    data = first[LENGTH_BYTES : LENGTH_BYTES + length]
    if len(data) < length:
        data += b"".join(client.stream(file, len(first), LENGTH_BYTES + length))
    tensors = parse_header(what, data, file.size_bytes)
    store.notes.write("headers", file.content_id, data)
    return tensors


def _index(folder: Path) -> Mapping[str, str]:
    path = folder / "model.safetensors.index.json"
    return read_index(path) if path.is_file() else {}


def _without_digests(manifest: Manifest) -> dict[str, object]:
    content: dict[str, object] = manifest.model_dump(mode="json")
    groups: Sequence[dict[str, object]] = [content["embed"], *content["layers"], content["head"]]  # type: ignore[misc, list-item]
    for group in groups:
        del group["sha256"]
    return content
