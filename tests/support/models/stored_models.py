"""Models on disk for tests that read their files."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.models.tiny_models import (
    ARCHITECTURES,
    make_tokenizer,
)
from transformers import AutoConfig, AutoModelForCausalLM

from molink.shards.checkpoint.safetensors_header import read_header


def write_model(kind: str, folder: Path, **save: str) -> Path:
    """A tiny model with plain random weights: what is tested here does not depend on the text it makes."""
    model_type, values = ARCHITECTURES[kind]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(folder, **save)
    return folder


def copy_of(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_a_weight(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"][0, 0] += 1e-3
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def alter_a_weight(folder: Path, tensor: str) -> None:
    """Changes one byte of a tensor where it lies; the file's size and time of modification stay."""
    path = folder / "model.safetensors"
    stat = path.stat()
    (stored,) = (one for one in read_header(path) if one.name == tensor)
    with path.open("r+b") as file:
        file.seek(stored.start)
        byte = file.read(1)[0]
        file.seek(stored.start)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def write_llama(folder: Path, kind: str = "llama", **save: str) -> Path:
    """With a tokenizer; `save` is as `save_pretrained` takes it."""
    write_model(kind, folder, **save)
    make_tokenizer().save_pretrained(folder)
    return folder
