"""The cases `decode`, `prefill`, `sampling` and `int8`: figures of speed beside their bars, for an H100 or H200."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from bench.engine import engine_gpu
from bench.engine.engine_gpu import Bench
from gpu.cases.big_models import layer_flops, scale_for, wide_scale, write_random
from gpu.cases.gpu_recording import decoding_of
from gpu.gpu_findings import Context, Findings
from support.models.circuit_runs import DEVICE, engine_with

from molink.shards.batching.engine import Rows
from molink.shards.device.device import Device
from molink.shards.kernels.drawing_kernels import drawing_kernels_on
from molink.shards.sampling.recorded_drawing import RecordedDrawing
from molink.shards.sampling.sample_request import SampleRequest
from molink.shards.sampling.sampling import sample
from molink.shards.spec import SamplingParams, Span

SAMPLING_MS = 0.5
INT8_BAR = 0.65
PREFILL_BAR = 0.6
INT8_LAYERS = 18
INT8_ROWS = (1, 2, 4, 8, 16)
CHUNK_TOKENS = 2048
_MATRIX = 8192


def decode(context: Context, findings: Findings) -> None:
    """The cases of tests/bench/engine/engine_gpu.py that make decode steps."""
    bench = _bench(context)
    agreement = Findings(judges_speed=True)
    engine_gpu.agreement(bench, agreement)
    findings.rows += agreement.rows
    for case in (engine_gpu.alone, engine_gpu.batch, engine_gpu.guesses, engine_gpu.peers):
        case(bench, findings)


def _bench(context: Context) -> Bench:
    return Bench(scale_for(context), context.device, decoding_of(context.device, records=True))


def prefill(context: Context, findings: Findings) -> None:
    """A prompt of 8,000 tokens by itself, beside the rate at which the card multiplies matrices."""
    scale = scale_for(context)
    bench = Bench(
        replace(scale, chunk=min(scale.prompt, CHUNK_TOKENS)),
        context.device,
        decoding_of(context.device, records=True),
    )
    engine = bench.engine(decoding=bench.decoding)
    taken_s = []
    for _ in range(3):
        cache = engine.new_cache(bench.whole, scale.prompt)
        bench.synchronize()
        began_s = time.perf_counter()
        for start in range(0, scale.prompt, bench.scale.chunk):
            count = min(bench.scale.chunk, scale.prompt - start)
            last = start + count == scale.prompt
            engine.step(bench.whole, [Rows(cache, count, (1,) * count, logit_rows=int(last))], None)
        bench.synchronize()
        taken_s.append(time.perf_counter() - began_s)
        cache.close()
    rate = _matrix_flops(context, bench)
    best_s = min(taken_s)
    findings.note("prefill", f"{scale.prompt / best_s:.0f} tokens/s", tokens_per_s=scale.prompt / best_s)
    findings.note("the card's matrix products", f"{rate / 1e12:.1f} TFLOP/s", flops=rate)
    reached = layer_flops(scale, scale.prompt) / best_s / rate
    findings.judge("part of that rate", reached, "", PREFILL_BAR, least=True)


def _matrix_flops(context: Context, bench: Bench) -> float:
    """Of a large product in the model's dtype, per second."""
    width = 128 if context.small else _MATRIX
    dtype = getattr(torch, bench.scale.dtype)
    one, other = (torch.randn(width, width, device=context.device, dtype=dtype) for _ in range(2))
    return 2.0 * width**3 / bench.median_s(lambda: one @ other)


def sampling(context: Context, findings: Findings) -> None:
    """All rows of a step with a temperature and top_p, from logits to token ids on the host: recorded, as peers draw
    them, beside operation by operation."""
    rows, vocabulary = (4, 512) if context.small else (64, 128_256)
    generator = torch.Generator(context.device).manual_seed(0)
    logits = torch.randn(rows, vocabulary, generator=generator, device=context.device) * 3
    params = SamplingParams(temperature=0.8, top_p=0.9)
    requests = [SampleRequest(params, seed, 7) for seed in range(rows)]
    recorder = decoding_of(context.device, records=True).recorder
    assert recorder is not None
    before = 0 if context.small else torch.cuda.memory_reserved(context.device)
    device = Device(context.device)
    recorded = RecordedDrawing(vocabulary, (1, rows), device, recorder, drawing_kernels_on(device.place))
    while recorded.record_next():
        continue
    if not context.small:
        taken = torch.cuda.memory_reserved(context.device) - before
        findings.note("memory that recorded drawings hold", f"{taken / 1e6:.0f} MB", nbytes=taken)
    ways = {"recorded": recorded, "operation by operation": None}
    there = [one.token_id for one in sample(logits.cpu(), requests)]
    for name, way in ways.items():
        here = [one.token_id for one in sample(logits, requests, way)]
        same = sum(one == other for one, other in zip(here, there, strict=True))
        findings.hold(
            f"tokens beside the processor's, {name}", same == rows, f"{same} of {rows} are the same"
        )
    for count in (1, rows):
        taken_ms = {
            name: 1000
            * statistics.median(
                _times_s(lambda way=way: sample(logits[:count], requests[:count], way), context, 20)  # type: ignore[misc] # noqa: B023 - called at once
            )
            for name, way in ways.items()
        }
        findings.note(
            f"{count} rows, operation by operation",
            f"{taken_ms['operation by operation']:.3g} ms",
            **taken_ms,
        )
        findings.judge(f"{count} rows with top_p", taken_ms["recorded"], "ms", SAMPLING_MS)


def int8(context: Context, findings: Findings) -> None:
    """Decode steps through layers of real width, in int8 over bfloat16: so many that the host's part is small."""
    scale = wide_scale(context, layers=INT8_LAYERS)
    folder = write_random(scale, context.folder, context.device)
    layers = scale.config.num_hidden_layers
    span = Span(1, layers - 1)
    rows_ms: dict[str, dict[int, float]] = {}
    for kind in ("none", "int8"):
        engine = engine_with(
            folder, (span.start, span.stop), dtype=scale.dtype, quantization=kind, device=DEVICE
        )
        rows_ms[kind] = {}
        for rows in INT8_ROWS[:2] if context.small else INT8_ROWS:
            caches = [engine.new_cache(span, 80) for _ in range(rows)]
            shape = rows, scale.config.hidden_size
            hidden = torch.ones(shape, dtype=getattr(torch, scale.dtype), device=context.device)

            def step(caches: list = caches, hidden: torch.Tensor = hidden) -> object:  # type: ignore[type-arg]
                batch = [Rows(cache, 1, None, logit_rows=0) for cache in caches]
                return engine.step(span, batch, hidden)  # noqa: B023 - called before the next engine is there

            rows_ms[kind][rows] = 1000 * statistics.median(_times_s(step, context, 30))
    for rows, plain_ms in rows_ms["none"].items():
        ratio = rows_ms["int8"][rows] / plain_ms
        figures = {"plain_ms": plain_ms, "int8_ms": rows_ms["int8"][rows]}
        findings.judge(f"int8 over {scale.dtype}, {rows} rows", ratio, "times", INT8_BAR, **figures)


def _times_s(action: Callable[[], object], context: Context, steps: int) -> list[float]:
    """Of each call, waited for, after three that are not counted."""
    taken_s = []
    for turn in range(3 + (3 if context.small else steps)):
        began_s = time.perf_counter()
        action()
        if not context.small:
            torch.cuda.synchronize(context.device)
        if turn >= 3:
            taken_s.append(time.perf_counter() - began_s)
    return taken_s
