"""A model of a hub as a peer serves it: known by the swarm's word, or by reading all of it once; fetched in parts."""

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from molink.dht.records.records import PeerView
from molink.peer.memory.memory import format_bytes
from molink.peer.models.manifests import likeliest_contents
from molink.shards.checkpoint.catalog import CheckpointNotFound
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.store import StoreError
from molink.shards.hub.hub import HubClient, HubError, NotGiven
from molink.shards.hub.hub_checkpoint import HubCheckpoint, read_checkpoint
from molink.shards.hub.hub_identity import identify, unread_bytes
from molink.shards.hub.hub_weights import HubWeights
from molink.shards.spec import Span
from molink.shards.store.blob_part import StandIn
from molink.shards.store.blobs import BlobStore, StoreFull

BAR_WIDTH = 20
ASKED_CONTENTS = 4
"""Of the contents that are announced under one name: anyone can announce others, without end."""
MANIFEST_TIMEOUT_S = 60.0
"""For all of their manifests, which are asked for at once."""

AskManifest = Callable[[Sequence[PeerView], str], Awaitable[Manifest | None]]
"""Of the peers that serve a content hash, for the manifest that has it."""


@dataclass(frozen=True, slots=True, eq=False)
class HubAccess:
    """What a peer needs to fetch only parts of a hub's model."""

    store: BlobStore
    """Open."""
    ask: AskManifest
    layers: Span | None
    """Those that the owner has chosen; None: not known yet."""
    memory_bytes: int
    """The peer's, for weights and what else it needs."""
    named: Collection[str] = ()
    """Ids of the peers that the owner named as the way into the swarm."""
    manifest_timeout_s: float = MANIFEST_TIMEOUT_S

    def kept(self, checkpoint: HubCheckpoint) -> set[str]:
        """The tensors worth storing when everything is read anyway: those of the chosen layers, or of a model that
        the peer could hold whole. Of a larger one more would be stored than is ever used."""
        if self.layers is not None:
            return checkpoint.names_of(self.layers)
        return set(checkpoint.tensors) if checkpoint.size_bytes <= self.memory_bytes else set()


async def open_hub_model(
    identifier: str, folder: Path, views: Sequence[PeerView], access: HubAccess, report: Callable[[str], None]
) -> tuple[Manifest, HubWeights]:
    """What the model is, and where its weights come from; `folder` is the snapshot of its small files.

    If peers serve it, their manifest is taken, of several that of the likeliest contents, provided that configuration,
    tokenizer and the tensors' names and shapes are the hub's. Each tensor is held against it when it is fetched. If
    nobody serves it, or nobody hands out a manifest, all of the model is read once.

    Raises:
        CheckpointNotFound: the hub does not give it.
        StoreError: it cannot be read, or is not what the swarm serves under its name.
    """

    def open_client(commit: str) -> HubClient:
        return HubClient(identifier, commit)

    def know_by_reading(checkpoint: HubCheckpoint) -> Manifest:
        why = "nobody says what it is" if served else "nobody serves it yet"
        unread = format_bytes(unread_bytes(checkpoint, access.store))

        def progress(done: int, total: int) -> None:
            report(f"Reading all {unread} of {identifier} once, as {why}: {progress_bar(done, total)}")

        return identify(checkpoint, access.store, open_client, access.kept(checkpoint), progress)

    served = likeliest_contents(views, identifier, access.named)
    try:
        checkpoint = await asyncio.to_thread(read_checkpoint, identifier, folder, access.store, open_client)
        weights = HubWeights(checkpoint, access.store, open_client)
        others = 0
        async with aclosing(_manifests(served[:ASKED_CONTENTS], views, access)) as handed_out:
            async for manifest in handed_out:
                if checkpoint.fits(manifest):
                    return manifest, weights
                others += 1
        if others:
            raise StoreError(
                f"{identifier} at the hub is not what the swarm serves under this name: its configuration, tokenizer "
                "or tensors are others. If the hub's model was changed, give a directory with the old one."
            )
        return await asyncio.to_thread(know_by_reading, checkpoint), weights
    except NotGiven as error:
        raise CheckpointNotFound(identifier, str(error)) from error
    except (HubError, StoreFull) as error:
        raise StoreError(str(error)) from error
    except OSError as error:
        raise StoreError(
            f"{identifier} cannot be stored in {access.store.folder}: {error.strerror or error}. What has been "
            "fetched is kept: make room, then try again."
        ) from error


async def _manifests(
    content_hashes: Sequence[str], views: Sequence[PeerView], access: HubAccess
) -> AsyncGenerator[Manifest, None]:
    """Those of the manifests that are handed out in time, in the order of their hashes."""
    ends_s = asyncio.get_running_loop().time() + access.manifest_timeout_s
    asking = [asyncio.ensure_future(access.ask(views, content_hash)) for content_hash in content_hashes]
    try:
        for one in asking:
            await asyncio.wait((one,), timeout=max(0.0, ends_s - asyncio.get_running_loop().time()))
            manifest = one.result() if one.done() else None
            if manifest is not None:
                yield manifest
    finally:
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def outline(identifier: str, folder: Path) -> tuple[Manifest, dict[str, StandIn]]:
    """What a hub's model looks like, from the headers of its files, and random tensors in the place of its own: enough
    to measure with. Its hash is not the model's. `folder` is the snapshot of its small files.

    Raises:
        CheckpointNotFound: the hub does not give it.
        StoreError: it cannot be read.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="molink-outline-") as notes, BlobStore(Path(notes)) as store:
            checkpoint = read_checkpoint(
                identifier, folder, store, lambda commit: HubClient(identifier, commit)
            )
    except NotGiven as error:
        raise CheckpointNotFound(identifier, str(error)) from error
    except HubError as error:
        raise StoreError(str(error)) from error
    parts = {name: StandIn(remote.tensor) for name, remote in checkpoint.tensors.items()}
    return checkpoint.outline(), parts


def progress_bar(done: int, total: int) -> str:
    """How far something is, in bytes, as text of one line."""
    share = done / total if total else 1.0
    full = int(share * BAR_WIDTH)
    return (
        f"[{'#' * full}{'.' * (BAR_WIDTH - full)}] {share:.0%}, {format_bytes(done)} of {format_bytes(total)}"
    )
