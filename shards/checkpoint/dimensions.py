"""A model's dimensions, read from its configuration whatever its architecture calls them."""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from molink.shards.checkpoint.conversions import converted_settings
from molink.shards.checkpoint.manifest import MAX_LAYERS, Settings
from molink.shards.checkpoint.safetensors_header import INFINITIES, INFINITY_TAG, StoreError
from molink.shards.checkpoint.state_sizes import KEEPS_NO_KEYS, StateSize, state_sizes

MAX_WIDTH: Final = 2**20
MAX_VOCABULARY: Final = 2**24
MAX_CONTEXT: Final = 2**30
MAX_STATE: Final = 2**32
UNLIMITED_CONTEXT: Final = 2048
"""For models whose positions have no limit of their own (ALiBi) and whose configuration names none."""
_LONG_KEYS: Final = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_attention_heads": ("num_attention_heads", "n_head"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions"),
    "vocab_size": ("vocab_size",),
}
_PER_LAYER_KEYS: Final = ("num_key_value_heads", "head_dim")
_FURTHER_KEYS: Final = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "word_embed_proj_dim")
_PLAIN: Final = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe"})
"""Architectures whose head dimension, unless given, is hidden size over attention heads."""
_WITH_HEAD_DIM: Final = frozenset({"gemma", "gemma2", "qwen3", "qwen3_moe"})
"""Architectures that mean the same by the same keys, but only if the head dimension is given."""
_TIED: Final = frozenset({"gpt2", "gemma", "gemma2"})
"""Of these architectures, those that tie embedding and head unless the configuration says otherwise."""

_NEVER_QUANTIZED: Final = re.compile(
    r"(?:^|\.)(?:gate|router|shared_expert_gate|dt_proj|weights_proj)(?:\.\w+)?\.weight$"
)


@dataclass(frozen=True, slots=True)
class Dimensions:
    """What the sizes of weights and caches follow from."""

    layers: int
    hidden_size: int
    vocabulary_size: int
    context_length: int
    kv_elements: tuple[int, ...]
    """Numbers that one token keeps in the KV cache of each layer."""
    kv_windows: tuple[int | None, ...]
    """How many of the latest tokens a token sees in each layer; None: all, or nothing certain is said."""
    shared_elements: int
    """Numbers of the token embedding if the head multiplies by it, else 0."""
    states: tuple[StateSize, ...]
    """What each layer keeps of a session beside."""


def dimensions(configuration: Settings) -> Dimensions:
    """The dimensions of the model. Raises `StoreError` if the configuration has none or absurd ones.

    Common architectures are read directly; for the others transformers' configuration class supplies its
    names and defaults, which costs the import of transformers.
    """
    configuration = converted_settings(configuration)
    values = _plain_values(configuration) or _transformers_values(configuration)
    layers = _size(values, "num_hidden_layers", MAX_LAYERS)
    kinds = _layer_types(values.get("layer_types")) or ("full_attention",) * layers
    if len(kinds) != layers:
        raise StoreError(f"config.json names the kinds of {len(kinds)} layers and has {layers}.")
    attends = any(kind not in KEEPS_NO_KEYS for kind in kinds)
    heads = _size(values, "num_attention_heads", MAX_WIDTH) if attends else 1
    hidden_size = _size(values, "hidden_size", MAX_WIDTH)
    context_length = _size(values, "max_position_embeddings", MAX_CONTEXT)
    vocabulary_size = _size(values, "vocab_size", MAX_VOCABULARY)
    if values.get("kv_lora_rank"):
        # Multi-head latent attention caches the compressed latents (DeepSeek-V2, section 2.1.2).
        latent = _size(values, "kv_lora_rank", MAX_WIDTH) + _size(values, "qk_rope_head_dim", MAX_WIDTH)
        kv_elements = (latent,) * layers
    else:
        default = max(1, hidden_size // heads)
        own: Sequence[dict[str, object]] = values.get("layers_own") or ({},) * layers
        kv_elements = tuple(_kv_elements({**values, **layer}, heads, default) for layer in own)
    kv_elements = tuple(
        0 if kind in KEEPS_NO_KEYS else count for kind, count in zip(kinds, kv_elements, strict=True)
    )
    if values.get("index_head_dim"):
        index = _size(values, "index_head_dim", MAX_WIDTH)
        kv_elements = tuple(
            count + (index if kind == "indexed_attention" else 0)
            for kind, count in zip(kinds, kv_elements, strict=True)
        )
    states = values.get("states") or (StateSize(),) * layers
    windows = _windows(values, layers)
    embedded = (
        _size(values, "word_embed_proj_dim", MAX_WIDTH) if values.get("word_embed_proj_dim") else hidden_size
    )
    shared = vocabulary_size * embedded if values["tied"] else 0
    return Dimensions(
        layers, hidden_size, vocabulary_size, context_length, kv_elements, windows, shared, states
    )


def _kv_elements(values: Mapping[str, object], heads: int, head_dim: int) -> int:
    """Keys and values of one token in a layer of these values; without a value there are as many key heads as heads."""
    if values.get("num_key_value_heads"):
        heads = _size(values, "num_key_value_heads", MAX_WIDTH)
    if values.get("head_dim"):
        head_dim = _size(values, "head_dim", MAX_WIDTH)
    return 2 * heads * head_dim


def _windows(values: Mapping[str, object], layers: int) -> tuple[int | None, ...]:
    """Of each layer: all have the window, or those that the values say."""
    window, kinds = values.get("sliding_window"), values.get("layer_types")
    if type(window) is not int or not 1 <= window <= MAX_CONTEXT:
        return (None,) * layers
    if kinds is None:
        return (window,) * layers
    if not isinstance(kinds, Sequence) or len(kinds) < layers:
        return (None,) * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds[:layers])


def _layer_types(stated: object) -> Sequence[str]:
    """The kinds of layers that a configuration names; none if it names none."""
    if stated is None:
        return ()
    if not isinstance(stated, list | tuple) or not all(isinstance(kind, str) for kind in stated):
        raise StoreError(f"config.json says {repr(stated)[:80]} for layer_types; it must be a list of names.")
    return stated


def _refuse_many_layers(configuration: Settings) -> None:
    """Of a number of layers that no model has, a configuration class would make lists that fill the memory."""
    text = configuration.get("text_config")
    for place in (configuration, text if isinstance(text, dict) else {}):
        for key in _LONG_KEYS["num_hidden_layers"]:
            count = place.get(key)
            if type(count) is int and count > MAX_LAYERS:
                _size(place, key, MAX_LAYERS)


def _size(values: Mapping[str, object], key: str, most: int) -> int:
    value = values.get(key)
    if type(value) is not int or not 1 <= value <= most:
        shown = "nothing" if value is None else repr(value)[:80]
        raise StoreError(f"config.json says {shown} for {key}; it must be a whole number from 1 to {most}.")
    return value


def _plain_values(configuration: Settings) -> dict[str, Any] | None:
    """The values if the configuration alone tells them for certain, else None."""
    architecture = str(configuration.get("model_type"))
    if architecture == "gpt2":
        values: dict[str, Any] = {}
    elif architecture in _PLAIN or (architecture in _WITH_HEAD_DIM and configuration.get("head_dim")):
        if not configuration.get("num_key_value_heads"):
            return None
        values = {key: configuration.get(key) for key in ("num_key_value_heads", "head_dim")}
    else:
        return None
    for key, names in _LONG_KEYS.items():
        found = [configuration[name] for name in names if name in configuration]
        if len(found) != 1:
            return None
        values[key] = found[0]
    window, kinds = configuration.get("sliding_window"), configuration.get("layer_types")
    if architecture.startswith("qwen") and not configuration.get("use_sliding_window"):
        window = None
    if window is not None and kinds is None and architecture not in ("mistral", "mixtral"):
        return None
    tied = configuration.get("tie_word_embeddings", architecture in _TIED)
    return values | {"sliding_window": window, "layer_types": kinds, "tied": tied}


def _transformers_values(configuration: Settings) -> dict[str, Any]:
    """The values as transformers' configuration class of this architecture understands them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    architecture = configuration.get("model_type")
    if not isinstance(architecture, str) or architecture not in CONFIG_MAPPING:
        raise StoreError(
            f"config.json names the architecture {str(architecture)[:80]!r}, which this version of "
            f"transformers does "
            "not have. Upgrade transformers, or choose another model."
        )
    _refuse_many_layers(configuration)
    try:
        whole = CONFIG_MAPPING[architecture].from_dict(_untagged(dict(configuration)))
        config = whole.get_text_config(decoder=True)
    except Exception as error:  # each configuration class refuses bad values in its own way
        raise StoreError(f"config.json is no configuration of {architecture}: {error}") from error
    keys = (*_LONG_KEYS, *_PER_LAYER_KEYS, *_FURTHER_KEYS)
    if getattr(config, "is_heterogeneous", False):
        keys = tuple(key for key in keys if key not in config.per_layer_attributes)
    values = {key: getattr(config, key, None) for key in keys}
    values["tied"] = bool(getattr(whole, "tie_word_embeddings", False))
    if getattr(config, "is_heterogeneous", False):
        values["layers_own"] = tuple(
            {key: getattr(layer, key, None) for key in _PER_LAYER_KEYS}
            for layer in itertools.islice(config.per_layer_config, MAX_LAYERS)
        )
    elif hasattr(config, "swa_num_key_value_heads"):
        values["layers_own"] = tuple(
            {key: getattr(config, f"swa_{key}", None) for key in _PER_LAYER_KEYS} if "sliding" in kind else {}
            for kind in itertools.islice(_layer_types(config.layer_types), MAX_LAYERS)
        )
    if (
        not getattr(config, "is_heterogeneous", False)
        and getattr(config, "use_sliding_window", True) is not False
    ):
        values["sliding_window"] = getattr(config, "sliding_window", None)
    values["num_key_value_heads"] = _kv_heads(config, values.get("num_key_value_heads"))
    values["layer_types"] = getattr(config, "layer_types", None)
    values["states"] = _states(config)
    if values["max_position_embeddings"] is None:
        stated = (getattr(config, key, None) for key in ("seq_length", "model_max_length"))
        values["max_position_embeddings"] = next((size for size in stated if size), UNLIMITED_CONTEXT)
    return values


def _untagged(value: Any) -> Any:  # noqa: ANN401 - settings have any shape
    """Settings with infinite numbers as numbers."""
    if isinstance(value, dict):
        if value.keys() == {INFINITY_TAG} and value[INFINITY_TAG] in INFINITIES:
            return float(value[INFINITY_TAG])
        return {key: _untagged(held) for key, held in value.items()}
    return [_untagged(held) for held in value] if isinstance(value, list) else value


def _states(config: Any) -> tuple[StateSize, ...]:  # noqa: ANN401 - any of transformers' configurations
    """Raises `StoreError` for sizes that no model has."""
    try:
        states = state_sizes(config)
    except (AttributeError, OverflowError, TypeError, ValueError) as error:
        raise StoreError(f"config.json does not say what its layers keep of a session: {error}") from error
    for state in states[:MAX_LAYERS]:
        for numbers in (state.in_model_type, state.in_float32):
            if type(numbers) is not int or not 0 <= numbers <= MAX_STATE:
                raise StoreError(f"by its config.json a layer keeps a state of {str(numbers)[:80]} numbers.")
    return states


def _kv_heads(config: object, stated: object) -> object:
    """DBRX, Falcon and GPT-BigCode say in their own words how many there are; some architectures ignore the common
    key.
    """
    nested = getattr(getattr(config, "attn_config", None), "kv_n_heads", None)
    if nested is not None:
        return nested
    if getattr(config, "new_decoder_architecture", False):
        return getattr(config, "num_kv_heads", stated)
    if hasattr(type(config), "multi_query"):
        return 1 if getattr(config, "multi_query", False) else None
    return stated if hasattr(type(config), "num_key_value_heads") else None


def stop_token_ids(configuration: Settings, generation: Settings | None) -> tuple[int, ...]:
    """Tokens that end a generation: the generation configuration's, else the configuration's."""
    text = configuration.get("text_config")
    places = (generation, configuration, text if isinstance(text, dict) else None)
    for place in places:
        stated = (place or {}).get("eos_token_id")
        if stated is None:
            continue
        ids = stated if isinstance(stated, list) else [stated]
        if len(ids) > 64 or not all(type(token) is int and 0 <= token < MAX_VOCABULARY for token in ids):
            raise StoreError("eos_token_id must be a token id or a list of at most 64 token ids.")
        return tuple(dict.fromkeys(cast("list[int]", ids)))
    return ()


def stated_dtype(configuration: Settings) -> str | None:
    """The numeric type that the configuration asks for, under its new or its old name."""
    text = configuration.get("text_config")
    for place in (configuration, text if isinstance(text, dict) else {}):
        for key in ("dtype", "torch_dtype"):
            value = place.get(key)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return None


def stored_dtype(elements: Mapping[str, int]) -> str | None:
    """The floating-point type of most numbers, by the names of dtypes in a circuit; None if it is none of
    those.
    """
    floats = {stored: count for stored, count in elements.items() if "F" in stored}
    most = max(floats, key=lambda stored: floats[stored], default=None)
    return {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}.get(most or "")


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a decoder layer is one that quantization shrinks: a matrix, or a stack of experts' matrices.

    Routers of experts are not: they are small, and whom they choose must not depend on rounding. Nor are projections
    of time steps in state-space layers and of the weights by which a layer chooses what to attend to, which models
    multiply by themselves, or matrices that do not fill blocks of 64 numbers and whole bytes, which no model of a
    useful size has.
    """
    if _NEVER_QUANTIZED.search(name) or not (
        name.endswith(".weight") if len(shape) == 2 else len(shape) == 3
    ):
        return False
    return shape[-1] % 2 == 0 and math.prod(shape[-2:]) % 64 == 0


def matrix_size(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(elements, rows) that a tensor adds to the matrices of its group; nothing unless it is quantizable."""
    return (math.prod(shape), math.prod(shape[:-1])) if is_quantizable(name, shape) else (0, 0)
