"""Which model a peer serves, and in which numbers: what it was told, else what the swarm that it joins needs."""

import asyncio
import errno
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

from molink.dht.records.records import PeerView
from molink.peer.device.device import processor_name
from molink.peer.device.thread_choice import share_of_others, stays_the_best
from molink.peer.device.threads import processor_times
from molink.peer.memory.memory import format_bytes
from molink.peer.models.choosing import choose_numbers
from molink.peer.models.hub import HubAccess, open_hub_model, outline, progress_bar
from molink.safe_import import import_refusal
from molink.shards.checkpoint import catalog, store
from molink.shards.checkpoint.safetensors_header import StoreError, weight_files
from molink.shards.errors import QuantizationUnavailable, WeightsError
from molink.shards.hub.hub_weights import HubWeights
from molink.shards.loading.loader import LoadCache, StageSettings, load_stage
from molink.shards.matrices.known_products import KnownProducts
from molink.shards.matrices.packed_layers import PackedLayers, PackedUnusable
from molink.shards.model.stage import Stage
from molink.shards.native.native_way import TrustedWays, WaysTrial
from molink.shards.spec import ModelSpec, Span
from molink.shards.store.blob_part import BlobPart, StandIn
from molink.shards.store.blobs import BlobStore

T = TypeVar("T")
_log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
"""Bytes done, bytes in all."""
_NONE_HELD: Final[Mapping[int, Path]] = MappingProxyType({})


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
    outlined: Mapping[str, StandIn] | None = None
    """Random tensors in the place of all weights, if it is only to be measured."""
    exact: bool = False
    """Whether one session's steps equal transformers' bit for bit; else each goes the fastest way."""
    digests: Path | None = None
    """Where it is remembered what the folder's files hold."""
    store: BlobStore | None = None
    """Where layers are kept packed if they are quantized, open."""
    ways: WaysTrial = field(default_factory=TrustedWays)
    """Who tries native code before layers use it."""

    def load(
        self, span: Span, device: str, progress: Progress = _show_nothing, *, packs_later: bool = False
    ) -> Stage:
        """The layers of `span` on the device, fetched before if they come from a hub. It blocks.

        `progress` counts the bytes that are fetched, then those that are loaded. `packs_later` as in `StageSettings`.

        Raises:
            WeightsError, OSError, MemoryError, RuntimeError, ValueError: they cannot be fetched or loaded.
        """

        packed = self._packed()

        def load(
            parts: Mapping[str, BlobPart] | None, progress: Progress, held: Mapping[int, Path] = _NONE_HELD
        ) -> Stage:
            known = None if self.digests is None else KnownProducts(self.digests, processor_name())
            before = processor_times()
            stage = load_stage(
                self.folder,
                span,
                StageSettings(
                    self.spec.dtype,
                    self.spec.quantization,
                    device=device,
                    exact=self.exact,
                    ways=self.ways,
                    packs_later=packs_later,
                ),
                progress=progress,
                manifest=self.manifest if self.outlined is None else None,
                parts=parts if self.outlined is None else self.outlined,
                cache=LoadCache(digests=self.digests, packed=packed, held=held, known_products=known),
            )
            if known is not None:
                known.keep(certain=stays_the_best(share_of_others(before, processor_times())))
            return stage

        if packed is None:
            return self.with_parts(span, progress, load)
        while True:
            packed.clear_unfinished()
            with packed.ready(span) as held:
                try:
                    return self.with_parts(span, progress, partial(load, held=held), held)
                except PackedUnusable as error:  # once for each layer at most: its file is not there any more
                    packed.drop(error.layer)

    def fetch(self, span: Span) -> None:
        """Has on this machine what `load` needs of `span`; nothing is missing unless it comes from a hub. It blocks.

        Raises:
            WeightsError, OSError: it cannot be fetched.
        """
        packed = self._packed()
        with nullcontext(_NONE_HELD) if packed is None else packed.ready(span) as held:
            self.with_parts(span, _show_nothing, lambda *_: None, held)

    def fetch_bytes_per_s(self) -> float | None:
        """At which weights came from a hub lately; None: none have."""
        return None if self.hub is None else self.hub.bytes_per_s

    def _packed(self) -> PackedLayers | None:
        """Where layers lie that are kept as they are computed with."""
        quantized = self.spec.quantization != "none" and self.outlined is None
        return PackedLayers(self.store, self.spec) if self.store is not None and quantized else None

    def with_parts(
        self,
        span: Span,
        progress: Progress,
        load: Callable[[Mapping[str, BlobPart] | None, Progress], T],
        held: Collection[int] = (),
    ) -> T:
        """What `load` makes of the tensors of `span`, which are fetched before if they come from a hub; None for those
        of the folder. If the disk has spoiled them or cannot read them, they are fetched again, once. Those of layers
        that are `held` in another form are not needed.

        Raises:
            WeightsError, OSError: they cannot be fetched; and whatever `load` raises.
        """
        if self.hub is None:
            return load(None, progress)
        try:
            return self._fetch_and_load(self.hub, span, progress, load, held)
        except (WeightsError, OSError) as error:
            if isinstance(error, OSError) and error.errno != errno.EIO:
                raise
            if not self.hub.drop_damaged(span, self.manifest):
                raise
            return self._fetch_and_load(self.hub, span, progress, load, held)

    def stand_ins(self) -> Mapping[str, StandIn] | None:
        """Random tensors in the place of a hub's, so that measuring fetches nothing; None: the folder has them all."""
        if self.hub is None:
            return self.outlined
        return {name: StandIn(remote.tensor) for name, remote in self.hub.checkpoint.tensors.items()}

    def _fetch_and_load(
        self,
        hub: HubWeights,
        span: Span,
        progress: Progress,
        load: Callable[[Mapping[str, BlobPart] | None, Progress], T],
        held: Collection[int],
    ) -> T:
        fetched = 0

        def fetching(done: int, total: int) -> None:
            nonlocal fetched
            fetched = total
            progress(done, total + self.spec.weight_bytes(span))
            self.report(f"Fetching layers {span} of {self.spec.name}: {progress_bar(done, total)}")

        with hub.ready(span, self.manifest, fetching, held) as parts:
            return load(parts, lambda done, total: progress(fetched + done, fetched + total))


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A model, as its owner asks for it."""

    identifier: str
    dtype: str = "auto"
    """`auto`: as the swarm computes it already, else as it is stored."""
    quantization: str | None = "none"
    """None: as the swarm has it."""
    name: str | None = None
    """What the swarm is to call it; None: as `identifier` does."""


async def open_model(
    asked: ModelRequest,
    views: Sequence[PeerView],
    digests: Path,
    report: Callable[[str], None],
    access: HubAccess | None = None,
) -> LocalModel:
    """Finds the model's files and what they are.

    Of a hub's model only what is needed is fetched, when it is needed; without `access` to it none of its weights: it
    can be measured then, with random ones, but not served.

    Raises:
        CheckpointNotFound, StoreError, OSError: it is not there, damaged, or not what `views` serve under that name.
        QuantizationUnavailable: the swarm has it in a quantization that this machine cannot compute with.
    """
    identifier, name = asked.identifier, asked.name or asked.identifier
    folder = await asyncio.to_thread(catalog.resolve, identifier)
    hub: HubWeights | None = None
    outlined: Mapping[str, StandIn] | None = None
    if not catalog.is_from_hub(identifier):
        manifest = await _open_files(identifier, folder, digests, report)
    elif access is None:
        manifest, outlined = await asyncio.to_thread(outline, identifier, folder)
    elif (complete := await _open_snapshot(identifier, folder, views, digests, report)) is not None:
        manifest = complete
    else:
        manifest, hub = await open_hub_model(identifier, folder, views, access, report)
    content_hash = manifest.content_hash
    served_models = [(view.facts.model.name, view.facts.model.content_hash) for view in views]
    catalog.require_identity(name, folder, content_hash, served_models)
    served = [view.facts.model for view in views if view.facts.model.content_hash == content_hash]
    numbers = choose_numbers(asked.dtype, asked.quantization, served)
    if numbers.quantization != "none" and find_spec("bitsandbytes") is None:
        raise QuantizationUnavailable(numbers.quantization)
    refusal = (
        None
        if numbers.quantization == "none"
        else import_refusal("bitsandbytes", "choose --quantization none")
    )
    if refusal is not None:
        raise QuantizationUnavailable(numbers.quantization, refusal)
    spec = store.describe(manifest, numbers.dtype, numbers.quantization, name=name)
    return LocalModel(folder, manifest, spec, hub, report, outlined, digests=digests)


def keeping_packed(
    model: LocalModel, folder: Path, limit_bytes: int | None, stack: AsyncExitStack
) -> LocalModel:
    """A folder's model; if it is quantized here, with the store that keeps what is made of it, open on `stack`."""
    if model.spec.quantization == "none":
        return model
    try:
        return replace(model, store=stack.enter_context(BlobStore(folder, limit_bytes)))
    except OSError as error:
        _log.warning("quantized layers are not kept for the next start: %s cannot be used: %s", folder, error)
        return model


async def _open_snapshot(
    identifier: str, folder: Path, views: Sequence[PeerView], digests: Path, report: Callable[[str], None]
) -> store.Manifest | None:
    """What the hub library's own cache has of the model, if it has all of its weights, whole, and they are not others
    than the swarm serves under this name; None: they are to be fetched."""
    try:
        weight_files(folder)
        manifest = await _open_files(identifier, folder, digests, report)
    except StoreError:
        return None
    served = {view.facts.model.content_hash for view in views if view.facts.model.name == identifier}
    return manifest if not served or manifest.content_hash in served else None


async def _open_files(
    identifier: str, folder: Path, digests: Path, report: Callable[[str], None]
) -> store.Manifest:
    """What the files in the folder are."""

    def progress(done: int, total: int) -> None:
        report(
            f"Reading {identifier} to know it by its contents: {format_bytes(done)} of {format_bytes(total)}"
        )

    return await asyncio.to_thread(store.read_manifest, folder, digests, progress)
