"""Which model a peer serves, and in which numbers: what it was told, else what the swarm that it joins needs."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from molink.dht.records import PeerView
from molink.peer.memory import format_bytes
from molink.shards import catalog, store
from molink.shards.spec import ModelSpec, Span, missing_spans

FIRST_MODEL = "molink/tiny-shakespeare"
"""What a new swarm serves if nobody says."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model whose files are on this machine."""

    folder: Path
    manifest: store.Manifest
    spec: ModelSpec


def most_needed(views: Sequence[PeerView]) -> str:
    """The name of the model of which the most layers have the fewest holders; FIRST_MODEL where nothing is served."""
    if not views:
        return FIRST_MODEL
    by_hash: dict[str, list[PeerView]] = {}
    for view in views:
        by_hash.setdefault(view.facts.model.model_hash, []).append(view)

    def need(model_hash: str) -> tuple[float, int, str]:
        holders = by_hash[model_hash]
        whole = Span(0, holders[0].facts.model.layers)
        held = tuple(span for view in holders for span in view.state.spans)
        missing = sum(map(len, missing_spans(whole, held)))
        return (-missing / len(whole), len(holders), model_hash)

    return by_hash[min(by_hash, key=need)][0].facts.model.name


async def open_model(
    identifier: str,
    dtype: str,
    quantization: str,
    views: Sequence[PeerView],
    digests: Path,
    report: Callable[[str], None],
) -> LocalModel:
    """Finds the model's files and what they are. With dtype `auto`, it is computed as the swarm computes it already.

    Raises:
        ModelNotFound, StoreError, OSError: it is not there, damaged, or not what `views` serve under that name.
    """
    folder = await asyncio.to_thread(catalog.resolve, identifier)
    if catalog.is_from_hub(identifier):
        report(f"Fetching the weights of {identifier}")
        folder = await asyncio.to_thread(catalog.fetch_weights, identifier)

    def progress(done: int, total: int) -> None:
        report(
            f"Reading {identifier} to know it by its contents: {format_bytes(done)} of {format_bytes(total)}"
        )

    manifest = await asyncio.to_thread(store.read_manifest, folder, digests, progress)
    content_hash = manifest.content_hash
    served_models = [(view.facts.model.name, view.facts.model.content_hash) for view in views]
    catalog.require_identity(identifier, folder, content_hash, served_models)
    if dtype == "auto":
        served = Counter(
            view.facts.model.dtype
            for view in views
            if view.facts.model.content_hash == content_hash and view.facts.model.quantization == quantization
        )
        dtype = min(served, key=lambda name: (-served[name], name), default="auto")
    return LocalModel(folder, manifest, store.describe(manifest, dtype, quantization, name=identifier))
