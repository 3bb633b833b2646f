"""The text part of models that take more than text.

Such a model is a class of transformers around a decoder, with towers for images or sound beside it. Without these it
computes of text what it would with them, and its checkpoint's names keep their meaning.
"""

import copy

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)


class Passthrough(nn.Module):
    """Stands where a module would be that is not needed here, and passes its input on."""

    device = torch.device("meta")
    """Some models ask a tower where it is before they know that it has nothing to do."""

    def forward(self, hidden: object, *_args: object, **_kwargs: object) -> object:
        return hidden


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the decoder: of a text model `config` itself, else the part of it about text."""
    return config.get_text_config(decoder=True)


def with_text_config(config: PreTrainedConfig, text: PreTrainedConfig) -> PreTrainedConfig:
    """`config` with `text` in the place of its part about text."""
    place = text_place(config)
    if place is None:
        return text
    changed = copy.copy(config)
    changed.__dict__[place] = text
    return changed


def text_place(config: PreTrainedConfig) -> str | None:
    """Which attribute of `config` is its part about text; None: it is all about text."""
    text = text_config(config)
    return next((name for name, value in vars(config).items() if value is text), None)


def generative_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that makes text with a model of this configuration, or None."""
    of_more = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING]
    of_text = [MODEL_FOR_CAUSAL_LM_MAPPING]
    mappings = of_text + of_more if text_place(config) is None else of_more + of_text
    found: list[type[PreTrainedModel]] = [
        mapping[type(config)] for mapping in mappings if type(config) in mapping
    ]
    return found[0] if found else None


def decoder_name(model: PreTrainedModel) -> str:
    """The dotted name of the model that the text configuration is of; empty for a text model.

    Raises LookupError where there is none.
    """
    kind = type(text_config(model.config))
    names: list[tuple[str, nn.Module]] = list(model.named_modules())
    for name, module in names:
        if isinstance(module, PreTrainedModel) and type(module.config) is kind:
            return name
    raise LookupError("it has no decoder of its text configuration")


def output_embedding(model: PreTrainedModel) -> nn.Module | None:
    """What makes logits of hidden states, wherever it is in the model."""
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    found = (part.get_output_embeddings() for part in parts)
    return next((output for output in found if output is not None), None)


def keep_text(model: PreTrainedModel) -> None:
    """Removes in place what a model that takes more than text needs for the rest."""
    name = decoder_name(model)
    output = output_embedding(model)
    holder: nn.Module = model
    for part in name.split(".") if name else ():
        for other, module in list(holder.named_children()):
            if other != part and module is not output:
                setattr(holder, other, Passthrough())
        for own, _ in [*holder.named_parameters(recurse=False), *holder.named_buffers(recurse=False)]:
            setattr(holder, own, None)
        holder.__dict__["_is_hf_initialized"] = True  # or else transformers looks for what is gone
        holder = holder.get_submodule(part)
    kept = {own for own, _ in model.named_parameters(remove_duplicate=False)}
    ties: dict[str, str] = model.all_tied_weights_keys
    model.all_tied_weights_keys = {one: other for one, other in ties.items() if {one, other} <= kept}
