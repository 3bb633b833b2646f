"""A causal language model cut to a span of its layers, whatever its architecture.

A base model's own forward runs any span when what lies outside is replaced by modules without parameters and
hidden states go in as `inputs_embeds`. Layers keep their number in the whole model (`layer_idx`); only the
loop around them is shortened.
"""

import copy
import re

from torch import Tensor, nn, zeros
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import PreTrainedModel

from molink.shards.model.text_backbone import (
    Passthrough,
    keep_text,
    output_embedding,
    text_config,
    with_text_config,
)
from molink.shards.spec import Span

_FINAL_NORM = re.compile(
    r"norm|ln_f|layer_norm|final_layernorm|final_layer_norm|final_norm|norm_f|project_out|embedding_norm"
)
_POSITIONS = re.compile(r"wpe|embed_positions|position_embeddings")
_AFTER_EMBEDDING = re.compile(r"word_embeddings_layernorm|project_in|embed_norm|embeddings_layernorm")
_OTHER_INPUTS = re.compile(r"embed_tokens_extend")


class NoPositions(nn.Module):
    """Stands for learned position embeddings where hidden states already hold them."""

    def forward(self, positions: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return zeros((), device=positions.device)


class TextOnly(nn.Module):
    """Stands for what would put images and sound among the embedded tokens."""

    def forward(self, _token_ids: Tensor, embedded: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return embedded


class EmbeddedBefore(nn.Module):
    """Stands for a module of embeddings where what goes in has been through them."""

    def __init__(self, whole: nn.Module, kept: nn.Module | None) -> None:
        """`kept` is what stays of the modules inside `whole`, because the head uses it."""
        super().__init__()
        for name, module in whole.named_children():
            setattr(self, name, module if module is kept else Passthrough())

    def forward(self, *_args: object, inputs_embeds: Tensor, **_kwargs: object) -> Tensor:
        return inputs_embeds


class _AnyOutput(BaseModelOutput):  # type: ignore[misc] # transformers has no types
    """A base model's output of which heads may ask for what their own architecture adds: there is none of
    it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class EmbeddedOnly(nn.Module):
    """Stands for the base model below a language-model head: what goes in has been through all layers."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.__dict__ |= {name: value for name, value in vars(base).items() if isinstance(value, int | float)}

    def forward(self, *_args: object, inputs_embeds: Tensor, **_kwargs: object) -> BaseModelOutput:
        return _AnyOutput(last_hidden_state=inputs_embeds)


class Layers(nn.ModuleList):
    """The layers of a span; models slice theirs to `num_hidden_layers`, which costs a new list each step."""

    def __getitem__(self, index: int | slice) -> nn.Module:  # type: ignore[override] # a slice gives the same type
        return self if isinstance(index, slice) else super().__getitem__(index)


def layers_path(model: PreTrainedModel) -> str:
    """The dotted name of the list of decoder layers.

    Raises LookupError where there is none.
    """
    layers: int = text_config(model.config).num_hidden_layers
    names: list[str] = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == layers
    ]
    if not names:
        raise LookupError(f"it has no list of the {layers} layers that its configuration speaks of")
    return min(names, key=lambda name: name.count("."))


def make_partial(model: PreTrainedModel, span: Span) -> None:
    """Replaces in place what the span does not need. What stays keeps its name, so checkpoints load as
    ever."""
    keep_text(model)
    path = layers_path(model)
    layers = model.get_submodule(path)
    for index in range(len(layers)):
        if index not in span:
            layers[index] = Passthrough()
    _trim(model, model.get_submodule(path.rpartition(".")[0]), span, len(layers))


def without_absent(module: nn.Module) -> nn.Module:
    """The module as its own code may walk through it: lists of layers have only those that are there."""
    lists = [
        (name, child)
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and any(isinstance(layer, Passthrough) for layer in child)
    ]
    if lists:
        module = _shallow(module)
        for name, child in lists:
            setattr(module, name, Layers(layer for layer in child if not isinstance(layer, Passthrough)))
    return module


def cut_view(model: PreTrainedModel, held: Span, span: Span, layers: int) -> PreTrainedModel:
    """A model of the span that shares the layers of one that holds `held`, of which `span` is a part.

    `model` is a partial model (its list has `layers` entries) or itself such a view (it has as many as
    `held`).
    """
    path = layers_path(model)
    offset = 0 if len(model.get_submodule(path)) == layers else held.start
    view = _shallow(model)
    parent = view
    for name in path.split(".")[:-1]:
        child = _shallow(parent.get_submodule(name))
        setattr(parent, name, child)
        parent = child
    name = path.rpartition(".")[2]
    kept = list(getattr(parent, name))[span.start - offset : span.stop - offset]
    setattr(parent, name, Layers(kept))
    text = _cut_config(text_config(model.config), span.start - offset, span.stop - offset)
    for module in (view, parent, *(m for m in view.children() if hasattr(m, "config"))):
        module.__dict__["config"] = with_text_config(module.config, text)
    _trim(view, parent, span, layers)
    return view


def head_of(view: PreTrainedModel) -> PreTrainedModel:
    """The part of a view after its last layer's norm: hidden states as `inputs_embeds` to logits."""
    owner = _output_holder(view)
    head = _shallow(owner)
    inside = next(name for name, module in view.named_modules() if module is owner)
    below: nn.Module = head
    base: nn.Module = owner
    for name in layers_path(view).removeprefix(inside).strip(".").split(".")[:-1]:
        base = base.get_submodule(name)
        stand_in = EmbeddedOnly(base)
        setattr(below, name, stand_in)
        below = stand_in
    return head


def _output_holder(model: PreTrainedModel) -> PreTrainedModel:
    """The model that makes logits: the outermost one, or the decoder inside if the head is there."""
    output = output_embedding(model)
    holders = (module for module in model.modules() if any(child is output for child in module.children()))
    holder: PreTrainedModel = next(holders, model)
    return holder


def _trim(model: PreTrainedModel, parent: nn.Module, span: Span, layers: int) -> None:
    """Removes embeddings from a model that starts later, the final norm and the head from one that stops earlier, and
    what takes more than text from any."""
    ends = span.stop == layers
    for name, _ in list(parent.named_children()):
        if _OTHER_INPUTS.fullmatch(name):
            setattr(parent, name, TextOnly())
    if span.start > 0:
        _trim_start(model, parent, keep_embedding=ends and _is_tied(model))
    if not ends:
        for name, module in list(parent.named_children()):
            if _FINAL_NORM.fullmatch(name) and next(module.parameters(), None) is not None:
                setattr(parent, name, Passthrough())
        owner = _output_holder(model)
        for name, module in list(owner.named_children()):
            if all(part is not parent for part in module.modules()):
                setattr(owner, name, Passthrough())
        owner.__dict__["_is_hf_initialized"] = (
            True  # or else transformers looks for the head to initialize it
        )
        model.all_tied_weights_keys = {}
        model._tied_weights_keys = None  # noqa: SLF001 - where transformers keeps it, class and instance alike


def _is_tied(model: PreTrainedModel) -> bool:
    """Whether the head's matrix is the embedding's."""
    output = output_embedding(model)
    tied = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    return any(f"{name}.weight" in tied for name, module in model.named_modules() if module is output)


def _trim_start(model: PreTrainedModel, parent: nn.Module, *, keep_embedding: bool) -> None:
    embedding = model.get_input_embeddings()
    for name, module in list(parent.named_children()):
        if module is embedding:
            setattr(parent, name, module if keep_embedding else Passthrough())
        elif any(part is embedding for part in module.modules()):
            setattr(parent, name, EmbeddedBefore(module, embedding if keep_embedding else None))
        elif _POSITIONS.fullmatch(name):
            setattr(parent, name, NoPositions())
        elif _AFTER_EMBEDDING.fullmatch(name):
            setattr(parent, name, Passthrough())


def _shallow(module: nn.Module) -> PreTrainedModel:
    """Another module with the same children and parameters, whose children can be replaced without the
    original's."""
    clone = copy.copy(module)
    clone.__dict__["_modules"] = dict(module._modules)  # noqa: SLF001 - torch has no public way to share children
    return clone


def _cut_config(config: PreTrainedConfig, start: int, stop: int) -> PreTrainedConfig:
    """The configuration of a model of these layers: lists with one entry per layer are cut along."""
    cut = copy.copy(config)
    layers = config.num_hidden_layers
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == layers:
            cut.__dict__[name] = list(value[start:stop])
    own_name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    cut.__dict__[own_name] = stop - start
    return cut
