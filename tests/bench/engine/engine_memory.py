"""What a process holds beyond the parameters of a span that it has loaded."""

import gc
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench.tables import Table
from transformers import LlamaConfig, LlamaForCausalLM

SHARE_BAR = 1.25
FIXED_BAR_BYTES = 150e6
"""At most SHARE_BAR times the parameters and so much more."""
LAYERS = 12

PROGRAM = """
import gc, sys
from pathlib import Path
import psutil, torch
from molink.shards.batching.engine import Engine, Rows
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.matrices.quantize import return_freed_memory
from molink.shards.spec import Span
from molink.shards.checkpoint.store import describe

folder, dtype, stop, quantization = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
process = psutil.Process()
spec = describe(folder, dtype, quantization)
before = process.memory_info().rss
stage = load_stage(folder, Span(0, stop), StageSettings(dtype, quantization))
engine = Engine(spec, "cpu")
engine.attach(stage)
span = Span(0, stop)
cache = engine.new_cache(span, 64)
engine.step(span, [Rows(cache, 16, tuple(range(16)), False)], None)
if quantization != "none":  # weights alone are asked for: no session, nor what steps unpacked and freed
    cache.close()
    del cache
    engine.limit_kv(0)
    gc.collect()
    return_freed_memory()
gc.collect()
print(before, process.memory_info().rss, stage.weight_bytes)
"""


def make_large_llama(folder: Path) -> None:
    """A random Llama of 12 layers of 1,024: some 680 MB in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=LAYERS,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=2048, dtype="float32",
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")
    gc.collect()


def report_memory(table: Table) -> None:
    """Of half the layers and of all, in the dtype of the files and in half of it, each in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        make_large_llama(Path(folder))
        for dtype in ("float32", "bfloat16"):
            for stop in (LAYERS // 2, LAYERS):
                before, grown, weights = grown_bytes(Path(folder), dtype, stop)
                name = f"layers [0, {stop}) in {dtype}"
                text = f"{weights / 1e6:.0f} MB of parameters, {before / 1e6:.0f} MB before loading"
                table.note(name, text, weights_bytes=weights, before_bytes=before, after_bytes=before + grown)
                bar = (SHARE_BAR * weights + FIXED_BAR_BYTES) / 1e6
                table.judge(f"{name}: grown by", grown / 1e6, "MB", bar)


def grown_bytes(folder: Path, dtype: str, stop: int, quantization: str = "none") -> tuple[int, int, int]:
    """What a fresh process held before it loaded the layers up to `stop`, what came to it, and their parameters; of
    quantized ones what came to stay."""
    command = [sys.executable, "-c", PROGRAM, str(folder), dtype, str(stop), quantization]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    before, after, weights = map(int, finished.stdout.split())
    return before, after - before, weights
