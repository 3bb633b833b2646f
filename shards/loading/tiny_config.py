"""A tiny configuration of the same architecture: as narrow and shallow as it goes, with every flag as it is."""

import re
from collections.abc import Mapping
from typing import Any, Final

from transformers.configuration_utils import PreTrainedConfig

from molink.shards.model.text_backbone import text_config, with_text_config

LAYERS: Final = 4
VOCABULARY: Final = 128
_HIDDEN: Final = 64
_HEADS: Final = 4
_HEAD_DIM: Final = 16
_ROTARY_DIM: Final = 8
WINDOW: Final = 5

_MOST: Final[tuple[tuple[str, int], ...]] = (
    (r"vocab_size|n_vocab|vocab_size_per_layer_input", VOCABULARY),
    (r"hidden_size|n_embd|d_model|embedding_size", _HIDDEN),
    (r"num_attention_heads|n_heads?|linear_num_(?:value_)?heads|mamba_num_heads", _HEADS),
    (r"linear_num_key_heads|n_groups|mamba_n_groups|mamba_ngroups", 2),
    (r"(?:mamba_|ssm_)?(?:d_)?state(?:_size)?", _HEAD_DIM),
    (r"qk_rope_head_dim", _ROTARY_DIM),
    (r"head_dim|d_kv|\w*_head_dim|kv_channels|mamba_d_head", _HEAD_DIM),
    (r"\w*lora_rank", 16),
    (r"\w*intermediate_size\w*|\w*ffn\w*_(?:dim|size)|n_inner|ffn_dim|\w*_hidden_size", 96),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length", 256),
    (r"\w*num_experts|num_local_experts|n_routed_experts", 4),
    (r"num_experts_per_tok(?:en)?|moe_top_?k|moe_k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"first_k_dense_replace|\w*dense_layers|\w*_start_index", 1),
    (r"sliding_window\w*|\w*window_size|attention_chunk_size|local_attention", WINDOW),
    (r"max_window_layers", LAYERS // 2),
    (r"index_topk", WINDOW),
    (r"attn_layer_period", LAYERS),
    (r"attn_layer_offset", LAYERS // 2),
)
"""Keys by their names, and the most that a tiny configuration has of them."""
_LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYER_INDICES: Final = "attn_layer_indices"
_HEAD_COUNTS: Final = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "num_attention_groups")
_STATE_SPACES: Final = (
    ("num_heads", "head_dim", "expand"),
    ("mamba_n_heads", "mamba_d_head", "mamba_expand"),
)
_STATE_SPACE_WIDTH: Final = "mamba_d_ssm"
_TOKENS: Final = re.compile(r"\w*_token(?:_id)?s?")
_ROTARY_LISTS: Final = ("short_factor", "long_factor")
_REPEATED: Final = ("hidden_size", "vocab_size")
"""What a model that takes more than text may say of its text again."""
_SECTIONS: Final = "mrope_section"
"""How many pairs of a head's dimensions turn with each coordinate of a position."""


def tiny_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """A configuration of a few narrow layers that has the flags of `config`: kinds of layers, windows, norms, biases,
    caps, scales, tied embeddings, scaled positions.

    Of a model that takes more than text, only the part about text is made tiny.

    Raises what the configuration's class raises where the two do not fit together.
    """
    text = text_config(config)
    if text is not config:
        tiny_text = tiny_config(text)
        composite = with_text_config(config, tiny_text)
        for name in _REPEATED:
            if vars(config).get(name) == getattr(text, name, ...):
                composite.__dict__[name] = getattr(tiny_text, name)
        return composite
    values = config.to_dict()
    layers: int = config.num_hidden_layers
    kept = _telling_layers({"layer_types": getattr(config, "layer_types", None)} | values, layers)
    tiny = _shrunk(values, kept, layers)
    heads = _first(values, _HEAD_COUNTS) or 1  # some architectures have no attention
    head_dim = values.get("head_dim") or config.hidden_size // heads
    tiny["rope_parameters"] = _shrunk_rope(values.get("rope_parameters"), head_dim)
    if tiny["rope_parameters"] is None:
        del tiny["rope_parameters"]
    if isinstance(values.get("rotary_dim"), int):
        tiny["rotary_dim"] = max(2, values["rotary_dim"] * _HEAD_DIM // head_dim)
    if isinstance(values.get("qk_rope_head_dim"), int):
        if values.get("head_dim") == values["qk_rope_head_dim"]:
            tiny["head_dim"] = tiny["qk_rope_head_dim"]
        if isinstance(values.get("qk_head_dim"), int):
            tiny["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    if isinstance(values.get("per_layer_config"), dict):
        tiny["per_layer_config"] = _renumbered(values["per_layer_config"], kept, head_dim, heads)
    _fit_state_space(tiny)
    tiny.pop("transformers_version", None)
    shrunk: PreTrainedConfig = type(config).from_dict(tiny)
    return shrunk


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first whole number of these names."""
    return next((values[name] for name in names if type(values.get(name)) is int), None)


def _telling_layers(values: Mapping[str, Any], layers: int) -> list[int]:
    """Which layers to keep: one of every kind, as far as there is room, and then the first."""
    per_layer = [value for value in values.values() if isinstance(value, list) and len(value) == layers]
    kinds: dict[str, int] = {}
    for index in range(layers):
        kinds.setdefault(repr([value[index] for value in per_layer]), index)
    chosen = list(kinds.values())[:LAYERS]
    chosen += [index for index in range(layers) if index not in chosen][: LAYERS - len(chosen)]
    return sorted(chosen)


def _shrunk(
    values: Mapping[str, Any], kept: list[int], layers: int, outer_heads: int | None = None
) -> dict[str, Any]:
    tiny: dict[str, Any] = {}
    heads = _first(values, _HEAD_COUNTS) or outer_heads
    for name, value in values.items():
        if name in ("rope_parameters", "per_layer_config"):
            continue
        if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            tiny[name] = _shrunk(value, kept, layers, heads)
        elif name == _LAYER_INDICES and isinstance(value, list):
            tiny[name] = [kept.index(layer) for layer in value if layer in kept]
        elif isinstance(value, list) and len(value) == layers:
            tiny[name] = [_shrunk_value(name, value[index], len(kept)) for index in kept]
        else:
            tiny[name] = _shrunk_value(name, value, len(kept))
    for name in _KV_HEADS:
        if type(values.get(name)) is int and heads is not None:
            count = min(heads, _HEADS)
            tiny[name] = count if values[name] == heads else max(1, min(values[name], count // 2))
    return tiny


def _shrunk_value(name: str, value: Any, layers: int) -> Any:  # noqa: ANN401 - values of any configuration
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name in _LAYER_COUNTS:
        return layers
    for pattern, most in _MOST:
        if re.fullmatch(pattern, name):
            return min(value, most)
    return value % VOCABULARY if _TOKENS.fullmatch(name) else value


def _fit_state_space(tiny: dict[str, Any]) -> None:
    """Heads of a state-space layer fill its width, which is a multiple of the hidden size."""
    for heads, head_dim, factor in _STATE_SPACES:
        if {heads, head_dim, factor} <= tiny.keys():
            width = tiny[factor] * _HIDDEN
            tiny |= {heads: width // _HEAD_DIM, head_dim: _HEAD_DIM}
            if tiny.get(_STATE_SPACE_WIDTH):
                tiny[_STATE_SPACE_WIDTH] = width


def _shrunk_rope(rope: Any, head_dim: int) -> Any:  # noqa: ANN401 - as above
    """Rotary positions for the tiny head dimension: lists with an entry for each pair of dimensions are cut."""
    if not isinstance(rope, dict):
        return rope
    shrunk = {}
    for key, value in rope.items():
        if key in _ROTARY_LISTS and isinstance(value, list):
            value = value[: len(value) * _HEAD_DIM // head_dim]  # noqa: PLW2901 - the same, shorter
        elif key == _SECTIONS and isinstance(value, list):
            first = [pairs * _HEAD_DIM // head_dim for pairs in value[:-1]]
            value = [*first, sum(value) * _HEAD_DIM // head_dim - sum(first)]  # noqa: PLW2901 - the same, narrower
        shrunk[key] = _shrunk_rope(value, head_dim) if isinstance(value, dict) else value
    return shrunk


def _renumbered(
    overrides: Mapping[Any, Any], kept: list[int], head_dim: int, heads: int
) -> dict[int, dict[str, Any]]:
    """What single layers have of their own, for the layers that are kept."""
    own = {int(layer): values for layer, values in overrides.items()}
    tiny = {}
    for index, layer in enumerate(kept):
        if layer in own:
            tiny[index] = _shrunk(own[layer], kept, len(kept), heads)
            if "head_dim" in own[layer]:
                tiny[index]["head_dim"] = own[layer]["head_dim"] * _HEAD_DIM // head_dim
    return tiny
