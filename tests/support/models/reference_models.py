"""Models that came with code of their own, written out from their descriptions: the reference for conversions.

Each is a compact forward over tensors under the names of its checkpoints: Baichuan (Yang et al. 2023; ALiBi in the
13B models), ChatGLM2 and 3 (GLM team 2024), Qwen (Bai et al. 2023), DeepSeekMoE (Dai et al. 2024). Neither the
original code nor original weights were at hand.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]

_HEADS, _HIDDEN, _VOCABULARY, _LAYERS = 4, 32, 96, 4


@dataclass(frozen=True)
class ReferenceModel:
    """A configuration as its authors write it, the shapes of its tensors, and what they compute."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    forward: Callable[[dict[str, Any], Weights, Tensor], Tensor]
    """Token ids [tokens] to logits [tokens, vocabulary]."""

    def weights(self, seed: int = 0) -> Weights:
        """Random ones under which layers matter."""
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for name, shape in self.shapes.items():
            noise = torch.randn(shape, generator=generator)
            norm = len(shape) == 1 and "bias" not in name
            made[name] = (
                1 + 0.1 * noise if norm else noise * (1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.5)
            )
        return made

    def save(self, folder: Path, weights: Weights) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    def logits(self, weights: Weights, ids: list[int]) -> Tensor:
        return self.forward(self.config, weights, torch.tensor(ids))


def _rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight


def _rotate(states: Tensor, base: float, dim: int, *, interleaved: bool) -> Tensor:
    """Rotary positions on the first `dim` of [tokens, heads, head dim]; pairs lie side by side, or half apart."""
    angles = torch.arange(len(states))[:, None] * base ** -(torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    turned, passed = states[..., :dim], states[..., dim:]
    if interleaved:
        pairs = torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat([torch.view_as_real(pairs).flatten(-2), passed], -1)
    first, second = turned.chunk(2, -1)
    pairs = torch.complex(first, second) * turn
    return torch.cat([pairs.real, pairs.imag, passed], -1)


def _attend(query: Tensor, key: Tensor, value: Tensor, slopes: list[float] | None = None) -> Tensor:
    """[tokens, heads, dim] each, key heads shared by equally many query heads; returns [tokens, all dims]."""
    tokens, heads, dim = query.shape
    key, value = (states.repeat_interleave(heads // states.shape[1], 1) for states in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(dim)
    places = torch.arange(tokens)
    if slopes is not None:
        scores = scores + torch.tensor(slopes)[:, None, None] * (places[None] - places[:, None])
    scores = scores.masked_fill(places[None] > places[:, None], -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)


def _gated(hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T


def _baichuan(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    heads, epsilon = config["num_attention_heads"], config["rms_norm_eps"]
    rotary = "max_position_embeddings" in config
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        normed = _rms_norm(hidden, weights[at + "input_layernorm.weight"], epsilon)
        query, key, value = (
            (normed @ weights[at + "self_attn.W_pack.weight"].T).unflatten(-1, (3, heads, -1)).unbind(1)
        )
        if rotary:
            query, key = (_rotate(part, 10_000.0, part.shape[-1], interleaved=False) for part in (query, key))
        attended = _attend(query, key, value, None if rotary else ALIBI_SLOPES[heads])
        hidden = hidden + attended @ weights[at + "self_attn.o_proj.weight"].T
        normed = _rms_norm(hidden, weights[at + "post_attention_layernorm.weight"], epsilon)
        hidden = hidden + _gated(
            normed, *(weights[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        )
    head = weights["lm_head.weight"]
    if config["vocab_size"] == 125_696:
        head = head / head.norm(dim=-1, keepdim=True)
    return _rms_norm(hidden, weights["model.norm.weight"], epsilon) @ head.T


ALIBI_SLOPES = {
    4: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8],
    6: [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3],
}
"""By the number of heads; for 6 those of 4, and the first and third of 8."""


def _baichuan_model(heads: int = _HEADS, vocabulary: int = _VOCABULARY, **positions: int) -> ReferenceModel:
    hidden = 8 * heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (hidden,),
            at + "self_attn.W_pack.weight": (3 * hidden, hidden),
            at + "self_attn.o_proj.weight": (hidden, hidden),
            at + "post_attention_layernorm.weight": (hidden,),
            at + "mlp.gate_proj.weight": (48, hidden),
            at + "mlp.up_proj.weight": (48, hidden),
            at + "mlp.down_proj.weight": (hidden, 48),
        }
    config = {
        "architectures": ["BaichuanForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_baichuan.BaichuanForCausalLM"},
        "model_type": "baichuan",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": 48,
        "num_attention_heads": heads,
        "num_hidden_layers": _LAYERS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return ReferenceModel(config | positions, shapes, _baichuan)


def _chatglm(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    heads, groups, dim = (
        config[key] for key in ("num_attention_heads", "multi_query_group_num", "kv_channels")
    )
    epsilon = config["layernorm_epsilon"]
    hidden = weights["transformer.embedding.word_embeddings.weight"][ids]
    for layer in range(config["num_layers"]):
        at = f"transformer.encoder.layers.{layer}."
        normed = _rms_norm(hidden, weights[at + "input_layernorm.weight"], epsilon)
        fused = normed @ weights[at + "self_attention.query_key_value.weight"].T
        fused = (fused + weights[at + "self_attention.query_key_value.bias"]).unflatten(-1, (-1, dim))
        query, key, value = fused.split([heads, groups, groups], 1)
        query, key = (_rotate(part, 10_000.0, dim // 2, interleaved=True) for part in (query, key))
        hidden = hidden + _attend(query, key, value) @ weights[at + "self_attention.dense.weight"].T
        normed = _rms_norm(hidden, weights[at + "post_attention_layernorm.weight"], epsilon)
        gate, up = weights[at + "mlp.dense_h_to_4h.weight"].chunk(2)
        hidden = hidden + _gated(normed, gate, up, weights[at + "mlp.dense_4h_to_h.weight"])
    normed = _rms_norm(hidden, weights["transformer.encoder.final_layernorm.weight"], epsilon)
    return normed @ weights["transformer.output_layer.weight"].T


def _chatglm_model() -> ReferenceModel:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.embedding.word_embeddings.weight": (_VOCABULARY, _HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": (2,),
        "transformer.encoder.final_layernorm.weight": (_HIDDEN,),
        "transformer.output_layer.weight": (_VOCABULARY, _HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"transformer.encoder.layers.{layer}."
        shapes |= {
            at + "input_layernorm.weight": (_HIDDEN,),
            at + "self_attention.query_key_value.weight": ((_HEADS + 4) * 8, _HIDDEN),
            at + "self_attention.query_key_value.bias": ((_HEADS + 4) * 8,),
            at + "self_attention.dense.weight": (_HIDDEN, _HEADS * 8),
            at + "post_attention_layernorm.weight": (_HIDDEN,),
            at + "mlp.dense_h_to_4h.weight": (96, _HIDDEN),
            at + "mlp.dense_4h_to_h.weight": (_HIDDEN, 48),
        }
    config = {
        "architectures": ["ChatGLMModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling_chatglm.ChatGLMForConditionalGeneration"},
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_residual_connection_post_layernorm": False,
        "ffn_hidden_size": 48,
        "fp32_residual_connection": False,
        "hidden_size": _HIDDEN,
        "kv_channels": 8,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": _HEADS,
        "num_layers": _LAYERS,
        "original_rope": True,
        "padded_vocab_size": _VOCABULARY,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": 256,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return ReferenceModel(config, shapes, _chatglm)


def _qwen(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    heads, epsilon = config["num_attention_heads"], config["layer_norm_epsilon"]
    hidden = weights["transformer.wte.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer.h.{layer}."
        normed = _rms_norm(hidden, weights[at + "ln_1.weight"], epsilon)
        fused = normed @ weights[at + "attn.c_attn.weight"].T + weights[at + "attn.c_attn.bias"]
        query, key, value = fused.unflatten(-1, (3, heads, -1)).unbind(1)
        query, key = (
            _rotate(part, config["rotary_emb_base"], part.shape[-1], interleaved=False)
            for part in (query, key)
        )
        hidden = hidden + _attend(query, key, value) @ weights[at + "attn.c_proj.weight"].T
        normed = _rms_norm(hidden, weights[at + "ln_2.weight"], epsilon)
        w1, w2, down = (weights[f"{at}mlp.{part}.weight"] for part in ("w1", "w2", "c_proj"))
        hidden = hidden + _gated(normed, w2, w1, down)
    return _rms_norm(hidden, weights["transformer.ln_f.weight"], epsilon) @ weights["lm_head.weight"].T


def _qwen_model() -> ReferenceModel:
    shapes: dict[str, tuple[int, ...]] = {
        "transformer.wte.weight": (_VOCABULARY, _HIDDEN),
        "transformer.ln_f.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
    }
    for layer in range(_LAYERS):
        at = f"transformer.h.{layer}."
        shapes |= {
            at + "ln_1.weight": (_HIDDEN,),
            at + "attn.c_attn.weight": (3 * _HIDDEN, _HIDDEN),
            at + "attn.c_attn.bias": (3 * _HIDDEN,),
            at + "attn.c_proj.weight": (_HIDDEN, _HIDDEN),
            at + "ln_2.weight": (_HIDDEN,),
            at + "mlp.w1.weight": (48, _HIDDEN),
            at + "mlp.w2.weight": (48, _HIDDEN),
            at + "mlp.c_proj.weight": (_HIDDEN, 48),
        }
    config = {
        "architectures": ["QWenLMHeadModel"],
        "auto_map": {"AutoModelForCausalLM": "modeling_qwen.QWenLMHeadModel"},
        "model_type": "qwen",
        "hidden_size": _HIDDEN,
        "intermediate_size": 96,
        "kv_channels": 8,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 512,
        "no_bias": True,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "rotary_emb_base": 10_000,
        "rotary_pct": 1.0,
        "scale_attn_weights": True,
        "seq_length": 128,
        "tie_word_embeddings": False,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "vocab_size": _VOCABULARY,
    }
    return ReferenceModel(config, shapes, _qwen)


def _deepseek_experts(config: dict[str, Any], weights: Weights, at: str, hidden: Tensor) -> Tensor:
    def expert(name: str, rows: Tensor) -> Tensor:
        return _gated(rows, *(weights[f"{at}{name}.{part}_proj.weight"] for part in ("gate", "up", "down")))

    scores = (hidden @ weights[at + "gate.weight"].T).softmax(-1)
    chosen, experts = scores.topk(config["num_experts_per_tok"], -1)
    if config["norm_topk_prob"]:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    routed = torch.stack(
        [
            sum(
                weight * expert(f"experts.{index}", row)
                for weight, index in zip(given, picked.tolist(), strict=True)
            )
            for row, given, picked in zip(hidden, chosen, experts, strict=True)
        ]
    )
    return routed + expert("shared_experts", hidden)


def _deepseek(config: dict[str, Any], weights: Weights, ids: Tensor) -> Tensor:
    epsilon, dim = config["rms_norm_eps"], config["hidden_size"] // config["num_attention_heads"]
    hidden = weights["model.embed_tokens.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        normed = _rms_norm(hidden, weights[at + "input_layernorm.weight"], epsilon)
        query, key, value = (
            (normed @ weights[f"{at}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, dim))
            for part in "qkv"
        )
        query, key = (_rotate(part, config["rope_theta"], dim, interleaved=False) for part in (query, key))
        hidden = hidden + _attend(query, key, value) @ weights[at + "self_attn.o_proj.weight"].T
        normed = _rms_norm(hidden, weights[at + "post_attention_layernorm.weight"], epsilon)
        if layer < config["first_k_dense_replace"]:
            parts = (weights[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            hidden = hidden + _gated(normed, *parts)
        else:
            hidden = hidden + _deepseek_experts(config, weights, at + "mlp.", normed)
    return _rms_norm(hidden, weights["model.norm.weight"], epsilon) @ weights["lm_head.weight"].T


def _deepseek_model(*, normalized: bool) -> ReferenceModel:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
    }

    def gated(at: str, width: int) -> dict[str, tuple[int, ...]]:
        wide = dict.fromkeys((f"{at}.gate_proj.weight", f"{at}.up_proj.weight"), (width, _HIDDEN))
        return {**wide, f"{at}.down_proj.weight": (_HIDDEN, width)}

    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {f"{at}self_attn.{part}_proj.weight": (_HIDDEN, _HIDDEN) for part in "qo"}
        shapes |= {f"{at}self_attn.{part}_proj.weight": (_HIDDEN // 2, _HIDDEN) for part in "kv"}
        shapes |= {f"{at}{norm}_layernorm.weight": (_HIDDEN,) for norm in ("input", "post_attention")}
        if layer == 0:
            shapes |= gated(at + "mlp", 48)
            continue
        shapes[at + "mlp.gate.weight"] = (6, _HIDDEN)
        shapes |= gated(at + "mlp.shared_experts", 32)
        for expert in range(6):
            shapes |= gated(f"{at}mlp.experts.{expert}", 16)
    config = {
        "architectures": ["DeepseekForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM"},
        "model_type": "deepseek",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "intermediate_size": 48,
        "max_position_embeddings": 256,
        "moe_intermediate_size": 16,
        "moe_layer_freq": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "norm_topk_prob": normalized,
        "num_attention_heads": _HEADS,
        "num_experts_per_tok": 3,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _HEADS // 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10_000.0,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
        "vocab_size": _VOCABULARY,
    }
    return ReferenceModel(config, shapes, _deepseek)


REFERENCE_MODELS = {
    "baichuan (7B)": _baichuan_model(max_position_embeddings=256, model_max_length=256),
    "baichuan 2 (7B)": _baichuan_model(vocabulary=125_696, max_position_embeddings=256, model_max_length=256),
    "baichuan (13B)": _baichuan_model(heads=6, model_max_length=256),
    "chatglm (2, 3)": _chatglm_model(),
    "qwen (1)": _qwen_model(),
    "deepseek (1, MoE)": _deepseek_model(normalized=False),
    "deepseek (1, MoE), normalized": _deepseek_model(normalized=True),
}
"""By the name of the architecture's generation."""
