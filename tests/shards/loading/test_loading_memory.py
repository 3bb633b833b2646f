"""A host with less memory than a model has loads it onto a device that has enough."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.deadline import DEADLINE_S
from transformers import LlamaConfig, LlamaForCausalLM

from molink.shards.checkpoint.safetensors_header import read_header

LOAD_WITHIN = """
import resource, sys
from pathlib import Path
import psutil
from molink.shards.loading import loader
from molink.shards.spec import Span

folder, device, quantization, layers, bytes_left = Path(sys.argv[1]), *sys.argv[2:4], *map(int, sys.argv[4:])
if device == "meta":  # a device with memory of its own, on which nothing can be tried out
    loader.make_stage = lambda folder, model, *rest: model
from molink.shards.checkpoint.store import read_manifest
manifest = read_manifest(folder)
load = lambda span: loader.load_stage(
    folder, span, loader.StageSettings("bfloat16", quantization, device), manifest=manifest
)
load(Span(0, 1))  # what the libraries load once
taken = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (taken + bytes_left, taken + bytes_left))
model = load(Span(0, layers))
print(sum(parameter.numel() for parameter in model.parameters()))
"""


def large_model(folder: Path, layers: int) -> Path:
    """Of 16 MB a layer, in tensors of 4 MB at most."""
    config = LlamaConfig(
        vocab_size=256, hidden_size=768, intermediate_size=1280, num_hidden_layers=layers, num_attention_heads=12,
        num_key_value_heads=4, max_position_embeddings=512, dtype="float32", tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.01)
    model.save_pretrained(folder, max_shard_size="40MB")
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("device", "quantization", "layers"),
    [("meta", "none", 6), pytest.param("cpu", "nf4", 14, marks=pytest.mark.full)],
)
def test_a_model_of_twice_the_free_memory_loads(
    tmp_path: Path, device: str, quantization: str, layers: int
) -> None:
    """On a processor libraries take 50 MB more at the first large model, whatever its size."""
    large = large_model(tmp_path / "llama", layers)
    tensors = [tensor for path in large.glob("*.safetensors") for tensor in read_header(path)]
    size = sum(tensor.stop - tensor.start for tensor in tensors)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_WITHIN, str(large), device, quantization, str(layers), str(size // 2)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 0
