"""Every causal language model of transformers: can it be split over peers, or why not?

Each is made tiny and random, from the defaults of its configuration class. `measured_models` runs those that can.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support.models.multimodal_models import OVERRIDES as MORE_OVERRIDES
from support.models.multimodal_models import whole_model
from support.models.tiny_models import quietly, randomise
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from molink.shards.loading.self_check import self_check
from molink.shards.loading.stage_builder import TROUBLE
from molink.shards.model.probe import config_refusal
from molink.shards.model.text_backbone import generative_class

_GEMMA4_WITHOUT_PER_LAYER_INPUTS: dict[str, Any] = {
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 30.0,
}
_GEMMA4_EXPERTS: dict[str, Any] = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
}

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bloom": {"n_layer": 4},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8, "clip_qkv": 8}, "n_layers": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "greedy", "first_k_dense_replace": 1},
    "dots1": {
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "n_group": 1,
        "topk_group": 1,
    },
    "gemma4 (no per-layer inputs)": {"text_config": _GEMMA4_WITHOUT_PER_LAYER_INPUTS},
    "gemma4 (no per-layer inputs, experts)": {
        "text_config": _GEMMA4_WITHOUT_PER_LAYER_INPUTS | _GEMMA4_EXPERTS
    },
    "gemma4_text (no per-layer inputs)": _GEMMA4_WITHOUT_PER_LAYER_INPUTS,
    "gemma4_text (no per-layer inputs, experts)": _GEMMA4_WITHOUT_PER_LAYER_INPUTS | _GEMMA4_EXPERTS,
    "granitemoehybrid": {
        "layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 10] * 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": 2},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "lfm2": {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "nemotron_h": {"time_step_min": 1e-9},  # see `loader.py`: else transformers disagrees with itself
    "reformer": {"is_decoder": True},
}
"""What checkpoints say and the defaults of a configuration class leave out. A name with something in parentheses is
another row: the same architecture with other flags."""


@dataclass(frozen=True)
class Finding:
    """What became of one architecture."""

    architecture: str
    model_class: str
    batching: str | None
    """"packed" or "left-padded"; None: refused."""
    reason: str
    """Why not packed, or why refused."""


def known_architectures() -> list[str]:
    """Those that make text, of text alone or of more, some with several sets of flags."""
    more = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    flagged = (name for name in OVERRIDES if " (" in name)
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *more, *flagged})


def configuration_of(architecture: str) -> PreTrainedConfig:
    """The configuration of an architecture by default."""
    overrides = OVERRIDES | MORE_OVERRIDES
    config: PreTrainedConfig = quietly(
        lambda: CONFIG_MAPPING[architecture.partition(" (")[0]](**overrides.get(architecture, {}))
    )
    return config


def find(architecture: str) -> Finding:
    try:
        config = configuration_of(architecture)
    except TROUBLE as error:
        return Finding(architecture, "", None, f"its configuration class has no defaults: {_first(error)}")
    refusal = config_refusal(config)
    kind = generative_class(config)
    if kind is None:
        return Finding(
            architecture, "", None, refusal or "transformers has no causal language model of this type"
        )
    model_class = kind.__name__
    if refusal is None:
        verdict = self_check(config)
        refusal = verdict.reason if verdict.batching is None else None
    if refusal is not None:
        return Finding(architecture, model_class, None, refusal.strip().splitlines()[0])
    name = None if verdict.batching is None else verdict.batching.value
    return Finding(architecture, model_class, name, verdict.reason)


def _first(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def store_tiny(config: PreTrainedConfig, folder: Path, *, narrow: bool = False) -> None:
    """A tiny model with the flags of `config`, in float32. Towers for more than text may be `narrow`."""

    def build() -> None:
        torch.manual_seed(0)
        model = whole_model(config, narrow=narrow)
        randomise(model, gain=1.5, embedding=1.0, seed=0)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)

    quietly(build)
