"""Steps with weights in fewer bits, and what a layer of them takes of a process's memory."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.engine.engine_memory import LAYERS, grown_bytes, make_large_llama
from bench.tables import Table
from support.models.circuit_runs import engine_with

from molink.shards.batching.engine import Engine, Rows
from molink.shards.checkpoint.store import describe
from molink.shards.spec import Span

FORMS = (("float32", "none"), ("bfloat16", "none"), ("bfloat16", "int8"), ("bfloat16", "nf4"))
PROMPT = tuple(range(40, 72))
CHUNK_TOKENS = 256
MEASURED = Span(0, 4)
"""The layers that step."""
STOPS = (LAYERS // 3, LAYERS - 2)
"""Two spans without the head, whose difference in memory is that of layers."""
ANNOUNCED_BAR = 1.1
"""Memory that a layer takes over what is announced of it."""

InTurns = Callable[..., list[float]]
LeastS = Callable[[int, Callable[[], None]], float]


def report_quantization(table: Table, in_turns: InTurns, least_s: LeastS) -> None:
    """Each form beside bfloat16, steps in turns; then what a layer takes, each in fresh processes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_large_llama(folder)
        engines = [
            engine_with(
                folder, (MEASURED.start, MEASURED.stop), dtype=dtype, quantization=quantization, exact=False
            )
            for dtype, quantization in FORMS
        ]
        for title, measure in (
            ("decode of 1", lambda engine: decode_s(engine, 1, least_s)),
            ("decode of 4", lambda engine: decode_s(engine, 4, least_s)),
            ("decode of 8", lambda engine: decode_s(engine, 8, least_s)),
            (f"{CHUNK_TOKENS} tokens of a prompt", lambda engine: chunk_s(engine, least_s)),
        ):
            ways = [lambda engine=engine, measure=measure: measure(engine) for engine in engines]
            taken_s = in_turns(*ways)
            for form, taken in zip(FORMS, taken_s, strict=True):
                layer_ms = taken * 1000 / len(MEASURED)
                ratio = taken / taken_s[1]
                text = f"{layer_ms:.3f} ms per layer, {ratio:.2f} of bfloat16's"
                table.note(f"{title}, {' '.join(form)}", text, layer_ms=layer_ms, ratio=ratio)
        del engines, ways
        for dtype, quantization in FORMS:
            announced = describe(folder, dtype, quantization).layer_bytes[0]
            less, more = (grown_bytes(folder, dtype, stop, quantization)[1] for stop in STOPS)
            layer_bytes = (more - less) / (STOPS[1] - STOPS[0])
            text = f"{announced / 1e6:.1f} MB announced"
            table.note(f"a layer in {dtype} {quantization}", text, announced_bytes=announced)
            table.judge(
                f"{dtype} {quantization}: grown by over announced",
                layer_bytes / announced,
                "times",
                ANNOUNCED_BAR,
            )


def decode_s(engine: Engine, sessions: int, least_s: LeastS) -> float:
    """The least seconds of a decode step."""
    caches = [engine.new_cache(MEASURED, 64) for _ in range(sessions)]
    engine.step(MEASURED, [Rows(cache, len(PROMPT), PROMPT, False) for cache in caches], None)

    def step() -> None:
        engine.step(MEASURED, [Rows(cache, 1, (7,), False) for cache in caches], None)

    return least_s(20, step)


def chunk_s(engine: Engine, least_s: LeastS) -> float:
    """The least seconds of part of a prompt."""
    tokens = tuple(range(CHUNK_TOKENS))

    def step() -> None:
        cache = engine.new_cache(MEASURED, CHUNK_TOKENS)
        engine.step(MEASURED, [Rows(cache, CHUNK_TOKENS, tokens, False)], None)

    return least_s(3, step)
