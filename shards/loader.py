"""From a folder in Hugging Face format to a stage: only the tensors of its span are read."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from molink.shards.attention import IMPLEMENTATION, BatchSlot
from molink.shards.carving import carve, layers_path
from molink.shards.codec import dtype_of
from molink.shards.errors import UnsupportedArchitecture, WeightsError, name_some
from molink.shards.lazy_tensors import CountedTensor, LoadCounter, Progress, open_tensors
from molink.shards.manifest import Manifest
from molink.shards.probe import ProbeBatch, config_refusal, probe_input, rope_settings
from molink.shards.quantize import StreamingQuantizer, return_freed_memory
from molink.shards.spec import Span
from molink.shards.stage import Stage, StageFacts, View, shorten_lookups
from molink.shards.store import read_settings
from molink.shards.stored_quantization import stored_quantization
from molink.shards.unpacking import unpacked
from molink.shards.verification import Fingerprints

_QUIET = threading.Lock()
_TROUBLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What transformers raises over a configuration or weights that somebody else wrote."""


def load_stage(
    folder: Path,
    span: Span,
    *,
    dtype: str,
    quantization: str = "none",
    device: str = "cpu",
    progress: Progress | None = None,
    manifest: Manifest | None = None,
) -> Stage:
    """Loads the layers of `span`, the embedding if it starts the model, final norm and head if it ends it.

    With a `quantization` other than none, matrices are quantized one after the other as they are read.
    With a `manifest`, what is loaded is hashed on the way and has to be what it names: files may have been
    altered since the manifest was read. Reads local files only and never runs code from the folder.

    Raises WeightsError where tensors are missing, of other shapes, unreadable or not the manifest's, its subclass
    UnsupportedArchitecture where the model's kind cannot be served, QuantizationUnavailable where a package is
    missing for it, and ValueError where the span reaches beyond the model.
    """
    quantizer = None if quantization == "none" else StreamingQuantizer(quantization)
    config = _read_config(folder)
    if span.stop > config.num_hidden_layers:
        raise ValueError(f"{folder} has {config.num_hidden_layers} layers, so there is no span {span}")
    model = _load_model(folder, config, span, dtype_of(dtype), quantizer, progress, manifest)
    model.to(torch.device(device)).requires_grad_(requires_grad=False)
    if quantizer is not None:
        return_freed_memory()
    return _probed_stage(folder, model, config, span, dtype_of(dtype), torch.device(device))


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        with _quiet_transformers():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except _TROUBLE as error:
        raise WeightsError(folder, f"its config.json cannot be used: {error}") from error
    architecture = getattr(config, "model_type", "") or "unknown"
    reason = config_refusal(config)
    if reason is None and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        reason = "transformers has no causal language model of this type"
    if reason is None and not MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._can_set_attn_implementation():  # noqa: SLF001 - transformers' only test
        reason = "its attention cannot be replaced by one for packed batches"
    if reason is not None:
        raise UnsupportedArchitecture(folder, architecture, reason)
    return config


def _load_model(
    folder: Path,
    config: PreTrainedConfig,
    span: Span,
    dtype: torch.dtype,
    quantizer: StreamingQuantizer | None,
    progress: Progress | None,
    manifest: Manifest | None,
) -> PreTrainedModel:
    if manifest is not None and read_settings(folder / "config.json") != manifest.configuration:
        raise WeightsError(folder, "its config.json is not that of the model that is served: it was altered")
    fingerprints = None if manifest is None else Fingerprints()
    with ExitStack() as files:
        tensors, unreadable = open_tensors(folder, files)
        counter = LoadCounter(progress, dtype.itemsize)
        gaps = _Gaps(folder, span, unreadable)
        model_class = _carved_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], span, counter, gaps, quantizer)
        if quantizer is not None:
            config._experts_implementation = "eager"  # noqa: SLF001 - of the others, none takes matrices one by one
        state: dict[str, Any] = {
            name: CountedTensor(name, part, counter, dtype, fingerprints) for name, part in tensors.items()
        }
        try:
            stored = stored_quantization(vars(config))
            if stored is not None:
                state = unpacked(state, stored)
                del config.quantization_config
            with _quiet_transformers():
                model, info = model_class.from_pretrained(
                    None,
                    config=config,
                    state_dict=state,
                    dtype=dtype,
                    attn_implementation=IMPLEMENTATION,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
        except WeightsError:
            raise
        except _TROUBLE as error:
            raise WeightsError(folder, f"the weights of {span} cannot be loaded: {error}") from error
        gaps.refuse(info["missing_keys"], info["mismatched_keys"], ())
        if fingerprints is not None and manifest is not None:
            fingerprints.check(folder, tensors, span, config.num_hidden_layers, manifest)
    counter.finish()
    loaded: PreTrainedModel = model
    return loaded


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Refuses what transformers would fill with random numbers."""

    folder: Path
    span: Span
    unreadable: list[str]

    def refuse(
        self, missing: Iterable[str], mismatched: Iterable[tuple[Any, ...]], unconverted: Iterable[str]
    ) -> None:
        """`mismatched` begin with the name. `unconverted` could not be put together from the checkpoint's
        parts."""
        hint = "; ".join(self.unreadable) or "fetch the files that hold them"
        absent = set(missing)
        if absent:
            message = f"tensors that {self.span} needs are missing: {name_some(absent)} ({hint})"
            raise WeightsError(self.folder, message, absent)
        wrong = {str(entry[0]) for entry in mismatched}
        if wrong:
            message = f"tensors have other shapes than config.json says: {name_some(wrong)}"
            raise WeightsError(self.folder, message, wrong)
        partial = set(unconverted)
        if partial:
            message = f"parts of tensors that {self.span} needs are missing: {name_some(partial)} ({hint})"
            raise WeightsError(self.folder, message, partial)


def _carved_class(
    model_class: type[PreTrainedModel],
    span: Span,
    counter: LoadCounter,
    gaps: _Gaps,
    quantizer: StreamingQuantizer | None,
) -> type[PreTrainedModel]:
    """A subclass that is carved as soon as it is built, which from_pretrained does without allocating.

    It keeps name and module: transformers looks up its conversions of checkpoints by them. Nothing is ignored
    on loading, so that a tensor which the span needs cannot go missing unnoticed, and what is missing is
    refused before memory is allocated for it.
    """

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:  # noqa: N807
        model_class.__init__(self, config, *args, **kwargs)
        carve(self, span)
        counter.expected_elements = sum(parameter.numel() for parameter in self.parameters())

    def load(model: PreTrainedModel, state: object, files: object, load_config: Any) -> Any:  # noqa: ANN401 - transformers has no types
        settings = load_config if quantizer is None else replace(load_config, hf_quantizer=quantizer)
        return model_class._load_pretrained_model(model, state, files, settings)  # noqa: SLF001 - the step it extends

    def finalize(model: PreTrainedModel, load_config: object, info: Any) -> Any:  # noqa: ANN401 - as above
        tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
        mismatched = (
            info.mismatched_keys if quantizer is None else info.mismatched_keys | quantizer.mismatched
        )
        gaps.refuse(info.missing_keys - tied, mismatched, info.conversion_errors)
        return model_class._finalize_model_loading(model, load_config, info)  # noqa: SLF001 - the step it extends

    body = {
        "__module__": model_class.__module__,
        "__init__": __init__,
        "_load_pretrained_model": staticmethod(load),
        "_finalize_model_loading": staticmethod(finalize),
        "_keys_to_ignore_on_load_unexpected": [r".*"],
        "_keys_to_ignore_on_load_missing": None,
    }
    return type(model_class.__name__, (model_class,), body)


def _probed_stage(
    folder: Path,
    model: PreTrainedModel,
    config: PreTrainedConfig,
    span: Span,
    dtype: torch.dtype,
    device: torch.device,
) -> Stage:
    slot = BatchSlot()
    layers = model.get_submodule(layers_path(model))
    slot.install(layers)
    shorten_lookups(layers)
    facts = StageFacts(
        architecture=config.model_type,
        layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocabulary_size=config.vocab_size,
        context_length=_context_length(config),
        dtype=dtype,
    )
    stage = Stage(model, span, facts, {}, slot)
    probe = ProbeBatch()
    ids = torch.tensor([[0, 1]], device=device)
    inputs = ids if span.start == 0 else probe_input(facts.hidden_size, facts.dtype, device)
    try:
        with torch.inference_mode():
            view: View = stage.view(span)
            hidden = view.run(inputs, torch.tensor([[0, 1]], device=device), probe)
            if span.stop == facts.layers:
                hidden = view.logits(hidden)
    except _TROUBLE as error:
        raise UnsupportedArchitecture(folder, facts.architecture, f"a trial step failed: {error}") from error
    refusal = probe.refusal(config, span)
    if refusal is not None:
        raise UnsupportedArchitecture(folder, facts.architecture, refusal)
    if bool(torch.isnan(hidden).any()):
        raise WeightsError(folder, f"the layers {span} compute numbers that are not numbers")
    stage.layouts.update(probe.layouts(span))
    return stage


def _context_length(config: PreTrainedConfig) -> int:
    """Positions the model was made for, or fewer where it switches to another scaling in the middle of a
    sequence."""
    context = int(getattr(config, "max_position_embeddings", None) or 2**31)
    for rope in rope_settings(config):
        if rope.get("rope_type") == "longrope":
            original = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
            context = min(context, int(original))
    return context


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and reports off the terminal; what matters of them is raised as
    errors."""
    with _QUIET:
        verbosity = transformers_logging.get_verbosity()
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(transformers_logging.CRITICAL)
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
