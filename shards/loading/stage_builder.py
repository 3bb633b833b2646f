"""From a configuration and tensors to a stage: transformers builds and fills a model that is cut to a span."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging as transformers_logging

from molink.shards.attention.attention import IMPLEMENTATION, BatchSlot, alibi_slopes
from molink.shards.batching.padded import PaddedView
from molink.shards.batching.rows import LoneView, RowsView, SerialRowsView
from molink.shards.checkpoint.conversions import ALIBI
from molink.shards.checkpoint.verification import StoredPart
from molink.shards.errors import UnsupportedArchitecture, WeightsError, name_some
from molink.shards.kernels.fused import fused_on, install_fused
from molink.shards.kernels.fused_layers import fuse_layers
from molink.shards.kv.kv_memory import LayerLayout
from molink.shards.loading.known_trial import KnownTrial
from molink.shards.loading.lazy_tensors import LoadCounter
from molink.shards.loading.lean_transformers import bring_in_meta_kernels
from molink.shards.loading.trial_jobs import jobs_of
from molink.shards.matrices.known_products import KnownProducts
from molink.shards.matrices.linear import install_products
from molink.shards.matrices.packed_layers import put_together
from molink.shards.matrices.quantize import StreamingQuantizer
from molink.shards.matrices.quantized_products import quantized_layers
from molink.shards.model.later_packing import LaterPacking, LaterWork
from molink.shards.model.partial_model import layers_path, make_partial, without_absent
from molink.shards.model.probe import ProbeBatch, probe_input, rope_settings
from molink.shards.model.stage import Batching, Stage, StageFacts, View, shorten_lookups
from molink.shards.model.tensor_parallel import Shard
from molink.shards.model.text_backbone import Passthrough, generative_class, text_config, text_place
from molink.shards.native.few_rows import few_rows_for
from molink.shards.native.native_way import NativeWay, TrustedWays, WaysTrial
from molink.shards.spec import Span

_QUIET = threading.Lock()
TROUBLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    StrictDataclassError,
    TypeError,
    ValueError,
)
"""What transformers raises over a configuration or weights that somebody else wrote."""


_VIEWS: Final[Mapping[Batching, type[View]]] = MappingProxyType(
    {
        Batching.PACKED: View,
        Batching.PADDED: PaddedView,
        Batching.ROWS: RowsView,
        Batching.SERIAL_ROWS: SerialRowsView,
        Batching.LONE: LoneView,
    }
)


_HOST: Final = torch.device("cpu")

# transformers would set aside a span's memory on a GPU in one piece, of which what is left over fits nothing
# afterwards, and has no setting for it.
modeling_utils.caching_allocator_warmup = lambda *_: None


@dataclass(frozen=True, slots=True, eq=False)
class Recipe:
    """What is made of a model's tensors."""

    dtype: torch.dtype
    batching: Batching
    quantizer: StreamingQuantizer | None = None
    """None: matrices stay as they are."""
    shard: Shard | None = None
    """The rank of which the tensors are the parts; None: they are whole."""
    exact: bool = False
    """Whether steps of one session equal transformers' bit for bit; else each goes the fastest way."""
    device: torch.device = _HOST
    """Where each tensor goes as soon as it is read, and where it is quantized."""
    known_products: KnownProducts | None = None
    """Which products are known to be fastest; None: they are measured."""
    ways: WaysTrial = field(default_factory=TrustedWays)
    """Who tries native code before it is used."""
    packs_later: bool = False
    """Whether weights that pay for packing are packed by `Stage.pack_next` and not at once."""


@dataclass(frozen=True, slots=True, eq=False)
class FoundTensors:
    """What there is of a model's tensors."""

    folder: Path
    tensors: Mapping[str, StoredPart]
    """By their names in the checkpoint, read only if the span needs them."""
    unreadable: Sequence[str] = ()
    """What is wrong with further files of the folder."""
    packed: Mapping[int, Path] = field(default_factory=dict)
    """Layers that come from these files and not from `tensors`."""


def build_model(
    found: FoundTensors, config: PreTrainedConfig, span: Span, counter: LoadCounter, recipe: Recipe
) -> PreTrainedModel:
    """The model of `config` with the parameters of `span` and no others, on the recipe's device.

    Raises PackedUnusable where a packed file is not what its layer needs, and WeightsError where tensors are missing,
    of other shapes or unreadable.
    """
    folder, packed = found.folder, found.packed
    if recipe.quantizer is not None:
        config._experts_implementation = "eager"  # noqa: SLF001 - of the others, none takes matrices one by one
    gaps = _Gaps(folder, span, found.unreadable)
    stock = generative_class(config)
    if stock is None:
        raise WeightsError(folder, f"no class generates text from a configuration of {config.model_type}")
    held: dict[int, nn.Module] = {}
    model_class = _partial_class(stock, span, counter, gaps, recipe, held, packed)
    try:
        with quiet_transformers():
            try:
                model, info = _filled(model_class, config, found.tensors, recipe)
            except NotImplementedError:
                if not bring_in_meta_kernels():
                    raise
                model, info = _filled(model_class, config, found.tensors, recipe)
    except WeightsError:
        raise
    except TROUBLE as error:
        raise WeightsError(folder, f"the weights of {span} cannot be loaded: {error}") from error
    gaps.refuse(info["missing_keys"], info["mismatched_keys"], ())
    loaded: PreTrainedModel = model
    for part in loaded.modules():
        part.__dict__.pop(
            "_init_weights", None
        )  # views of the model copy what it has, and would keep all of it
    for index, layer in held.items():
        elements = sum(parameter.numel() for parameter in layer.parameters())
        put_together(index, layer, packed[index], recipe.device)
        loaded.get_submodule(layers_path(loaded))[index] = layer
        counter.add(elements)
    return loaded


def _filled(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, StoredPart],
    recipe: Recipe,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """A model of the class with these tensors, and what transformers found wanting. Raises one of TROUBLE."""
    model, info = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(tensors),
        dtype=recipe.dtype,
        device_map=None if recipe.device.type == "cpu" else {"": recipe.device},
        attn_implementation=_attention(config) if recipe.batching.attends else None,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    return model, info


def _attention(config: PreTrainedConfig) -> str | dict[str, str]:
    """Ours, for the decoder."""
    place = text_place(config)
    return IMPLEMENTATION if place is None else {place: IMPLEMENTATION}


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Refuses what transformers would fill with random numbers."""

    folder: Path
    span: Span
    unreadable: Sequence[str]

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


def _partial_class(
    model_class: type[PreTrainedModel],
    span: Span,
    counter: LoadCounter,
    gaps: _Gaps,
    recipe: Recipe,
    held: dict[int, nn.Module],
    packed: Collection[int],
) -> type[PreTrainedModel]:
    """A subclass that is cut to its span as soon as it is built, which from_pretrained does without allocating.

    It keeps name and module: transformers looks up its conversions of checkpoints by them. Nothing is ignored
    on loading, so that a tensor which the span needs cannot go missing unnoticed, and what is missing is
    refused before memory is allocated for it. Layers that are `packed` are taken out, into `held`.
    """

    def __init__(self: PreTrainedModel, config: PreTrainedConfig, *args: object, **kwargs: object) -> None:  # noqa: N807
        with _nothing_drawn_on_meta():
            model_class.__init__(self, config, *args, **kwargs)
        make_partial(self, span)
        _initialise_present(self)
        if recipe.shard is not None:
            recipe.shard.divide(self)
        if recipe.quantizer is not None:
            recipe.quantizer.refuse_parts(self)
        counter.expected_elements = sum(parameter.numel() for parameter in self.parameters())
        layers = self.get_submodule(layers_path(self))
        for index in packed:
            held[index], layers[index] = layers[index], Passthrough()

    quantizer = recipe.quantizer

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


_DRAWS: Final = (
    "normal_",
    "uniform_",
    "kaiming_uniform_",
    "kaiming_normal_",
    "xavier_uniform_",
    "xavier_normal_",
)


@contextmanager
def _nothing_drawn_on_meta() -> Iterator[None]:
    """Torch's modules draw random numbers when they are made. Where they have no memory that does nothing, but brings
    in torch's compiler and sympy, for a second. Under the lock of `quiet_transformers`."""
    drawing = {name: getattr(nn.init, name) for name in _DRAWS}
    try:
        for name, draw in drawing.items():
            setattr(nn.init, name, partial(_drawn, draw))
        yield
    finally:
        for name, draw in drawing.items():
            setattr(nn.init, name, draw)


def _drawn(draw: Callable[..., Tensor], tensor: Tensor, *values: Any, **named: Any) -> Tensor:  # noqa: ANN401 - of any of torch's functions
    return tensor if tensor.is_meta else draw(tensor, *values, **named)


def _initialise_present(model: PreTrainedModel) -> None:
    """Lets the code that computes a model's constants walk through its layers, some of which are not there."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            own = part._init_weights  # noqa: SLF001 - the step it extends
            part.__dict__["_init_weights"] = lambda module, own=own: own(without_absent(module))


def make_stage(
    folder: Path,
    model: PreTrainedModel,
    config: PreTrainedConfig,
    span: Span,
    recipe: Recipe,
    known: KnownTrial | None = None,
) -> Stage:
    """A stage of an assembled model, after a trial step that shows what its layers cache, unless that is `known`.

    Raises UnsupportedArchitecture where it would not be exact, and WeightsError where it computes NaN.
    """
    text, device = text_config(config), recipe.device
    slopes = alibi_slopes(text.num_attention_heads).to(device) if getattr(config, ALIBI, False) else None
    if slopes is not None and recipe.shard is not None:
        slopes = recipe.shard.own_heads(slopes)
    slot = BatchSlot(slopes, exact=recipe.exact)
    layers = model.get_submodule(layers_path(model))
    slot.install(layers)
    kernels = fused_on(device)
    plain = slot.exact or device.type != "cpu"
    few_rows = None if plain else few_rows_for(model.parameters())
    without: frozenset[str] = frozenset()
    if device.type == "cpu":
        without = recipe.ways.try_ways(jobs_of(model, text, slot, few_rows))
    slot.writes_scores = NativeWay.ATTENTION in without
    for _, matrices in quantized_layers(model):
        matrices.ways = replace(matrices.ways, without=without)
    if few_rows is not None and NativeWay.COMPILED in without:
        few_rows.decline()
    runs_layers = NativeWay.LINEAR not in without  # which fusing does before products are installed
    if (
        runs_layers
        and kernels is None
        and recipe.batching is Batching.PACKED
        and isinstance(layers, nn.ModuleList)
    ):
        owner = model.get_submodule(layers_path(model).rpartition(".")[0])
        fuse_layers(owner, layers, text, slot, few_rows)
    later = LaterPacking() if recipe.packs_later else None
    recipe.ways.chose(install_products(model, slot, recipe.known_products, later, few_rows, without))
    install_fused(model, slot, kernels)
    shorten_lookups(layers)
    facts = StageFacts(
        architecture=config.model_type,
        layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocabulary_size=text.vocab_size,
        context_length=_context_length(text),
        dtype=recipe.dtype,
    )
    stage = Stage(
        model, span, facts, {}, slot, _VIEWS[recipe.batching], LaterWork(later, few_rows, recipe.ways)
    )
    if not stage.view(span).takes_hidden_states:
        reason = "its layers are not run by a decoder that takes hidden states and a cache"
        raise UnsupportedArchitecture(folder, facts.architecture, reason)
    layouts = None if known is None else known.find()
    if layouts is None:
        layouts = _tried(folder, stage, text, recipe)
        if known is not None:
            known.remember(layouts)
    stage.layouts.update(layouts)
    return stage


def _tried(folder: Path, stage: Stage, config: PreTrainedConfig, recipe: Recipe) -> dict[int, LayerLayout]:
    """What each layer of the stage caches, as a step of two tokens shows. Raises as `make_stage`."""
    span, facts, device = stage.span, stage.facts, recipe.device
    probe = ProbeBatch(config, keeps_states=recipe.batching.keeps_states)
    ids = torch.tensor([[0, 1]], device=device)
    inputs = ids if span.start == 0 else probe_input(facts.hidden_size, facts.dtype, device)
    try:
        with torch.inference_mode():
            view = stage.view(span)
            hidden = view.try_out(inputs, torch.tensor([[0, 1]], device=device), probe)
            if span.stop == facts.layers:
                hidden = view.logits(hidden)
    except TROUBLE as error:
        raise UnsupportedArchitecture(folder, facts.architecture, f"a trial step failed: {error}") from error
    refusal = probe.refusal(span, attends=recipe.batching.attends)
    if refusal is not None:
        raise UnsupportedArchitecture(folder, facts.architecture, refusal)
    if bool(torch.isnan(hidden).any()):
        raise WeightsError(folder, f"the layers {span} compute numbers that are not numbers")
    return probe.layouts(span)


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
def quiet_transformers() -> Iterator[None]:
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
