"""Models with the shapes of real ones and weights that are nobody's, for what takes time and memory."""

import json
import math
import re
import struct
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.engine.engine_gpu import FULL, TINY, Scale, llama
from gpu.gpu_findings import Context
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from molink.shards.spec import ModelSpec

_LAYER = re.compile(r"\blayers\.(\d+)\.")
WHOLE_MODEL_BYTES = 22_000_000_000
"""Of a card that holds the whole of it with what the cases need beside."""


def scale_for(context: Context) -> Scale:
    """Llama 3 8B's shapes on a card; on one that is too small for them a quarter of the layers."""
    if context.small:
        return TINY
    if torch.cuda.get_device_properties(context.device).total_memory >= WHOLE_MODEL_BYTES:
        return FULL
    return replace(FULL, config=llama(8, 4096, 14336, 32, 128_256))


def wide_scale(context: Context, layers: int, vocabulary: int = 2048) -> Scale:
    """A few layers of real width."""
    if context.small:
        return TINY
    config = llama(layers, 4096, 14336, 32, vocabulary)
    return Scale(config, "bfloat16", 64, 256, 8000, 2048, 64, 2 << 30)


def _settings(scale: Scale) -> dict[str, Any]:
    settings: dict[str, Any] = scale.config.to_dict()
    settings |= {"architectures": ["LlamaForCausalLM"], "dtype": scale.dtype, "eos_token_id": None}
    return {name: value for name, value in settings.items() if not name.startswith("_")}


def write_random(scale: Scale, folder: Path, device: str) -> Path:
    """Random weights, drawn on the device."""
    from bench.engine.engine_gpu import random_model

    torch.manual_seed(0)
    model = random_model(scale, device)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_settings(scale)), encoding="utf-8")
    return folder


def write_sparse(scale: Scale, folder: Path, device: str, filled: Collection[int]) -> Path:
    """Random weights, drawn on the device, in these layers and at both ends of the model; the others' are holes in a
    file, which read as zeros: a model of any size without its disk space. Zeros move faster than numbers do."""
    with torch.device("meta"):
        shapes = LlamaForCausalLM(scale.config).state_dict()
    dtype = getattr(torch, scale.dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = {}, 0
    for name, tensor in shapes.items():
        begins[name], end = end, end + tensor.numel() * dtype.itemsize
        kind = {"bfloat16": "BF16", "float32": "F32"}[scale.dtype]
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    torch.manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
        for name, tensor in shapes.items():
            layer = _LAYER.search(name)
            if layer is None or int(layer[1]) in filled:
                numbers = torch.randn(tensor.shape, device=device, dtype=dtype)
                numbers = 0.02 * numbers if tensor.ndim > 1 else 1 + 0.02 * numbers
                file.seek(8 + len(text) + begins[name])
                file.write(memoryview(numbers.cpu().view(torch.uint8).numpy()))
    (folder / "config.json").write_text(json.dumps(_settings(scale)), encoding="utf-8")
    return folder


def spec_for_scale(scale: Scale) -> ModelSpec:
    """With real sizes; no file is read for it."""
    config = scale.config
    itemsize = getattr(torch, scale.dtype).itemsize
    hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    head_dim = hidden // config.num_attention_heads
    kv_width = config.num_key_value_heads * head_dim
    layer = itemsize * (2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * inner + 2 * hidden)
    return ModelSpec(
        model_hash="0" * 64, content_hash="0" * 64, name="random/llama", architecture="llama", layers=layers,
        hidden_size=hidden, vocabulary_size=config.vocab_size,
        context_length=config.max_position_embeddings, dtype=scale.dtype, quantization="none",
        layer_bytes=(layer,) * layers, embed_bytes=itemsize * config.vocab_size * hidden,
        head_bytes=itemsize * (config.vocab_size + 1) * hidden,
        kv_bytes_per_token=(2 * kv_width * itemsize,) * layers, stop_token_ids=(),
    )  # fmt: skip


def layer_flops(scale: Scale, tokens: int) -> float:
    """Multiplications and additions of all layers for a prompt, attention to what came before included."""
    config = scale.config
    layer = spec_for_scale(scale).layer_bytes[0] / getattr(torch, scale.dtype).itemsize
    attention = 2 * config.hidden_size * math.comb(tokens, 2) * 2
    return config.num_hidden_layers * (2.0 * layer * tokens + attention)
