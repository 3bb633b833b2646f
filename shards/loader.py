"""From a folder in Hugging Face format to a stage: only the tensors of its span are read."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from molink.shards.assembly import TROUBLE, assemble, make_stage, quiet_transformers
from molink.shards.codec import dtype_of
from molink.shards.conversions import Conversion, conversion_of
from molink.shards.converted_tensors import converted_tensors
from molink.shards.errors import UnsupportedArchitecture, WeightsError
from molink.shards.lazy_tensors import CountedTensor, LoadCounter, Progress, open_tensors
from molink.shards.manifest import Manifest
from molink.shards.probe import config_refusal
from molink.shards.safetensors_header import StoreError
from molink.shards.self_check import self_check
from molink.shards.spec import Span
from molink.shards.stage import Batching, Stage
from molink.shards.store import read_settings
from molink.shards.tensor_parallel import Shard
from molink.shards.verification import Fingerprints, StoredPart


def load_stage(
    folder: Path,
    span: Span,
    *,
    dtype: str,
    device: str = "cpu",
    progress: Progress | None = None,
    manifest: Manifest | None = None,
    parts: Mapping[str, StoredPart] | None = None,
    shard: Shard | None = None,
) -> Stage:
    """Loads the layers of `span`, the embedding if it starts the model, final norm and head if it ends it.

    With a `manifest`, what is loaded is hashed on the way and has to be what it names: files may have been
    altered since the manifest was read. `parts` are the tensors where they are not in the folder. With
    a `shard`, only that rank's part stays in memory. Reads local files only and never runs code from the folder. The
    first time that a process meets an architecture with certain flags, a tiny model of the kind is split and compared
    with the whole one.

    Raises WeightsError where tensors are missing, of other shapes, unreadable or not the manifest's, its subclass
    UnsupportedArchitecture where the model's kind cannot be served, and ValueError where the span reaches beyond
    the model.
    """
    conversion = _conversion_for(folder)
    config = _read_config(folder, conversion)
    if span.stop > config.num_hidden_layers:
        raise ValueError(f"{folder} has {config.num_hidden_layers} layers, so there is no span {span}")
    verdict = self_check(config)
    if verdict.batching is None:
        advice = "Choose a model of an architecture that docs/MODELS.md lists as exact"
        raise UnsupportedArchitecture(folder, config.model_type, f"{verdict.reason}. {advice}")
    refusal = None if shard is None else shard.refusal(config)
    if refusal is not None:
        raise UnsupportedArchitecture(
            folder, config.model_type, f"several devices cannot share it: {refusal}"
        )
    model = _load_model(
        folder, config, span, dtype_of(dtype), verdict.batching, progress, manifest, conversion, parts, shard
    )
    model.to(torch.device(device)).requires_grad_(requires_grad=False)
    if shard is not None:
        shard.divide_head(model)
    return make_stage(folder, model, config, span, torch.device(device), verdict.batching)


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
    if reason is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal language model of this type"
    if reason is not None:
        raise UnsupportedArchitecture(folder, getattr(config, "model_type", "") or "unknown", reason)
    return config


def _load_model(
    folder: Path,
    config: PreTrainedConfig,
    span: Span,
    dtype: torch.dtype,
    batching: Batching,
    progress: Progress | None,
    manifest: Manifest | None,
    conversion: Conversion | None,
    parts: Mapping[str, StoredPart] | None,
    shard: Shard | None,
) -> PreTrainedModel:
    if manifest is not None and read_settings(folder / "config.json") != manifest.configuration:
        raise WeightsError(folder, "its config.json is not that of the model that is served: it was altered")
    fingerprints = None if manifest is None else Fingerprints()
    with ExitStack() as files:
        stored, unreadable = open_tensors(folder, files) if parts is None else (parts, [])
        counter = LoadCounter(progress, dtype.itemsize)
        tensors = {
            name: CountedTensor(name, part, counter, dtype, fingerprints) for name, part in stored.items()
        }
        converted: Mapping[str, StoredPart] = (
            tensors if conversion is None else converted_tensors(tensors, conversion)
        )
        if shard is not None:
            converted = {name: shard.part_of(config, name, part) for name, part in converted.items()}
        model = assemble(
            folder, config, span, converted, unreadable, counter, dtype=dtype, batching=batching, shard=shard
        )
        counter.refuse_not_numbers(folder)
        if fingerprints is not None and manifest is not None:
            fingerprints.check(folder, stored, span, config.num_hidden_layers, manifest)
    counter.finish()
    return model
