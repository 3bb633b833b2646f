"""Which model a peer serves, and in which numbers: what it was told, else what the swarm that it joins needs."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from molink.dht.records import PeerView
from molink.peer.choosing_model import choose_numbers
from molink.peer.hub_model import HubAccess, open_hub_model, progress_bar
from molink.peer.memory import format_bytes
from molink.shards import catalog, store
from molink.shards.blob_part import StandIn
from molink.shards.errors import QuantizationUnavailable, WeightsError
from molink.shards.hub_weights import HubWeights
from molink.shards.loader import load_stage
from molink.shards.spec import ModelSpec, Span
from molink.shards.stage import Stage

Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""


def _say_nothing(_: str) -> None:
    """Nobody looks."""


def _show_nothing(_: int, __: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalModel:
    """A model that this machine can load any layers of."""

    folder: Path
    """Configuration and tokenizer, and the weights unless they come from a hub in parts."""
    manifest: store.Manifest
    spec: ModelSpec
    hub: HubWeights | None = None
    """Where weights come from that are not in the folder."""
    report: Callable[[str], None] = _say_nothing
    """Is told, in sentences, how far fetching is."""

    def load(self, span: Span, device: str, progress: Progress = _show_nothing) -> Stage:
        """The layers of `span` on the device, fetched before if they come from a hub. It blocks.

        `progress` counts the bytes that are fetched and then those that are loaded.

        Raises:
            WeightsError, OSError, MemoryError, RuntimeError, ValueError: they cannot be fetched or loaded.
        """
        if self.hub is None:
            return load_stage(
                self.folder,
                span,
                dtype=self.spec.dtype,
                quantization=self.spec.quantization,
                device=device,
                progress=progress,
                manifest=self.manifest,
            )
        try:
            return self._fetch_and_load(self.hub, span, device, progress)
        except WeightsError:
            if not self.hub.drop_damaged(span, self.manifest):
                raise
            return self._fetch_and_load(self.hub, span, device, progress)

    def stand_ins(self) -> dict[str, StandIn] | None:
        """Random tensors in the place of a hub's, so that measuring fetches nothing; None: the folder has them all."""
        if self.hub is None:
            return None
        return {name: StandIn(remote.tensor) for name, remote in self.hub.checkpoint.tensors.items()}

    def _fetch_and_load(self, hub: HubWeights, span: Span, device: str, progress: Progress) -> Stage:
        fetched = 0

        def fetching(done: int, total: int) -> None:
            nonlocal fetched
            fetched = total
            progress(done, total + self.spec.weight_bytes(span))
            self.report(f"Fetching layers {span} of {self.spec.name}: {progress_bar(done, total)}")

        with hub.ready(span, self.manifest, fetching) as parts:
            return load_stage(
                self.folder,
                span,
                dtype=self.spec.dtype,
                quantization=self.spec.quantization,
                device=device,
                progress=lambda done, total: progress(fetched + done, fetched + total),
                manifest=self.manifest,
                parts=parts,
            )


async def open_model(
    identifier: str,
    dtype: str,
    quantization: str | None,
    views: Sequence[PeerView],
    digests: Path,
    report: Callable[[str], None],
    access: HubAccess | None = None,
) -> LocalModel:
    """Finds the model's files and what they are.

    With dtype `auto` and quantization None, it is computed as the swarm computes it already; what is given is kept to.

    Of a hub's model only what is needed is fetched, when it is needed; without `access` to it all of it, at once.

    Raises:
        ModelNotFound, StoreError, OSError: it is not there, damaged, or not what `views` serve under that name.
        QuantizationUnavailable: the swarm has it in a quantization that this machine cannot compute with.
    """
    folder = await asyncio.to_thread(catalog.resolve, identifier)
    hub: HubWeights | None = None
    if access is not None and catalog.is_from_hub(identifier):
        manifest, hub = await open_hub_model(identifier, folder, views, access, report)
    else:
        folder, manifest = await _open_files(identifier, folder, digests, report)
    content_hash = manifest.content_hash
    served_models = [(view.facts.model.name, view.facts.model.content_hash) for view in views]
    catalog.require_identity(identifier, folder, content_hash, served_models)
    served = [view.facts.model for view in views if view.facts.model.content_hash == content_hash]
    numbers = choose_numbers(dtype, quantization, served)
    if numbers.quantization != "none" and find_spec("bitsandbytes") is None:
        raise QuantizationUnavailable(numbers.quantization)
    spec = store.describe(manifest, numbers.dtype, numbers.quantization, name=identifier)
    return LocalModel(folder, manifest, spec, hub, report)


async def _open_files(
    identifier: str, folder: Path, digests: Path, report: Callable[[str], None]
) -> tuple[Path, store.Manifest]:
    """All files of the model, and what they are."""
    if catalog.is_from_hub(identifier):
        report(f"Fetching the weights of {identifier}")
        folder = await asyncio.to_thread(catalog.fetch_weights, identifier)

    def progress(done: int, total: int) -> None:
        report(
            f"Reading {identifier} to know it by its contents: {format_bytes(done)} of {format_bytes(total)}"
        )

    return folder, await asyncio.to_thread(store.read_manifest, folder, digests, progress)
