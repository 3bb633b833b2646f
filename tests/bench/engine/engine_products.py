"""Products and steps at real widths, by form of the weights: over bfloat16's, and over what the memory takes to deliver
the bytes."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench.tables import Table
from support.models.circuit_runs import engine_with
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from molink.shards.batching.engine import Engine, Rows
from molink.shards.matrices.quantize import QuantizedLinear
from molink.shards.spec import Span

FORMS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "nf4"))
WIDE = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8
}  # fmt: skip
"""Those of a Llama of 1B, whose layers are 16; beyond what caches hold."""
MEASURED = Span(0, 4)
PROMPT = tuple(range(40, 72))
READ_BYTES = 512 * 1024**2
STEPS = 12
ROUNDS = 4
NF4_OVER_BFLOAT16_BAR = 0.4
NF4_OVER_BYTES_BAR = 1.6
NARROW_ROWS = 128
NARROW_BAR = 1.3

InTurns = Callable[..., list[float]]
LeastS = Callable[[int, Callable[[], None]], float]

NARROW_PROGRAM = """
import sys, time
from pathlib import Path
import torch
sys.path[:0] = sys.argv[3:]
from support.models.circuit_runs import engine_with
from bench.engine.engine_products import FORMS, MEASURED, NARROW_ROWS, ROUNDS, step_of
torch.set_num_threads(int(sys.argv[2]))
span = (0, len(MEASURED))
engines = [engine_with(Path(sys.argv[1]), span, dtype=form[0], exact=False) for form in FORMS[:2]]
turns = [[step_of(engine, NARROW_ROWS) for engine in engines] for _ in range(ROUNDS)]
print(*(min(times) for times in zip(*turns)))
"""


def report_products(table: Table, in_turns: InTurns, least_s: LeastS) -> None:
    """All products of the layers, and decode steps, of one session and of eight in every form, in turns with a plain
    read of the memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_wide_llama(folder)
        _judge_narrow(folder, table)
        memory = torch.ones(READ_BYTES // 4)
        engines = [
            engine_with(folder, (0, len(MEASURED)), dtype=dtype, quantization=quantization, exact=False)
            for dtype, quantization in FORMS
        ]
        for sessions in (1, 8):
            for title, measure in (("products", products_s), ("steps", decode_s)):
                ways = [
                    lambda engine=engine, sessions=sessions, measure=measure: measure(
                        engine, sessions, least_s
                    )
                    for engine in engines
                ]
                *taken_s, read_s = in_turns(*ways, lambda: least_s(3, memory.sum))
                speed = READ_BYTES / read_s
                table.note("memory", f"{speed / 1e9:.1f} GB/s read by a sum", bytes_per_s=speed)
                for form, engine, one_s in zip(FORMS, engines, taken_s, strict=True):
                    ratio, over_bytes = one_s / taken_s[1], one_s * speed / product_bytes(engine)
                    layer_ms = one_s * 1000 / len(MEASURED)
                    text = f"{layer_ms:.2f} ms a layer, {ratio:.2f} of bfloat16, {over_bytes:.2f} of bytes"
                    row = f"{title} of {sessions}, {' '.join(form)}"
                    table.note(row, text, layer_ms=layer_ms, ratio=ratio, over_bytes=over_bytes)
                    if form[1] == "nf4" and sessions == 1 and measure is products_s:
                        table.judge("nf4, one row, over bfloat16", ratio, "times", NF4_OVER_BFLOAT16_BAR)
                        table.judge("nf4, one row, over bytes", over_bytes, "times", NF4_OVER_BYTES_BAR)


def multiplying(engine: Engine) -> list[tuple[nn.Module, int]]:
    """The modules of the layers that multiply by a matrix, and how many columns it has."""
    found: list[tuple[nn.Module, int]] = []
    for module in engine._stages._stages[0].model.get_submodule("model.layers").modules():
        if isinstance(module, nn.Linear):
            found.append((module, module.in_features))
        elif isinstance(module, QuantizedLinear):
            found.append((module, module.matrix.shape[1]))
    return found


def product_bytes(engine: Engine) -> int:
    """Of all these matrices as they are kept."""
    return sum(parameter.nbytes for module, _ in multiplying(engine) for parameter in module.parameters())


def products_s(engine: Engine, rows: int, least_s: LeastS) -> float:
    """The least seconds of all products of the layers, one after the other."""
    modules = multiplying(engine)
    dtype = getattr(torch, engine.spec.dtype)
    inputs = {columns: torch.ones(1, rows, columns, dtype=dtype) for _, columns in modules}

    @torch.inference_mode()
    def multiply() -> None:
        for module, columns in modules:
            module(inputs[columns])

    return least_s(STEPS, multiply)


def make_wide_llama(folder: Path) -> None:
    """A random Llama of a few layers in bfloat16: some 490 MB."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=512, num_hidden_layers=len(MEASURED) + 1, dtype="bfloat16", **WIDE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="200MB")


def decode_s(engine: Engine, sessions: int, least_s: LeastS) -> float:
    """The least seconds of a decode step."""
    caches = [engine.new_cache(MEASURED, len(PROMPT) + STEPS) for _ in range(sessions)]
    engine.step(MEASURED, [Rows(cache, len(PROMPT), PROMPT, False) for cache in caches], None)

    def step() -> None:
        engine.step(MEASURED, [Rows(cache, 1, (7,), False) for cache in caches], None)

    return least_s(STEPS, step)


def step_of(engine: Engine, tokens: int) -> float:
    """The seconds of a prompt's part."""
    cache = engine.new_cache(MEASURED, tokens)
    began_s = time.perf_counter()
    engine.step(MEASURED, [Rows(cache, tokens, tuple(range(tokens)), False)], None)
    return time.perf_counter() - began_s


def _judge_narrow(folder: Path, table: Table) -> None:
    """As on a processor that cannot multiply bfloat16: oneDNN and torch limited to AVX2."""
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    places = [str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", NARROW_PROGRAM, str(folder), str(torch.get_num_threads()), *places],
        capture_output=True, text=True, timeout=600, check=True, env=limited,
    )  # fmt: skip
    float32_s, bfloat16_s = map(float, done.stdout.split())
    text = f"{float32_s * 1000:.0f} and {bfloat16_s * 1000:.0f} ms"
    table.note(f"AVX2, {NARROW_ROWS} rows, float32 and bfloat16", text)
    table.judge("AVX2, bfloat16 over float32", bfloat16_s / float32_s, "times", NARROW_BAR)
