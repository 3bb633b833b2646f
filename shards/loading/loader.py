"""From a folder in Hugging Face format to a stage: only the tensors of its span are read."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, AutoConfig

from molink.shards.checkpoint.conversions import Conversion, conversion_of
from molink.shards.checkpoint.dimensions import is_quantizable
from molink.shards.checkpoint.grouping import Groups, group_names, layer_of
from molink.shards.checkpoint.manifest import Manifest
from molink.shards.checkpoint.safetensors_header import StoreError
from molink.shards.checkpoint.store import read_settings
from molink.shards.checkpoint.stored_quantization import (
    StoredQuantization,
    UnsupportedStorage,
    plain_shapes,
    stored_quantization,
    unused_refusal,
)
from molink.shards.checkpoint.verification import Fingerprints, StoredPart
from molink.shards.codec import dtype_of
from molink.shards.device.device import Device
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.loading.converted_tensors import converted_tensors
from molink.shards.loading.known_trial import KnownTrial
from molink.shards.loading.lazy_tensors import CountedTensor, LoadCounter, Progress, open_tensors
from molink.shards.loading.self_check import self_check, software_state
from molink.shards.loading.stage_builder import (
    TROUBLE,
    FoundTensors,
    Recipe,
    build_model,
    make_stage,
    quiet_transformers,
)
from molink.shards.matrices.known_products import KnownProducts
from molink.shards.matrices.packed_layers import PackedLayers
from molink.shards.matrices.quantize import StreamingQuantizer, return_freed_memory
from molink.shards.matrices.unpacking import unpacked
from molink.shards.model.partial_model import layers_path
from molink.shards.model.probe import config_refusal
from molink.shards.model.stage import Batching, Stage
from molink.shards.model.tensor_parallel import Shard, division_refusal
from molink.shards.model.text_backbone import generative_class, text_config
from molink.shards.native.native_way import TrustedWays, WaysTrial
from molink.shards.spec import Span
from molink.shards.store.known_weights import KnownWeights

_LEAST_TIME_STEP: Final = 1e-9
"""A shorter one leaves a state as it is, in float32 too."""


@dataclass(frozen=True, slots=True, eq=False)
class StageSettings:
    """What is made of a span's tensors."""

    dtype: str
    quantization: str = "none"
    """Other than none: matrices are quantized one after the other as they are read, on the device."""
    device: str = "cpu"
    shard: Shard | None = None
    """The rank of which only its part stays in memory."""
    exact: bool = False
    """Whether steps of one session equal transformers' bit for bit; else each goes the fastest way."""
    ways: WaysTrial = field(default_factory=TrustedWays)
    """Who tries native code before the stage uses it."""
    packs_later: bool = False
    """Whether weights that are faster packed are packed by `Stage.pack_next`."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadCache:
    """What earlier loads of a model have left on this machine, and this one leaves for later ones."""

    digests: Path | None = None
    """The folder in which `tensor_digests` remembers what was read. Of files that nobody has written to since, tensors
    are not hashed again, and on processors those that stay as they are are the mapped file. A trial step of the same
    weights is not made again, nor a model compared with its parts. Of all that, one of several ranks
    takes the last alone: no tensor is whole there."""
    packed: PackedLayers | None = None
    """Where quantized layers are stored that are not in `held`."""
    held: Mapping[int, Path] = field(default_factory=dict)
    """Files from which quantized layers are read."""
    known_products: KnownProducts | None = None
    """Products that are not measured again."""


def load_stage(
    folder: Path,
    span: Span,
    settings: StageSettings,
    *,
    manifest: Manifest | None = None,
    parts: Mapping[str, StoredPart] | None = None,
    cache: LoadCache = LoadCache(),
    progress: Progress | None = None,
) -> Stage:
    """Loads the layers of `span`, the embedding if it starts the model, final norm and head if it ends it.

    With a `manifest`, what is loaded is hashed on the way and has to be what it names: files may have been
    altered since the manifest was read. `parts` are the tensors where they are not in the folder. Reads local
    files only and never runs code from the folder. The first time that an architecture with certain flags is met, a
    tiny model of the kind is split and compared with the whole one.

    Raises PackedUnusable where a file that holds a layer is not what the layer needs, WeightsError where tensors are
    missing, of other shapes, unreadable or not the manifest's, its subclass UnsupportedArchitecture where the model's
    kind cannot be served, QuantizationUnavailable where a package is missing for it, and ValueError where the span
    reaches beyond the model.
    """
    Device(settings.device).enter()
    shard, digests = settings.shard, cache.digests
    quantizer = None if settings.quantization == "none" else StreamingQuantizer(settings.quantization, shard)
    conversion = _conversion_for(folder)
    config = _read_config(folder, conversion)
    layers = text_config(config).num_hidden_layers
    if span.stop > layers:
        raise ValueError(f"{folder} has {layers} layers, so there is no span {span}")
    stored = stored_quantization(vars(config))
    for place in (config, text_config(config)):
        place.__dict__.pop("quantization_config", None)  # matrices are unpacked as they are read
    batching = _batching(folder, config, shard, digests)
    recipe = Recipe(
        dtype_of(settings.dtype),
        batching,
        quantizer,
        shard,
        settings.exact,
        torch.device(settings.device),
        cache.known_products,
        settings.ways,
        settings.packs_later,
    )
    known = None if digests is None or manifest is None or shard is not None else KnownWeights(digests)
    source = _Source(folder, parts, manifest, conversion, stored, known)
    model = _load_model(source, config, span, recipe, progress, cache.held)
    model.to(recipe.device).requires_grad_(requires_grad=False)
    if cache.packed is not None and quantizer is not None and shard is None:
        _keep_packed(cache.packed, model, [layer for layer in span if layer not in cache.held])
    if shard is not None:
        shard.divide_head(model)
    trial = None
    if digests is not None and manifest is not None and shard is None:
        how = (settings.dtype, settings.quantization, settings.exact, recipe.device.type, batching.value)
        trial = KnownTrial.of(digests, span, (software_state(), manifest.content_hash, *how))
    stage = make_stage(folder, model, config, span, recipe, trial)
    if quantizer is not None:  # what was read and, for the trial step, unpacked
        return_freed_memory()
    return stage


def _batching(folder: Path, config: PreTrainedConfig, shard: Shard | None, digests: Path | None) -> Batching:
    """How sessions of such a model step together. Raises UnsupportedArchitecture where it cannot be served so."""
    verdict = self_check(config, digests)
    if verdict.batching is None:
        advice = "Choose a model of an architecture that docs/MODELS.md lists as exact"
        raise UnsupportedArchitecture(folder, config.model_type, f"{verdict.reason}. {advice}")
    refusal = None if shard is None else shard.refusal(text_config(config))
    if refusal is not None:
        raise UnsupportedArchitecture(
            folder, config.model_type, f"several devices cannot share it: {refusal}"
        )
    return verdict.batching


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Where a model's tensors come from, and what they are before they are parameters."""

    folder: Path
    parts: Mapping[str, StoredPart] | None
    """The tensors where they are not in the folder."""
    manifest: Manifest | None
    conversion: Conversion | None
    packed_as: StoredQuantization | None
    known: KnownWeights | None
    """What earlier loads found out about the folder's tensors."""


def folder_refusal(folder: Path, ranks: int) -> str | None:
    """Why the model in `folder` cannot be divided over so many ranks, or None. Raises WeightsError where it cannot be
    served at all."""
    return division_refusal(text_config(_read_config(folder, _conversion_for(folder))), ranks)


def _conversion_for(folder: Path) -> Conversion | None:
    """How the folder's model gets names that transformers knows, where it has others."""
    try:
        settings = read_settings(folder / "config.json") or {}
    except StoreError as error:
        raise WeightsError(folder, f"its config.json cannot be used: {error}") from error
    try:
        return conversion_of(settings)
    except StoreError as error:
        raise UnsupportedArchitecture(folder, str(settings.get("model_type")), str(error)) from error


def _read_config(folder: Path, conversion: Conversion | None) -> PreTrainedConfig:
    try:
        with quiet_transformers():
            if conversion is None:
                config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            else:
                config = CONFIG_MAPPING[conversion.settings["model_type"]].from_dict(conversion.settings)
    except TROUBLE as error:
        raise WeightsError(folder, f"its config.json cannot be used: {error}") from error
    reason = config_refusal(config)
    if reason is None and generative_class(config) is None:
        reason = "transformers has no causal language model of this type"
    if reason is not None:
        raise UnsupportedArchitecture(folder, getattr(config, "model_type", "") or "unknown", reason)
    _bound_time_steps(text_config(config))
    return config


def _bound_time_steps(config: PreTrainedConfig) -> None:
    """The state-space layers of Nemotron-H have bounds of their time steps, `time_step_limit`. Transformers bounds
    those of several tokens at once by `time_step_min` instead, from which biases were drawn before training, and those
    of single tokens not at all: a prompt's tokens would depend on how it was cut into chunks."""
    if config.model_type == "nemotron_h":
        config.time_step_min = max(float(config.time_step_limit[0]), _LEAST_TIME_STEP)


def _load_model(
    source: _Source,
    config: PreTrainedConfig,
    span: Span,
    recipe: Recipe,
    progress: Progress | None,
    held: Mapping[int, Path],
) -> PreTrainedModel:
    folder, manifest = source.folder, source.manifest
    if manifest is not None and read_settings(folder / "config.json") != manifest.configuration:
        raise WeightsError(folder, "its config.json is not that of the model that is served: it was altered")
    fingerprints = None if manifest is None else Fingerprints()
    stored, unreadable = _opened(source, exact=recipe.exact)
    layers = text_config(config).num_hidden_layers
    groups = group_names(stored, read_settings(folder / "config.json"))
    _refuse_quantized(folder, stored, _names_of(groups, span, layers))
    counter = LoadCounter(progress, recipe.dtype.itemsize)
    tensors: Mapping[str, StoredPart] = {
        name: CountedTensor(name, part, counter, fingerprints, source.known) for name, part in stored.items()
    }
    try:
        if source.packed_as is not None:
            tensors = unpacked(tensors, source.packed_as)
    except TROUBLE as error:
        raise WeightsError(folder, f"the weights of {span} cannot be loaded: {error}") from error
    if source.conversion is not None:
        tensors = converted_tensors(tensors, source.conversion)
    if recipe.shard is not None:
        tensors = {
            name: part
            if _is_quantized(name, part, recipe)
            else recipe.shard.part_of(text_config(config), name, part)
            for name, part in tensors.items()
        }
    found = FoundTensors(folder, tensors, unreadable, held)
    model = build_model(found, config, span, counter, recipe)
    counter.refuse_not_numbers(folder)
    unused = _names_of(groups, span, layers, held) - counter.used
    refusal = unused_refusal(unused)
    if refusal is not None:
        raise WeightsError(folder, refusal)
    if fingerprints is not None and manifest is not None:
        fingerprints.check(folder, stored, span, layers, manifest, held)
        if source.known is not None:
            source.known.remember(fingerprints.names)
    counter.finish()
    return model


def _names_of(groups: Groups, span: Span, layers: int, held: Collection[int] = ()) -> set[str]:
    """The tensors of `span`, of a model of so many `layers`, but for layers that are `held` in another form."""
    names = {name for layer in span if layer not in held for name in groups.layers.get(layer, ())}
    names.update(groups.embed if span.start == 0 else ())
    names.update(groups.head if span.stop == layers else ())
    return names


def _refuse_quantized(folder: Path, stored: Mapping[str, StoredPart], names: Iterable[str]) -> None:
    """Raises WeightsError where one of the tensors stands for numbers that nobody would make of it."""
    settings = read_settings(folder / "config.json") or {}
    tensors = ((name, stored[name].get_dtype(), tuple(stored[name].get_shape())) for name in sorted(names))
    try:
        plain_shapes(settings, tensors)
    except UnsupportedStorage as error:
        raise WeightsError(folder, str(error)) from error


def _opened(source: _Source, *, exact: bool) -> tuple[Mapping[str, StoredPart], list[str]]:
    """The tensors on disk, and what is wrong with files that cannot be read."""
    if source.parts is None:
        return open_tensors(source.folder, source.known)
    try:
        if source.known is not None:
            source.known.look_up_blobs(source.parts, exact=exact)
    except OSError as error:
        raise WeightsError(source.folder, f"its weights cannot be read: {error}") from error
    return source.parts, []


def _keep_packed(packed: PackedLayers, model: PreTrainedModel, span: Iterable[int]) -> None:
    """Stores layers that were quantized now, unless they share tensors with others."""
    layers = model.get_submodule(layers_path(model))
    times = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
    for index in span:
        layer = layers[index]
        if all(times[id(tensor)] == 1 for tensor in layer.parameters()):
            packed.keep(index, layer)


def _is_quantized(name: str, stored: StoredPart, recipe: Recipe) -> bool:
    """Whether the quantizer takes the tensor, whole: it has to see rows from end to end."""
    if recipe.quantizer is None or layer_of(name) is None:
        return False
    return is_quantizable(name, tuple(stored.get_shape()))
