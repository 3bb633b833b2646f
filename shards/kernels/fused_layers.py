"""Decoder layers of the Llama family as one function each, for steps on processors that need not be bitwise.

Transformers' own forward of such a layer is nine modules and some sixty operations of a few microseconds each, during
which no weights are read. Here the same formula takes a third of them: norms are torch's, queries and keys are rotated
together, and what a product gives is changed in its place. A layer is taken for one of the family by its class, and its
function only if it gives what the layer's own forward gives, up to rounding; every other layer keeps its own.
"""

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.configuration_utils import PreTrainedConfig

from molink.shards.attention.attention import AttentionRules, BatchSlot
from molink.shards.kernels.few_rows_layers import FewRowsLayer, FewRowsSteps
from molink.shards.matrices.quantize import joined
from molink.shards.model.probe import ProbeBatch, probe_input
from molink.shards.model.stage import cache_parameter
from molink.shards.native.few_rows import FewRows

_ATTENTIONS: Final = frozenset({"LlamaAttention", "MistralAttention", "Qwen2Attention", "Qwen3Attention"})
_MLPS: Final = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
_NORMS: Final = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
HEADS: Final = ("q_proj", "k_proj", "v_proj")
GATED: Final = ("gate_proj", "up_proj")
_PLAIN: Final = bool | int | float | str | None
_LEAST_ROUNDING: Final = 1e-5
_ROUNDING_UNITS: Final = 4
"""A layer's result may be so many units in the last place of its numbers away from its own forward's, or
_LEAST_ROUNDING of its length: sums of thousands are rounded in another order."""
_TRIED_POSITIONS: Final = (3, 1000)

Forward: TypeAlias = Callable[..., Tensor]
Part: TypeAlias = Any
"""A module; torch says of each of its parts that it may be a tensor."""


def fuse_layers(
    model: nn.Module,
    layers: nn.ModuleList,
    config: PreTrainedConfig,
    slot: BatchSlot,
    few_rows: FewRows | None = None,
) -> None:
    """Lets layers of the Llama family on a processor run as one function each, in steps that need not be bitwise.

    `model` is what owns the layers, on whose rotary positions they rely; `config` is the text decoder's. One layer of
    each kind is tried, the others are of the same code and settings. Quantized matrices that take the same inputs
    become one, so products are installed afterwards. With `few_rows`, decode steps of few sessions are one call
    a layer.
    """
    rotary = getattr(model, "rotary_emb", None)
    if slot.exact or rotary is None or slot.slopes is not None:
        return
    found: dict[object, AttentionRules | None] = {}
    steps = None if few_rows is None else FewRowsSteps(few_rows)
    for layer in layers:
        kind = _kind(layer)
        if kind is None:
            continue
        if kind not in found:
            found[kind] = _rules_if_alike(layer, rotary, config, slot)
        rules = found[kind]
        if rules is not None:
            _join(layer)
            lone = None if steps is None or not _is_silu(layer) else FewRowsLayer(layer, kind, rules, steps)
            layer.__dict__["forward"] = _fused(layer, slot, rules, lone)


def _kind(layer: Part) -> object | None:
    """What tells layers with different formulas apart; None: this is no layer of the family, or not on a processor."""
    parts = dict(layer.named_children())
    if set(parts) != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        return None
    attention, mlp = parts["self_attn"], parts["mlp"]
    named = dict(attention.named_children())
    norms = [parts["input_layernorm"], parts["post_attention_layernorm"]]
    norms += [named[name] for name in ("q_norm", "k_norm") if name in named]
    known = (
        type(attention).__name__ in _ATTENTIONS
        and type(mlp).__name__ in _MLPS
        and all(type(norm).__name__ in _NORMS for norm in norms)
        and set(named) - {"q_norm", "k_norm"} == {*HEADS, "o_proj"}
        and "forward" not in layer.__dict__
        and all(parameter.device.type == "cpu" for parameter in layer.parameters())
    )
    if not known:
        return None
    settings = tuple(
        (type(module).__name__, *_settings(module)) for module in (layer, attention, mlp, *norms)
    )
    return (settings, tuple(sorted(named)))


def _settings(module: nn.Module) -> list[tuple[str, object]]:
    """Its plain attributes, but for the layer's number."""
    return sorted(
        (name, value)
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN) and not name.startswith("_") and name != "layer_idx"
    )


def _rules_if_alike(
    layer: Part, rotary: Part, config: PreTrainedConfig, slot: BatchSlot
) -> AttentionRules | None:
    """How the layer attends, if its function gives what its own forward gives."""
    dtype, cache = layer.input_layernorm.weight.dtype, cache_parameter(layer.forward)
    if not cache:
        return None
    hidden = probe_input(config.hidden_size, dtype, torch.device("cpu"))
    positions = torch.tensor([[min(at, config.max_position_embeddings - 1) for at in _TRIED_POSITIONS]])
    with torch.inference_mode():
        named = {"position_embeddings": rotary(hidden, positions), "position_ids": positions}
        own, probe = _tried(layer.forward, cache, hidden, named, config, slot)
        rules = probe.rules_of(layer.self_attn.layer_idx)
        if rules is None or rules.sinks is not None:
            return None
        try:
            fused, other = _tried(_fused(layer, slot, rules), cache, hidden, named, config, slot)
        except (RuntimeError, AttributeError):  # of other shapes or parts than the family has
            return None
    pairs = [(own - hidden, fused - hidden)]
    pairs += zip(
        probe.stored_by(layer.self_attn.layer_idx), other.stored_by(layer.self_attn.layer_idx), strict=True
    )
    most = max(_LEAST_ROUNDING, _ROUNDING_UNITS * torch.finfo(dtype).eps)
    alike = all(float((one - two).norm()) <= most * float(one.norm()) for one, two in pairs)
    return rules if alike else None


def _tried(
    forward: Forward,
    cache: str,
    hidden: Tensor,
    named: dict[str, Any],
    config: PreTrainedConfig,
    slot: BatchSlot,
) -> tuple[Tensor, ProbeBatch]:
    """Output of a layer that takes its cache as `cache`, and the batch that saw what it stores and how it attends."""
    probe = ProbeBatch(config, keeps_states=False)
    slot.batch = probe
    slot.begin(probe)
    try:
        result = forward(hidden, attention_mask=None, use_cache=True, **{cache: probe}, **named)
    finally:
        slot.batch = None
    return result.float(), probe


def _join(layer: Part) -> None:
    """Makes one quantized matrix of those that take the same inputs, in their place."""
    for owner, names, together in (
        (layer.self_attn, HEADS, "qkv_proj"),
        (layer.mlp, GATED, "gate_up_proj"),
    ):
        whole = joined([getattr(owner, name) for name in names])
        if whole is not None:
            for name in names:
                delattr(owner, name)
            owner.add_module(together, whole)


def _is_silu(layer: Part) -> bool:
    return type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")


def _fused(layer: Part, slot: BatchSlot, rules: AttentionRules, lone: FewRowsLayer | None = None) -> Forward:
    """The layer's forward for the batch in `slot`: hidden states [1, tokens, hidden] to the same."""
    attention, mlp = layer.self_attn, layer.mlp
    before, behind = layer.input_layernorm, layer.post_attention_layernorm
    index, activation = attention.layer_idx, mlp.act_fn
    rotates, gates = _heads(attention), _gate(mlp)
    is_silu = _is_silu(layer)

    def together(hidden_states: Tensor, angles: tuple[Tensor, Tensor], batch: Any) -> Tensor:  # noqa: ANN401 - a batch, as transformers' caches are
        heads, value = rotates(_normed(hidden_states, before))
        cos, sin = angles
        heads = _rotated(heads, cos.unsqueeze(2), sin.unsqueeze(2)).transpose(1, 2)
        queries = heads.shape[1] - value.shape[2]
        keys, values = batch.update(heads[:, queries:], value.transpose(1, 2), index)
        attended = batch.attend(attention, heads[:, :queries], keys, values, rules).transpose(1, 2)
        hidden = attention.o_proj.forward(attended.reshape(*hidden_states.shape[:-1], -1)).add_(hidden_states)
        gate, up = gates(_normed(hidden, behind))
        product: Tensor = mlp.down_proj.forward(
            (functional.silu(gate) if is_silu else activation(gate)).mul_(up)
        )
        return product.add_(hidden)

    def forward(
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **_named: Any,  # noqa: ANN401 - whatever else the model passes; its cache is the batch in the slot
    ) -> Tensor:
        batch = slot.batch
        if batch is None or attention_mask is not None or position_embeddings is None:
            raise RuntimeError("a fused layer was run outside its stage, or with a mask")
        if lone is None:
            return together(hidden_states, position_embeddings, batch)
        return lone(hidden_states, position_embeddings, batch, together)

    return forward


def _heads(attention: Part) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From hidden states [1, tokens, hidden] to queries and keys [1, tokens, heads and key heads, dim], and values
    [1, tokens, key heads, dim]."""
    dim = attention.head_dim
    query_norm, key_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    parts = attention.num_key_value_groups + 2  # of as many heads as there are key heads, on this rank

    def joined_heads(states: Tensor) -> tuple[Tensor, Tensor]:
        every = attention.qkv_proj.forward(states)
        every = every.view(*every.shape[:-1], -1, dim)
        key_heads = every.shape[2] // parts
        heads, value = every[:, :, :-key_heads], every[:, :, -key_heads:]
        if query_norm is None:
            return heads, value
        query, key = heads[:, :, :-key_heads], heads[:, :, -key_heads:]
        return torch.cat((_normed(query, query_norm), _normed(key, key_norm)), -2), value

    def heads(states: Tensor) -> tuple[Tensor, Tensor]:
        query, key = attention.q_proj.forward(states), attention.k_proj.forward(states)
        value = attention.v_proj.forward(states)
        shape = (*query.shape[:-1], -1, dim)
        query, key = query.view(shape), key.view(shape)
        if query_norm is not None:
            query, key = _normed(query, query_norm), _normed(key, key_norm)
        return torch.cat((query, key), -2), value.view(shape)

    return joined_heads if hasattr(attention, "qkv_proj") else heads


def _gate(mlp: Part) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """From hidden states to what goes through the activation, and what that is multiplied by."""

    def joined_gate(states: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = mlp.gate_up_proj.forward(states).chunk(2, -1)
        return gate, up

    def gate(states: Tensor) -> tuple[Tensor, Tensor]:
        return mlp.gate_proj.forward(states), mlp.up_proj.forward(states)

    return joined_gate if hasattr(mlp, "gate_up_proj") else gate


def _normed(states: Tensor, norm: Part) -> Tensor:
    weight: Tensor = norm.weight
    return functional.rms_norm(states, weight.shape, weight, norm.variance_epsilon)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (Su et al., "RoFormer", 2021, section 3.4) of [1, tokens, heads, dim], whose pairs are the i-th
    numbers of both halves; angles [1, tokens, 1, dim]."""
    left, right = heads.chunk(2, -1)
    return torch.cat((-right, left), -1).mul_(sin).addcmul_(heads, cos)
