"""Models that came with code of their own, as models that transformers has: their settings and tensors under its names.

Code from a model's folder is never run. What these architectures compute is published, and equals what a class of
transformers computes on the same numbers under other names. A model's identity stays that of its own files.
No torch here: descriptions of models need it too.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

from molink.shards.checkpoint.manifest import MAX_LAYERS, Settings
from molink.shards.checkpoint.safetensors_header import StoreError

ALIBI: Final = "molink_alibi"
"""Set in converted settings: attention has linear biases (Press et al. 2022, section 3) and no rotary positions."""

_UNIT_ROWS_VOCABULARY: Final = 125_696
"""Baichuan 2 has this vocabulary, and is the generation whose head uses rows of length 1 (its report, section 2.4)."""

_CHATGLM_2_AND_3_VOCABULARY: Final = 65_024


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of one of their tensors that make one of ours."""

    name: str
    rows: tuple[int, int] | None = None
    """First and one past the last; None for all."""
    step: str = "as stored"
    """Or "doubled", "unit rows", or "zero row": a row of zeros as wide as theirs."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Settings for transformers, and what becomes of each tensor."""

    settings: dict[str, Any]
    pieces: Callable[[str], tuple[SourceRows, ...]]


def conversion_of(configuration: Settings) -> Conversion | None:
    """How a model of this configuration is served under transformers' names; None if it has them already.

    Raises `StoreError` for variants of these architectures that would compute something else.
    """
    convert = _CONVERSIONS.get(str(configuration.get("model_type")))
    return None if convert is None else convert(configuration)


def converted_settings(configuration: Settings) -> Settings:
    """The configuration under transformers' names. Raises `StoreError` as `conversion_of`."""
    conversion = conversion_of(configuration)
    return configuration if conversion is None else conversion.settings


def _baichuan(theirs: Settings) -> Conversion:
    hidden, heads = _size(theirs, "hidden_size"), _size(theirs, "num_attention_heads")
    rotary = "max_position_embeddings" in theirs
    context = _size(theirs, "max_position_embeddings" if rotary else "model_max_length")
    settings = _common(theirs) | {
        "model_type": "llama" if rotary else "smollm3",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": _size(theirs, "num_hidden_layers", MAX_LAYERS),
        "intermediate_size": _size(theirs, "intermediate_size"),
        "max_position_embeddings": context,
        "rms_norm_eps": _number(theirs, "rms_norm_eps", 1e-6),
    }
    if not rotary:
        settings |= {ALIBI: True, "no_rope_layers": [0] * settings["num_hidden_layers"]}
    unit_rows = settings["vocab_size"] == _UNIT_ROWS_VOCABULARY

    def pieces(name: str) -> tuple[SourceRows, ...]:
        if name.endswith(".self_attn.W_pack.weight"):
            return _split(name, "W_pack", {"q_proj": hidden, "k_proj": hidden, "v_proj": hidden})
        return (
            SourceRows(name, step="unit rows" if unit_rows and name == "lm_head.weight" else "as stored"),
        )

    return Conversion(settings, pieces)


def _chatglm(theirs: Settings) -> Conversion:
    _require(
        theirs,
        {"multi_query_attention": True},
        {
            "rmsnorm": True,
            "add_bias_linear": False,
            "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False,
            "fp32_residual_connection": False,
            "tie_word_embeddings": False,
        },
    )
    ratio = _number(theirs, "rope_ratio", 1)
    if ratio != 1 and theirs.get("padded_vocab_size") == _CHATGLM_2_AND_3_VOCABULARY:
        raise StoreError("rope_ratio divides positions in ChatGLM2 and multiplies the base in ChatGLM3.")
    heads, head_dim = _size(theirs, "num_attention_heads"), _size(theirs, "kv_channels")
    key_heads = _size(theirs, "multi_query_group_num")
    settings = _common(theirs, "padded_vocab_size") | {
        "model_type": "glm",
        "hidden_size": _size(theirs, "hidden_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_dim,
        "num_hidden_layers": _size(theirs, "num_layers", MAX_LAYERS),
        "intermediate_size": _size(theirs, "ffn_hidden_size"),
        "max_position_embeddings": _size(theirs, "seq_length"),
        "rms_norm_eps": _number(theirs, "layernorm_epsilon", 1e-5),
        "attention_bias": bool(theirs.get("add_qkv_bias", False)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0 * ratio,
            "partial_rotary_factor": 0.5,
        },
    }
    sizes = {"q_proj": heads * head_dim, "k_proj": key_heads * head_dim, "v_proj": key_heads * head_dim}

    def pieces(name: str) -> tuple[SourceRows, ...]:
        ours = _renamed(name, _CHATGLM_NAMES)
        return _split(ours, "query_key_value", sizes) if ".query_key_value." in ours else (SourceRows(ours),)

    return Conversion(settings, pieces)


_CHATGLM_NAMES: Final = (
    (r"transformer\.embedding\.word_embeddings\.", "model.embed_tokens."),
    (r"transformer\.output_layer\.", "lm_head."),
    (r"transformer\.encoder\.final_layernorm\.", "model.norm."),
    (r"transformer\.encoder\.layers\.", "model.layers."),
    (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
    (r"\.self_attention\.", ".self_attn."),
    (r"\.dense_h_to_4h\.", ".gate_up_proj."),
    (r"\.dense_4h_to_h\.", ".down_proj."),
)


def _qwen(theirs: Settings) -> Conversion:
    _require(theirs, {}, {"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True})
    hidden, heads = _size(theirs, "hidden_size"), _size(theirs, "num_attention_heads")
    context = _size(theirs, "max_position_embeddings")
    if theirs.get("use_dynamic_ntk") or theirs.get("use_logn_attn"):
        # beyond the length it was trained on, positions and logits depend on the length of the sequence
        context = min(context, _size(theirs, "seq_length"))
    settings = _common(theirs) | {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "num_hidden_layers": _size(theirs, "num_hidden_layers", MAX_LAYERS),
        "intermediate_size": _size(theirs, "intermediate_size") // 2,
        "max_position_embeddings": context,
        "rms_norm_eps": _number(theirs, "layer_norm_epsilon", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": _number(theirs, "rotary_emb_base", 10_000)},
    }
    if _size(theirs, "kv_channels", default=hidden // heads) * heads != hidden:
        raise StoreError("its attention heads together are not as wide as its hidden states")
    sizes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden)

    def pieces(name: str) -> tuple[SourceRows, ...]:
        ours = _renamed(name, _QWEN_NAMES)
        return _split(ours, "c_attn", sizes) if ".c_attn." in ours else (SourceRows(ours),)

    return Conversion(settings, pieces)


_QWEN_NAMES: Final = (
    (r"transformer\.wte\.", "model.embed_tokens."),
    (r"transformer\.ln_f\.", "model.norm."),
    (r"transformer\.h\.", "model.layers."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.attn\.", ".self_attn."),
    (r"\.mlp\.w1\.", ".mlp.up_proj."),
    (r"\.mlp\.w2\.", ".mlp.gate_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)


def _deepseek(theirs: Settings) -> Conversion:
    plain = {"moe_layer_freq": 1, "scoring_func": "softmax", "rope_scaling": None, "attention_bias": False}
    _require(theirs, {}, plain)
    dense = _size(theirs, "first_k_dense_replace", MAX_LAYERS, default=0)
    per_expert = _size(theirs, "moe_intermediate_size")
    settings = _common(theirs) | {
        "model_type": "qwen2_moe",
        "hidden_size": _size(theirs, "hidden_size"),
        "num_attention_heads": _size(theirs, "num_attention_heads"),
        "num_key_value_heads": _size(theirs, "num_key_value_heads"),
        "num_hidden_layers": _size(theirs, "num_hidden_layers", MAX_LAYERS),
        "intermediate_size": _size(theirs, "intermediate_size"),
        "moe_intermediate_size": per_expert,
        "shared_expert_intermediate_size": per_expert * _size(theirs, "n_shared_experts"),
        "num_experts": _size(theirs, "n_routed_experts"),
        "num_experts_per_tok": _size(theirs, "num_experts_per_tok"),
        "norm_topk_prob": bool(theirs.get("norm_topk_prob", False)),
        "mlp_only_layers": list(range(dense)),
        "decoder_sparse_step": 1,
        "qkv_bias": False,
        "max_position_embeddings": _size(theirs, "max_position_embeddings"),
        "rms_norm_eps": _number(theirs, "rms_norm_eps", 1e-6),
        "rope_parameters": {"rope_type": "default", "rope_theta": _number(theirs, "rope_theta", 10_000.0)},
    }
    return Conversion(settings, _deepseek_pieces)


def _deepseek_pieces(name: str) -> tuple[SourceRows, ...]:
    """The shared experts of Qwen2-MoE pass a gate, a sigmoid: with a gate of zeros it halves them, and doubled
    weights undo that without any rounding."""
    if ".mlp.shared_experts.down_proj." in name:
        return (SourceRows(name.replace("shared_experts", "shared_expert"), step="doubled"),)
    if ".mlp.gate.weight" in name:
        return (SourceRows(name), SourceRows(name.replace(".gate.", ".shared_expert_gate."), step="zero row"))
    return (SourceRows(name.replace(".mlp.shared_experts.", ".mlp.shared_expert.")),)


_CONVERSIONS: Final[Mapping[str, Callable[[Settings], Conversion]]] = {
    "baichuan": _baichuan,
    "chatglm": _chatglm,
    "qwen": _qwen,
    "deepseek": _deepseek,
}


def _common(theirs: Settings, vocabulary: str = "vocab_size") -> dict[str, Any]:
    kept = {key: theirs.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    dtypes = {key: theirs[key] for key in ("dtype", "torch_dtype") if key in theirs}
    tied = bool(theirs.get("tie_word_embeddings", False))
    return kept | dtypes | {"vocab_size": _size(theirs, vocabulary), "tie_word_embeddings": tied}


def _size(theirs: Settings, key: str, most: int = 2**24, default: int | None = None) -> int:
    value = theirs.get(key, default)
    if type(value) is not int or not (1 if default is None else 0) <= value <= most:
        shown = str(value)[:80]
        raise StoreError(f"config.json says {shown!r} for {key}; it must be a whole number up to {most}.")
    return value


def _number(theirs: Settings, key: str, default: float) -> float:
    value = theirs.get(key, default)
    if type(value) not in (int, float):
        raise StoreError(f"config.json says {str(value)[:80]!r} for {key}; it must be a number.")
    return cast("float", value)


def _require(theirs: Settings, stated: Mapping[str, object], unless: Mapping[str, object]) -> None:
    """Refuses variants: `stated` has to be stated, `unless` must not be stated otherwise."""
    for expected, default in ((stated, None), (unless, ...)):
        for key, value in expected.items():
            found = theirs.get(key, value if default is ... else default)
            if found != value:
                raise StoreError(
                    f"config.json says {str(found)[:80]!r} for {key}; only {value!r} can be converted exactly."
                )


def _split(name: str, fused: str, sizes: Mapping[str, int]) -> tuple[SourceRows, ...]:
    """A fused projection as its parts, one below the other."""
    pieces, start = [], 0
    for part, size in sizes.items():
        pieces.append(SourceRows(name.replace(f".{fused}.", f".{part}."), (start, start + size)))
        start += size
    return tuple(pieces)


def _renamed(name: str, patterns: tuple[tuple[str, str], ...]) -> str:
    for theirs, ours in patterns:
        name = re.sub(theirs, ours, name)
    return name
