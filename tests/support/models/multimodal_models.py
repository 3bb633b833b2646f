"""Tiny random models that take more than text, whole: with their towers for images and sound."""

import copy
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from molink.shards.loading.tiny_config import tiny_config
from molink.shards.model.text_backbone import generative_class, text_config


def _turned(theta: float, *sections: int, **more: object) -> dict[str, Any]:
    """A text configuration whose rotary positions have several coordinates, which are the same for text."""
    rope = {"rope_type": "default", "rope_theta": theta, "mrope_section": list(sections), **more}
    return {"text_config": {"rope_parameters": rope}}


OVERRIDES: dict[str, dict[str, Any]] = {
    "aya_vision": {
        "vision_config": {"model_type": "siglip_vision_model", "num_attention_heads": 16, "hidden_size": 1152}
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 31], "num_experts_per_tok": 6}
    },
    "emu3": {"vocabulary_map": {"<image>": 3}},
    "ernie4_5_vl_moe": _turned(5e5, 22, 22, 20),
    "glm46v": _turned(1e4, 8, 12, 12, partial_rotary_factor=0.5),
    "glm4v_moe": {
        "text_config": {"head_dim": 128, **_turned(1e4, 8, 12, 12, partial_rotary_factor=0.5)["text_config"]}
    },
    "glm_ocr": {"text_config": {"head_dim": 128, **_turned(1e4, 16, 24, 24)["text_config"]}},
    "ovis2": {"vocab_size": 151936, "hidden_size": 4096},
    "cohere_compass": {
        "text_config": {
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10000.0}
                for kind in ("full_attention", "sliding_attention")
            }
        }
    },
    "glm4v": _turned(1e4, 8, 12, 12, partial_rotary_factor=0.5),
    "glmga": _turned(1e4, 8, 12, 12, partial_rotary_factor=0.5),
    "granite4_vision": {"deepstack_layer_map": [[-1, 1]], "downsample_rate": "1/4"},
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128,
            "rope_parameters": {
                "rope_type": "xdrope",
                "rope_theta": 1e4,
                "alpha": 1000.0,
                "factor": 1.0,
                "xdrope_section": [16, 16, 16, 16],
            },
        }
    },
    "inkling_mm_model": {"vision_config": {"num_hidden_layers": 8, "patch_size": 4}},
    "lfm2_vl": {"text_config": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 0]}},
    "nemo_speechlm": {
        "text_config": {"time_step_min": 1e-9}
    },  # as that of nemotron_h in `architecture_table`
    "nemotron_h_omni": {"text_config": {"time_step_min": 1e-9}},
    "paddleocr_vl": _turned(5e5, 16, 24, 24),
    "step3p7": {
        "text_config": {
            "layer_types": (["full_attention", *["sliding_attention"] * 3] * 12)[:45],
            "num_sliding_attention_heads": 96,
            "sliding_window": 512,
        }
    },
    "qwen2_5_omni_thinker": _turned(1e6, 16, 24, 24),
    "qwen2_5_vl": _turned(1e6, 16, 24, 24),
    "qwen2_vl": _turned(1e6, 16, 24, 24),
}
"""What checkpoints say and the defaults of a configuration class leave out."""

_TOWER_LAYERS = ("num_hidden_layers", "depth", "n_layer", "encoder_layers", "num_layers", "num_global_layers")


_TOWER_HEAD_DIM = 16
_TOWER_INTERMEDIATE = 96
_WHOLE_TOWERS = ("inkling_vision", "muse_spark_audio")
"""What is in these follows from how many layers they have."""

_WIDTHS_OF_TEXT = {
    "adaptor_config": {"hidden_size": 1, "intermediate_size": 4},
    "perceiver_config": {"hidden_size": 1},
    "audio_config": {"out_hidden_size": 1},
    "vision_config": {"out_hidden_size": 1, "text_hidden_size": 1},
}
"""Where towers say how wide they are in parts of the text's hidden states."""


def whole_tiny_config(config: PreTrainedConfig, *, narrow: bool) -> PreTrainedConfig:
    """`config` with a tiny text part, and towers of one layer, as narrow as their heads allow or as wide as ever."""
    tiny = copy.deepcopy(tiny_config(config))
    text = text_config(tiny)
    for name in tiny.sub_configs:
        part = getattr(tiny, name, None)
        if part is not None and part is not text:
            _shorten(part)
            if narrow:
                _narrow(part)
            for width, parts in _WIDTHS_OF_TEXT.get(name, {}).items():
                if getattr(part, width, None) == text_config(config).hidden_size // parts:
                    setattr(part, width, text.hidden_size // parts)
    return type(tiny).from_dict(tiny.to_dict())  # which also derives what follows from these


def _shorten(part: PreTrainedConfig) -> None:
    if part.model_type in _WHOLE_TOWERS:
        return
    for name in _TOWER_LAYERS:
        layers = getattr(part, name, None)
        if isinstance(layers, int):
            setattr(part, name, 1)
            for kind, values in list(vars(part).items()):
                if isinstance(values, list) and len(values) == layers:
                    setattr(part, kind, values[:1])
    for name in part.sub_configs:
        if getattr(part, name, None) is not None:
            _shorten(getattr(part, name))


def _narrow(part: PreTrainedConfig) -> None:
    heads, width = (getattr(part, name, None) for name in ("num_attention_heads", "hidden_size"))
    if isinstance(heads, int) and isinstance(width, int) and width % heads == 0:
        part.hidden_size = min(width, heads * _TOWER_HEAD_DIM)
    if isinstance(getattr(part, "intermediate_size", None), int):
        part.intermediate_size = min(part.intermediate_size, _TOWER_INTERMEDIATE)
    for name in part.sub_configs:
        if getattr(part, name, None) is not None:
            _narrow(getattr(part, name))


def whole_model(config: PreTrainedConfig, *, narrow: bool) -> PreTrainedModel:
    kind = generative_class(config)
    assert kind is not None
    tiny = whole_tiny_config(config, narrow=narrow)
    model: PreTrainedModel = kind._from_config(tiny, dtype=torch.float32)
    return model.eval()
