"""Tiny random causal language models on disk, made from configurations, with a small tokenizer beside them.

A random tiny model soon repeats one token, and then a lost KV cache or a swapped layer goes unnoticed. The
weights are therefore drawn larger than usual, so that 200 greedy tokens hold at least 50 different ones (30
for the few architectures that resist). How each is drawn is found by trying and written down in
`varied_weights.json`: `python tests/support/models/varied_weights.py --write` tries anew, for other versions of torch.
"""

import atexit
import hashlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging as transformers_logging

from molink.shards.model.text_backbone import generative_class

T = TypeVar("T")

VARIED = Path(__file__).with_name("varied_weights.json")
ENOUGH, LEAST = 50, 30
"""Different tokens of 200: no better weights are looked for, and what is needed."""
LAYERS = 6
HIDDEN_SIZE = 64
VOCABULARY = 384
MONOTONOUS = "bloom"
"""No weights give it varied text."""
CONTEXT = 1024

SENTENCES = (
    "ROMEO: But, soft! what light through yonder window breaks?",
    "It is the east, and Juliet is the sun.",
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "A peer holds a few consecutive layers; a circuit of peers is the model.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

_COMMON: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GPT2: dict[str, object] = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN_SIZE,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_MLA: dict[str, object] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", _COMMON),
    "llama_tied": ("llama", _COMMON | {"tie_word_embeddings": True}),
    "mistral": ("mistral", _COMMON | {"sliding_window": 8}),
    "mixtral": (
        "mixtral",
        _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2": ("qwen2", _COMMON),
    "qwen2_sliding": (
        "qwen2",
        _COMMON | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    ),
    "qwen2_moe": ("qwen2_moe", _COMMON | _EXPERTS | {"shared_expert_intermediate_size": 48}),
    "qwen3": ("qwen3", _COMMON | {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", _COMMON | _EXPERTS | {"head_dim": 16}),
    "gemma": ("gemma", _COMMON | {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (
        "gemma2",
        _COMMON
        | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        _COMMON
        | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True},
    ),
    "phi3": ("phi3", _COMMON | {"pad_token_id": 0}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2_inverse_scale": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", _COMMON),
    "cohere": ("cohere", _COMMON | {"tie_word_embeddings": True}),
    "cohere2": ("cohere2", _COMMON | {"sliding_window": 8, "tie_word_embeddings": True}),
    "glm4": ("glm4", _COMMON | {"head_dim": 16, "pad_token_id": 0}),
    "deepseek_v2": ("deepseek_v2", _COMMON | _MLA | {"topk_method": "greedy"}),
    "deepseek_v3": ("deepseek_v3", _COMMON | _MLA),
    "gpt_oss": (
        "gpt_oss",
        _COMMON | {"head_dim": 16, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "olmo2": ("olmo2", _COMMON),
    "granite": (
        "granite",
        _COMMON | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "opt": ("opt", _COMMON | {"ffn_dim": 96, "word_embed_proj_dim": HIDDEN_SIZE, "pad_token_id": 1}),
    "stablelm": ("stablelm", _COMMON),
    "starcoder2": ("starcoder2", _COMMON | {"sliding_window": None}),
    "phi": ("phi", _COMMON),
    "smollm3": ("smollm3", _COMMON | {"pad_token_id": 0}),
    "ernie4_5": ("ernie4_5", _COMMON | {"pad_token_id": 0}),
    "falcon": (
        "falcon",
        _COMMON
        | {"ffn_hidden_size": 96, "new_decoder_architecture": False, "multi_query": True, "alibi": False},
    ),
    "falcon_alibi": ("falcon", _COMMON | {"ffn_hidden_size": 96, "multi_query": False, "alibi": True}),
    "bloom": (
        "bloom",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN_SIZE,
            "n_layer": LAYERS,
            "n_head": 4,
            "eos_token_id": 1,
        },
    ),
    "qwen3_next": (
        "qwen3_next",
        _COMMON
        | _EXPERTS
        | {
            "head_dim": 16,
            "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
}
"""Name in tests -> (`model_type`, what its configuration sets)."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most VOCABULARY tokens, reversible for any text. 0 is <s>, 1 is </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",  # noqa: S106 - a token of the vocabulary, not a password
        eos_token="</s>",  # noqa: S106 - as above
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _greedy(model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Of prompts of one length; goes on past the stop token."""
    model.generation_config.eos_token_id = None
    settings = GenerationConfig(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return [[int(token) for token in row] for row in out[:, len(prompts[0]) :]]


def randomise(model: PreTrainedModel, gain: float, embedding: float, seed: int) -> None:
    """Every parameter drawn anew: matrices amplify by about `gain`, norms and biases are near what they were.

    Matrices sum to zero over their inputs: activations such as GELU have a positive mean, which would
    otherwise become one direction common to all tokens and make the text monotonous.
    """
    generator = torch.Generator().manual_seed(seed)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    transposed = {id(m.weight) for m in model.modules() if isinstance(m, Conv1D)}
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            inputs = 0 if id(parameter) in transposed else -1
            if id(parameter) in embeddings:
                parameter.copy_(noise * embedding)
            elif parameter.ndim >= 2:
                parameter.copy_(
                    (noise - noise.mean(inputs, keepdim=True)) * gain / parameter.shape[inputs] ** 0.5
                )
            else:
                parameter.copy_(parameter.round() + noise.clamp(-4, 4) * 0.1)


class Drawn(NamedTuple):
    """How random weights are drawn: what `randomise` is given."""

    gain: float
    embedding: float
    seed: int


def variety(model: PreTrainedModel, seed: int) -> int:
    """How many different tokens 200 greedy ones hold at least, whatever the prompt."""
    prompts = [[5, 6, 7], [(seed + 7 * i) % VOCABULARY for i in range(3)], [200, 0, 3]]
    return min(len(set(tokens)) for tokens in _greedy(model, prompts, 200))


def find_varied(model: PreTrainedModel, seed: int) -> Drawn:
    """Gives the model random weights under which its greedy text is varied; says which."""
    best, best_drawn = 0, Drawn(0.0, 0.0, 0)
    for attempt, gain, embedding in itertools.product(range(2), (2.0, 3.0, 1.5), (0.1, 1.0, 0.02)):
        drawn = Drawn(gain, embedding, seed + 1000 * attempt)
        randomise(model, *drawn)
        if (found := variety(model, seed)) > best:
            best, best_drawn = found, drawn
        if best >= ENOUGH:
            break
    if best < LEAST:
        raise RuntimeError(f"no random weights give varied text; best {best} tokens of 200: {best_drawn}")
    randomise(model, *best_drawn)
    return best_drawn


def model_key(architecture: str, seed: int, changes: str) -> str:
    """What the way in which a model's weights are drawn depends on; `changes` is JSON."""
    return f"{architecture} {seed} {changes}"


@cache
def varied_weights() -> dict[str, Drawn]:
    """By what is said of a model in `model_key`."""
    return {key: Drawn(*values) for key, values in json.loads(VARIED.read_text(encoding="utf-8")).items()}


def quietly(action: Callable[[], T]) -> T:
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        return action()
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def make_tiny_model(
    architecture: str, folder: Path, seed: int = 0, *, max_shard_size: str = "5GB", **changes: object
) -> Path:
    """Writes a tiny float32 model and its tokenizer to `folder / architecture` and returns that path.

    `architecture` is a key of ARCHITECTURES. A small `max_shard_size`, such as "100KB", gives several
    safetensors files with an index. `changes` override the configuration, such as num_hidden_layers=8.
    """
    made = _made(architecture, seed, max_shard_size, json.dumps(changes, sort_keys=True))
    return Path(shutil.copytree(made, folder / architecture, dirs_exist_ok=True))


def untrained(architecture: str, seed: int, changes: str) -> PreTrainedModel:
    """The model as transformers makes it; `changes` of its configuration are JSON."""
    model_type, settings = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(model_type, **(settings | json.loads(changes)))
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval()


@cache
def _made(architecture: str, seed: int, max_shard_size: str, changes: str) -> Path:
    """Such a model in a folder that is there until this process ends."""
    target = Path(tempfile.mkdtemp(prefix="molink-tiny-model-"))
    atexit.register(shutil.rmtree, target)

    def build() -> None:
        model = untrained(architecture, seed, changes)
        drawn = varied_weights().get(model_key(architecture, seed, changes))
        if drawn is not None:
            randomise(model, *drawn)
        elif architecture != MONOTONOUS:
            find_varied(model, seed)
        model.generation_config.eos_token_id = model.config.eos_token_id
        model.save_pretrained(target, max_shard_size=max_shard_size)
        make_tokenizer().save_pretrained(target)

    quietly(build)
    return target


def load_reference(folder: Path, dtype: str = "float32") -> PreTrainedModel:
    """The whole model as `transformers` loads it, with all that it takes: the reference for tokens and logits."""

    def load() -> PreTrainedModel:
        kind = generative_class(AutoConfig.from_pretrained(folder, local_files_only=True))
        assert kind is not None
        model: PreTrainedModel = kind.from_pretrained(
            folder, dtype=getattr(torch, dtype), local_files_only=True
        )
        return model.eval()

    return quietly(load)


def greedy_reference(folder: Path, prompt: list[int], tokens: int, dtype: str = "float32") -> list[int]:
    """The greedy token ids that `transformers` generates after `prompt`, going on past the stop token."""
    return greedy_references(folder, [prompt], tokens, dtype)[0]


def greedy_references(
    folder: Path, prompts: list[list[int]], tokens: int, dtype: str = "float32"
) -> list[list[int]]:
    """As `greedy_reference`, for prompts of any lengths, each generated alone. What a model of these contents has been
    asked before is not generated again: the folder may be another."""
    known = _references(_contents(folder), tokens, dtype)
    lacking = [prompt for prompt in prompts if tuple(prompt) not in known]
    if lacking:
        model = load_reference(folder, dtype)
        known |= {tuple(prompt): _greedy(model, [prompt], tokens)[0] for prompt in lacking}
    return [list(known[tuple(prompt)]) for prompt in prompts]


@cache
def _references(contents: str, tokens: int, dtype: str) -> dict[tuple[int, ...], list[int]]:
    """What is known of one model, by prompt."""
    return {}


def _contents(folder: Path) -> str:
    """A digest of what the model is made of."""
    digest = hashlib.sha256()
    for path in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        digest.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
