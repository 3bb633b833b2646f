"""Random Llamas of given widths, with the bundled model's tokenizer: for what a model costs, not for what it says."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from molink.shards.checkpoint import catalog

BUNDLED = "molink/tiny-shakespeare"


@dataclass(frozen=True, slots=True)
class Widths:
    """What of a Llama costs time."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int


def write_random_llama(folder: Path, widths: Widths, dtype: torch.dtype = torch.float32) -> None:
    """Writes a checkpoint of 1,024 tokens and a context of as many, the same each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, max_position_embeddings=1024, eos_token_id=1, bos_token_id=0,
        hidden_size=widths.hidden, intermediate_size=widths.inner, num_hidden_layers=widths.layers,
        num_attention_heads=widths.heads, num_key_value_heads=widths.key_heads, dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder, max_shard_size="500MB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((catalog.resolve(BUNDLED) / name).read_bytes())
