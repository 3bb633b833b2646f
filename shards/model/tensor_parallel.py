"""One model's layers divided over the ranks of a peer: each rank holds its heads and its part of every MLP.

Projections into heads and into an MLP keep a rank's share of their outputs, those back to the hidden state its share
of their inputs, and what the ranks make of it is summed: two all-reduces a layer (Megatron-LM, Shoeybi et al., 2019,
section 3). Which is which, transformers' plan of each architecture says (`base_model_tp_plan`). Norms, routers and the
embedding are whole on every rank. The head is divided by vocabulary; whoever asked puts the logits together.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_utils import PreTrainedModel

from molink.shards.checkpoint.verification import StoredPart
from molink.shards.model.probe import other_layers
from molink.shards.model.text_backbone import decoder_name, text_config

AllReduce = Callable[[Tensor], Tensor]
"""The sum of all ranks' tensors; it may use the memory of the one it is given."""

_OUTPUTS, _INPUTS, _EXPERTS, _PACKED = "colwise", "rowwise", "moe_tp_experts", "packed_colwise"
_WHOLE = "replicated_with_grad_allreduce"
_KNOWN_STYLES = frozenset({_OUTPUTS, _INPUTS, _EXPERTS, _PACKED, _WHOLE})
_EXPERT_PARTS = (
    (re.compile(r"experts\.\d+\.(w1|w3|gate_proj|up_proj)\.weight$"), 0, 1),
    (re.compile(r"experts\.\d+\.(w2|down_proj)\.weight$"), 1, 1),
    (re.compile(r"experts\.gate_up_proj$"), 1, 2),
    (re.compile(r"experts\.down_proj$"), 2, 1),
)
"""Names in checkpoints, the dimension to divide, and how many matrices lie one after the other along it."""


def division_refusal(config: PreTrainedConfig, ranks: int) -> str | None:
    """Why the model of this configuration cannot be divided over so many ranks, or None."""
    if other_layers(config):
        return "what its layers keep of a session cannot be divided"
    refusal = _plan_refusal(_plan(config))
    if refusal is not None:
        return refusal
    heads = int(config.num_attention_heads)
    for count, what in (
        (heads, "attention heads"),
        (int(getattr(config, "num_key_value_heads", None) or heads), "key-value heads"),
    ):
        if count % ranks:
            return f"its {count} {what} cannot be divided by {ranks}"
    return None


def vocabulary_part(vocabulary: int, rank: int, ranks: int) -> tuple[int, int]:
    """The token ids [start, stop) whose logits a rank computes."""
    return vocabulary * rank // ranks, vocabulary * (rank + 1) // ranks


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """What one rank holds of a model. `load_stage` uses it."""

    rank: int
    ranks: int
    all_reduce: AllReduce

    def refusal(self, config: PreTrainedConfig) -> str | None:
        """Why the model cannot be divided so, or None."""
        return division_refusal(config, self.ranks)

    def own_heads(self, of_all: Tensor) -> Tensor:
        """[heads of this rank] of [attention heads]."""
        return of_all.chunk(self.ranks)[self.rank]

    def divide(self, model: PreTrainedModel) -> None:
        """Replaces in place, before anything is allocated, what this rank holds only a part of.

        Raises:
            ValueError: a size cannot be divided, or a module is not what the plan takes it for.
        """
        plan = _plan(text_config(model.config))
        inside = decoder_name(model)
        base = model.get_submodule(inside) if inside else model.base_model
        for name, module in list(base.named_modules()):
            style = plan.get(_pattern(name))
            if style in (_OUTPUTS, _INPUTS):
                parent, leaf = base.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
                setattr(parent, leaf, self._divided(name, module, style))
            elif style == _EXPERTS:
                self._divide_experts(name, module)

    def divide_head(self, model: PreTrainedModel) -> None:
        """Keeps, of a loaded model's head if it has one, the rows of this rank's tokens."""
        whole = model.get_output_embeddings()
        if not isinstance(whole, nn.Linear):
            return
        start, stop = vocabulary_part(whole.out_features, self.rank, self.ranks)
        embedding = model.get_input_embeddings()
        tied = whole.weight is getattr(embedding, "weight", None)
        for name, module in list(model.named_children()):
            if module is whole:
                setattr(model, name, HeadPart(whole, start, stop, embedding if tied else None))

    def part_of(self, config: PreTrainedConfig, name: str, stored: StoredPart) -> StoredPart:
        """What this rank holds of a tensor in a checkpoint."""
        found = _divided_dimension(_plan(config), _name_in_model(config.model_type, name))
        return stored if found is None else TensorPart(stored, Division(*found, self.rank, self.ranks))

    def division(self, config: PreTrainedConfig, name: str) -> "Division | None":
        """How a parameter of the model, by its name there, is divided; None: it is whole on every rank."""
        found = _divided_dimension(_plan(config), name)
        return None if found is None else Division(*found, self.rank, self.ranks)

    def _divided(self, name: str, module: nn.Module, style: str) -> nn.Linear:
        if not isinstance(module, nn.Linear):
            raise ValueError(f"{name} is a {type(module).__name__}, which ranks cannot share")
        inputs, outputs, bias = module.in_features, module.out_features, _has(module.bias)
        if style == _OUTPUTS:
            return nn.Linear(inputs, self._share(name, outputs), bias)
        return PartialLinear(self._share(name, inputs), outputs, bias, self.all_reduce)

    def _divide_experts(self, name: str, experts: nn.Module) -> None:
        for leaf, (dimension, matrices) in {"gate_up_proj": (1, 2), "down_proj": (2, 1)}.items():
            whole = getattr(experts, leaf, None)
            if not isinstance(whole, nn.Parameter) or whole.ndim != 3:
                raise ValueError(f"{name}.{leaf} is not one tensor of all experts")
            shape = list(whole.shape)
            shape[dimension] = matrices * self._share(f"{name}.{leaf}", shape[dimension] // matrices)
            setattr(experts, leaf, nn.Parameter(torch.empty(shape, dtype=whole.dtype, device=whole.device)))
        experts.register_forward_hook(lambda _module, _inputs, partial: self.all_reduce(partial))

    def _share(self, name: str, size: int) -> int:
        if size % self.ranks:
            raise ValueError(f"the {size} of {name} cannot be divided by {self.ranks} ranks")
        return size // self.ranks


@dataclass(frozen=True, slots=True)
class Division:
    """A tensor's part on one of several ranks."""

    dimension: int
    """Along which it is divided: of matrices [..., outputs, inputs] one of the last two."""
    matrices: int
    """So many lie one after the other along it, and each is divided."""
    rank: int
    ranks: int

    def part(self, whole: Tensor) -> Tensor:
        """The rank's part, in memory of its own."""
        return torch.cat(
            [
                matrix.tensor_split(self.ranks, self.dimension)[self.rank]
                for matrix in whole.chunk(self.matrices, self.dimension)
            ],
            self.dimension,
        )

    def whole_shape(self, part: Sequence[int]) -> tuple[int, ...]:
        """The shape of what parts of this shape are of."""
        return tuple(
            size * self.ranks if index == self.dimension else size for index, size in enumerate(part)
        )


class PartialLinear(nn.Linear):
    """A projection of which this rank has some inputs: the ranks' results are summed, then biased."""

    def __init__(self, inputs: int, outputs: int, bias: bool, all_reduce: AllReduce) -> None:
        super().__init__(inputs, outputs, bias)
        self.all_reduce = all_reduce

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        summed = self.all_reduce(functional.linear(input, self.weight))
        return summed + self.bias if _has(self.bias) else summed


class HeadPart(nn.Module):
    """The rows [start, stop) of a language-model head."""

    def __init__(self, whole: nn.Linear, start: int, stop: int, embedding: nn.Module | None) -> None:
        """`embedding`: what the head is tied to, whose weights are used; without one they are copied, so that the rest
        is freed."""
        super().__init__()
        bias = whole.bias
        self._rows = slice(start, stop)
        self._tied = () if embedding is None else (embedding,)  # a tuple: it is no part of this module
        copied = whole.weight.detach()[start:stop].clone() if embedding is None else None
        self.weight = None if copied is None else nn.Parameter(copied, requires_grad=False)
        self.bias = (
            nn.Parameter(bias.detach()[start:stop].clone(), requires_grad=False) if _has(bias) else None
        )

    def forward(self, hidden: Tensor) -> Tensor:
        weights = [cast("nn.Parameter", embedding.weight)[self._rows] for embedding in self._tied]
        weight = self.weight if self.weight is not None else weights[0]
        return functional.linear(hidden, weight, self.bias)


class TensorPart:
    """A rank's part of a stored tensor. All of it is read, because only all of it can be verified."""

    def __init__(self, whole: StoredPart, division: Division) -> None:
        self._whole = whole
        self._division = division

    def __getitem__(self, index: object) -> Tensor:
        part = self._division.part(self._whole[...])
        return part if index is ... else part[index]  # type: ignore[index] # as safetensors takes it

    def get_shape(self) -> list[int]:
        shape = list(self._whole.get_shape())
        shape[self._division.dimension] //= self._division.ranks
        return shape

    def get_dtype(self) -> str:
        return self._whole.get_dtype()


def _has(bias: Tensor | None) -> bool:
    """Whether a projection has a bias, which torch's own types take for granted."""
    return bias is not None


def _plan(config: PreTrainedConfig) -> Mapping[str, str]:
    """Transformers' plan for the layers. The embedding is whole on every rank, whatever the plan says of it."""
    plan: Mapping[str, str] = config.base_model_tp_plan or {}
    return {name: style for name, style in plan.items() if "*" in name}


def _plan_refusal(plan: Mapping[str, str]) -> str | None:
    if not plan:
        return "transformers has no plan for dividing it"
    others = sorted(set(plan.values()) - _KNOWN_STYLES)
    if others:
        return f"its plan divides in ways that are not supported: {', '.join(others)}"
    attention = {style for name, style in plan.items() if "attn" in name or "attention" in name}
    if not {_OUTPUTS, _INPUTS} <= attention:
        return "its plan leaves attention whole"
    return None


def _pattern(name: str) -> str:
    """A module's name as plans write it: the layer's number is a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _name_in_model(architecture: str, name: str) -> str:
    """What transformers calls a checkpoint's tensor, but for what it puts together of several."""
    for renaming in _renamings(architecture):
        name, _ = renaming.rename_source_key(name)
    return name


@functools.cache
def _renamings(architecture: str) -> tuple[WeightRenaming, ...]:
    known = get_checkpoint_conversion_mapping(architecture) or ()
    return tuple(transform for transform in known if type(transform) is WeightRenaming)


def _divided_dimension(plan: Mapping[str, str], name: str) -> tuple[int, int] | None:
    """Along which dimension a checkpoint's tensor is divided, and how many matrices lie along it; None: it is whole."""
    if any(style == _EXPERTS for style in plan.values()):
        for pattern, dimension, matrices in _EXPERT_PARTS:
            if pattern.search(name):
                return dimension, matrices
    module, _, leaf = name.rpartition(".")
    style = next((style for key, style in plan.items() if _pattern(module).endswith(key)), None)
    if style == _OUTPUTS:
        return 0, 1
    return (1, 1) if style == _INPUTS and leaf == "weight" else None
