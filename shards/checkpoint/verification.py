"""Whether the tensors that were loaded are those that the model's manifest names, found out while they are loaded."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch

from molink.shards.checkpoint.grouping import group_names
from molink.shards.checkpoint.manifest import Manifest, TensorGroup, group_digest
from molink.shards.errors import WeightsError
from molink.shards.spec import Span


class StoredPart(Protocol):
    """A tensor on disk."""

    def __getitem__(self, index: object) -> torch.Tensor: ...

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class Fingerprints:
    """The SHA-256 of each tensor that was read. Threads may add different ones at once."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[str, str, tuple[int, ...], str]] = {}

    def add(self, name: str, part: StoredPart, tensor: torch.Tensor) -> None:
        """Notes a tensor: in memory that the file cannot change any more, as wide and long as it is stored."""
        if list(tensor.shape) == list(part.get_shape()):
            self._entries[name] = _entry(name, part, tensor)

    def trust(self, name: str, part: StoredPart, sha256: str) -> None:
        """Notes a tensor whose SHA-256 is remembered."""
        self._entries[name] = name, part.get_dtype(), tuple(part.get_shape()), sha256

    @property
    def names(self) -> set[str]:
        """The tensors that were noted."""
        return set(self._entries)

    def check(
        self,
        folder: Path,
        parts: Mapping[str, StoredPart],
        span: Span,
        layers: int,
        manifest: Manifest,
        held: Collection[int] = (),
    ) -> None:
        """Compares the groups of `span`, of a model of so many `layers`, with the manifest; but for layers that are
        `held` in another form, which was verified when it was made.

        What belongs to them and was not read, such as buffers that models recompute, is read now.

        Raises:
            WeightsError: the files are not the manifest's.
        """
        unread: dict[str, tuple[str, str, tuple[int, ...], str]] = {}
        for group, names, expected in groups_of(span, parts, layers, manifest, held):
            for name in names:
                if name not in self._entries and name not in unread:
                    unread[name] = _entry(name, parts[name], parts[name][...])
            if group_digest([self._entries.get(name) or unread[name] for name in names]) != expected.sha256:
                raise WeightsError(
                    folder,
                    f"the weights of {group} are not those of the model that is served: a file was altered. "
                    "Fetch the model again, and restart the peer",
                    names,
                )


def _entry(name: str, part: StoredPart, whole: torch.Tensor) -> tuple[str, str, tuple[int, ...], str]:
    raw = whole.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return name, part.get_dtype(), tuple(part.get_shape()), hashlib.sha256(raw).hexdigest()


def groups_of(
    span: Span, names: Iterable[str], layers: int, manifest: Manifest, held: Collection[int] = ()
) -> Iterator[tuple[str, tuple[str, ...], TensorGroup]]:
    """What `span` holds: how it is called, its tensors' names, and what the manifest says of it.
    Not of the layers that are `held` in another form."""
    groups = group_names(names, manifest.configuration)
    if span.start == 0:
        yield "the embeddings", groups.embed, manifest.embed
    for layer in (layer for layer in span if layer not in held):
        yield f"layer {layer}", groups.layers.get(layer, ()), manifest.layers[layer]
    if span.stop == layers:
        yield "the head", groups.head, manifest.head
