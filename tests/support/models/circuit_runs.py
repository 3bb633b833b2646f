"""Generations through engines in one process: what a circuit of peers computes, without the network."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType

import torch

from molink.shards.batching.decode import Decoding, decoding_on
from molink.shards.batching.engine import Engine, Rows
from molink.shards.kv.kv_cache import SequenceCache
from molink.shards.kv.prefix import block_names
from molink.shards.loading.loader import StageSettings, load_stage
from molink.shards.model.stage import Stage
from molink.shards.spec import KV_BLOCK_TOKENS, ModelSpec, Span

DEVICE = os.environ.get("MOLINK_TEST_DEVICE", "cpu")
"""Where engines of tests compute, as torch names it. What they are compared with is computed on the processor."""


def spec_for(stage: Stage, dtype: str = "float32") -> ModelSpec:
    """A description with what the engine reads of it; sizes are not those of the model."""
    facts = stage.facts
    return ModelSpec(
        model_hash="0" * 64,
        content_hash="0" * 64,
        name="tiny",
        architecture=facts.architecture,
        layers=facts.layers,
        hidden_size=facts.hidden_size,
        vocabulary_size=facts.vocabulary_size,
        context_length=facts.context_length,
        dtype=dtype,
        quantization="none",
        layer_bytes=(1,) * facts.layers,
        embed_bytes=1,
        head_bytes=1,
        kv_bytes_per_token=(1,) * facts.layers,
        stop_token_ids=(),
    )


def engine_with(
    folder: Path,
    *spans: tuple[int, int],
    dtype: str = "float32",
    quantization: str = "none",
    decoding: Decoding | EllipsisType | None = ...,
    exact: bool = True,
    device: str = DEVICE,
) -> Engine:
    """An engine that holds these spans, each loaded on its own; without `decoding` it decodes as peers do there."""
    stages = [
        load_stage(folder, Span(*span), StageSettings(dtype, quantization, device=device, exact=exact))
        for span in spans
    ]
    return engine_of(stages, dtype, decoding, device)


def engine_of(
    stages: Sequence[Stage],
    dtype: str = "float32",
    decoding: Decoding | EllipsisType | None = ...,
    device: str = DEVICE,
) -> Engine:
    """An engine that holds these stages of one model."""
    chosen = decoding_on(device, fuses=True) if isinstance(decoding, EllipsisType) else decoding
    engine = Engine(spec_for(stages[0], dtype), device, decoding=chosen)
    for stage in stages:
        engine.attach(stage)
    return engine


def ready_tokens(engine: Engine, span: Span, names: Sequence[bytes]) -> int:
    """How many tokens of a session with these names of blocks the engine's pool has now."""
    tables = engine.pool.memory.tables_for(span, engine._stages.layouts(span), 1)
    return KV_BLOCK_TOKENS * engine.pool.match(tables, names)


Circuit = list[tuple[Engine, Span]]


@dataclass
class Run:
    """One session on its way through a circuit."""

    prompt: tuple[int, ...]
    caches: list[SequenceCache]
    chunk: int = 1 << 30
    """Most tokens of the prompt in one step."""
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    def next_ids(self) -> tuple[int, ...]:
        if self.fed < len(self.prompt):
            return self.prompt[self.fed : self.fed + self.chunk]
        return (self.tokens[-1],)


def start_run(circuit: Circuit, prompt: tuple[int, ...], tokens: int, chunk: int = 1 << 30) -> Run:
    capacity = len(prompt) + tokens
    return Run(prompt, [engine.new_cache(span, capacity) for engine, span in circuit], chunk)


def step_runs(circuit: Circuit, runs: list[Run]) -> None:
    """One step of all runs together, prefill and decode mixed; greedy."""
    ids = [run.next_ids() for run in runs]
    wants = [run.fed + len(new) >= len(run.prompt) for run, new in zip(runs, ids, strict=True)]
    hidden: torch.Tensor | None = None
    for hop, (engine, span) in enumerate(circuit):
        rows = [
            Rows(run.caches[hop], len(new), new if span.start == 0 else None, want)
            for run, new, want in zip(runs, ids, wants, strict=True)
        ]
        hidden = engine.step(span, rows, hidden)
    assert hidden is not None
    logits = iter(hidden.cpu())
    for run, new, want in zip(runs, ids, wants, strict=True):
        run.fed += len(new)
        if want:
            run.logits.append(next(logits))
            run.tokens.append(int(run.logits[-1].argmax()))


def greedy(circuit: Circuit, prompt: tuple[int, ...], tokens: int, chunk: int = 1 << 30) -> list[int]:
    """The tokens of one session alone."""
    run = start_run(circuit, prompt, tokens, chunk)
    while len(run.tokens) < tokens:
        step_runs(circuit, [run])
    return run.tokens


def greedy_joining(
    circuit: Circuit, prompts: list[tuple[int, ...]], tokens: int, chunk: int = 1 << 30
) -> list[list[int]]:
    """The tokens of sessions of which one more joins the batch at every second step."""
    runs = [start_run(circuit, prompt, tokens, chunk) for prompt in prompts]
    step = 0
    while any(len(run.tokens) < tokens for run in runs):
        joined = runs[: 1 + step // 2]
        step_runs(circuit, [run for run in joined if len(run.tokens) < tokens])
        step += 1
    return [run.tokens for run in runs]


KEY = b"model"


def start_sharing(
    circuit: Circuit, prompt: tuple[int, ...], tokens: int, chunk: int = 1 << 30, *, reserve: bool = True
) -> Run:
    """A session that begins with what all hops have, if all can go back to there."""
    names = block_names(prompt[:-1], KEY)
    capacity = len(prompt) + tokens
    caches = [engine.new_cache(span, capacity, names, reserve=reserve) for engine, span in circuit]
    ready = min(cache.length for cache in caches)
    if any(cache.least_length > ready for cache in caches):
        ready = 0
    for cache in caches:
        cache.truncate(ready, same_tokens=True)
    return Run(prompt, caches, chunk, fed=ready)


def finish(circuit: Circuit, runs: list[Run], tokens: int) -> list[list[int]]:
    while waiting := [run for run in runs if len(run.tokens) < tokens]:
        step_runs(circuit, waiting)
    return [run.tokens for run in runs]
