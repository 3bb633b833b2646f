"""Whole decode steps of a Llama of 1B, from token ids to the next ones, by form of the weights."""

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from bench.tables import Table
from support.models.circuit_runs import engine_with
from transformers import LlamaConfig, LlamaForCausalLM

from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.spec import Span

FORMS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "nf4"))
LAYERS = 16
WHOLE = Span(0, LAYERS)
SESSIONS = (1, 8)
PROMPT = tuple(range(300, 332))
STEPS = 32
VOCABULARY = 32_000
READ_BYTES = 512 * 1024**2

InTurns = Callable[..., list[float]]


def make_1b_llama(folder: Path) -> None:
    """A random Llama of 2,048 by 16 layers in bfloat16: 2.2 GB."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=8192, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, tie_word_embeddings=False,
    )  # fmt: skip
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")
    finally:
        torch.set_default_dtype(default)


def report_decoding(
    table: Table, in_turns: InTurns, least_s: Callable[[int, Callable[[], None]], float]
) -> None:
    """Each form by itself, for all together are 8 GB: tokens a second of one session and of eight, and what part of the
    memory's speed that is, in turns with a plain read."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_1b_llama(folder)
        memory = torch.ones(READ_BYTES // 4)
        for dtype, quantization in FORMS:
            engine = engine_with(folder, (0, LAYERS), dtype=dtype, quantization=quantization, exact=False)
            ways = [partial(step_s, engine, sessions) for sessions in SESSIONS]
            *taken_s, read_s = in_turns(*ways, lambda: least_s(3, memory.sum))
            for sessions, one_s in zip(SESSIONS, taken_s, strict=True):
                share = read_bytes(engine) / one_s * read_s / READ_BYTES
                text = f"{sessions / one_s:.1f} tokens/s, {one_s * 1000:.1f} ms, {share:.2f} of the memory's speed"
                row = f"decode of {sessions}, {dtype} {quantization}"
                table.note(row, text, step_ms=one_s * 1000, share=share)
            del engine, ways


def read_bytes(engine: Engine) -> int:
    """What a decode step reads of the weights: all but the embedding."""
    (stage,) = engine._stages._stages
    embedding = stage.model.get_input_embeddings().weight
    return engine.weight_bytes - (0 if stage.model.config.tie_word_embeddings else embedding.nbytes)


def step_s(engine: Engine, sessions: int) -> float:
    """The mean seconds of a decode step in contexts of 32 to 64 tokens."""
    caches = [engine.new_cache(WHOLE, len(PROMPT) + STEPS + 2) for _ in range(sessions)]
    tokens = step(engine, caches, [PROMPT] * sessions)
    tokens = step(engine, caches, [(token,) for token in tokens])
    began_s = time.perf_counter()
    for _ in range(STEPS):
        tokens = step(engine, caches, [(token,) for token in tokens])
    return (time.perf_counter() - began_s) / STEPS


def step(engine: Engine, caches: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> list[int]:
    """The likeliest next token of each session."""
    rows = [
        Rows(cache, len(new), tuple(new), logit_rows=1) for cache, new in zip(caches, tokens, strict=True)
    ]
    chosen: list[int] = engine.to_host([engine.step(WHOLE, rows, None).argmax(-1)])[0].tolist()
    return chosen
