"""Every causal language model of transformers, tried: can it be split over peers, and is that exact?

Each is made tiny and random, from the defaults of its configuration class, stored, and loaded in parts. Eight sessions
of different lengths join one after the other, prompts in chunks; what they generate is compared with the whole
model, which transformers runs at once and without a cache.
"""

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from circuit_runs import Circuit, Run, engine_with, start_run, step_runs
from tiny_models import load_reference, quietly, randomise
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from molink.shards.assembly import TROUBLE
from molink.shards.errors import WeightsError
from molink.shards.probe import config_refusal
from molink.shards.self_check import self_check
from molink.shards.spec import Span
from molink.shards.tiny_config import tiny_config

TOKENS = 8
CHUNK = 6
LENGTHS = (13, 1, 19, 7, 11, 2, 17, 5)
SPLITS = (((0, 2), (2, 4)), ((0, 1), (1, 3), (3, 4)))
TOLERANCE = 1e-4
"""Largest difference of float32 logits, relative to the largest logit."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "bloom": {"n_layer": 4},
    "dbrx": {"attn_config": {"rope_theta": 500000.0, "kv_n_heads": 8}, "n_layers": 4},
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
"""What checkpoints say and the defaults of a configuration class leave out."""


@dataclass(frozen=True)
class Finding:
    """What became of one architecture."""

    architecture: str
    model_class: str
    batching: str | None
    """"packed" or "left-padded"; None: refused."""
    reason: str
    """Why not packed, or why refused."""
    difference: float = 0.0
    """Largest difference of logits, relative to the largest logit."""
    same_tokens: bool = True


def find(architectures: Iterable[str] = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) -> list[Finding]:
    return [_find_one(architecture) for architecture in architectures]


def _find_one(architecture: str) -> Finding:
    model_class = str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[architecture])
    try:
        config = quietly(lambda: CONFIG_MAPPING[architecture](**OVERRIDES.get(architecture, {})))
    except TROUBLE as error:
        return Finding(
            architecture, model_class, None, f"its configuration class has no defaults: {_first(error)}"
        )
    refusal = config_refusal(config)
    if refusal is None:
        verdict = self_check(config)
        refusal = verdict.reason if verdict.batching is None else None
    if refusal is not None:
        return Finding(architecture, model_class, None, refusal.splitlines()[0])
    with tempfile.TemporaryDirectory() as folder:
        try:
            store_tiny(config, Path(folder))
            difference, same_tokens = compare(Path(folder), SPLITS)
        except WeightsError as error:
            return Finding(architecture, model_class, None, _first(error).replace(folder, ""))
    name = None if verdict.batching is None else verdict.batching.value
    return Finding(architecture, model_class, name, verdict.reason, difference, same_tokens)


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def store_tiny(config: PreTrainedConfig, folder: Path) -> None:
    """A tiny model with the flags of `config`, in float32."""

    def build() -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(tiny_config(config), dtype=torch.float32)
        randomise(model, gain=1.5, embedding=1.0, seed=0)
        model.generation_config.eos_token_id = None
        model.save_pretrained(folder)

    quietly(build)


def compare(
    folder: Path, splits: Sequence[Sequence[tuple[int, int]]], dtype: str = "float32"
) -> tuple[float, bool]:
    """How far the logits of split and batched sessions lie from the whole model's, and whether the tokens are
    those that it would generate."""
    reference = load_reference(folder, dtype)
    vocabulary = reference.config.vocab_size
    generator = torch.Generator().manual_seed(3)
    prompts = [
        tuple(torch.randint(0, vocabulary, (length,), generator=generator).tolist()) for length in LENGTHS
    ]
    difference, same_tokens = 0.0, True
    for split in splits:
        for run in generate([(engine_with(folder, cut, dtype=dtype), Span(*cut)) for cut in split], prompts):
            expected = whole_logits(reference, run)
            found = torch.stack(run.logits)
            difference = max(difference, float((found - expected).abs().max() / expected.abs().max()))
            same_tokens = same_tokens and expected.argmax(-1).tolist() == run.tokens
    return difference, same_tokens


def generate(circuit: Circuit, prompts: Sequence[tuple[int, ...]]) -> list[Run]:
    """Greedy; one more session joins at every second step."""
    runs = [start_run(circuit, prompt, TOKENS, chunk=CHUNK) for prompt in prompts]
    step = 0
    while any(len(run.tokens) < TOKENS for run in runs):
        step_runs(circuit, [run for run in runs[: 1 + step // 2] if len(run.tokens) < TOKENS])
        step += 1
    return runs


def whole_logits(reference: PreTrainedModel, run: Run) -> torch.Tensor:
    """[tokens, vocabulary] that precede each generated token."""
    ids = torch.tensor([[*run.prompt, *run.tokens[:-1]]])
    with torch.inference_mode():
        logits = reference(input_ids=ids, use_cache=False).logits
    return logits[0, len(run.prompt) - 1 :].float()
