"""The case `profile`: what is measured of single layers at a start, beside steps of the whole model."""

import time

from bench.engine.engine_gpu import Bench
from gpu.cases.big_models import scale_for, spec_for_scale, write_sparse
from gpu.cases.gpu_recording import decoding_of
from gpu.gpu_findings import Context, Findings

from molink.peer.compute.backend import MeasuredModel
from molink.peer.profiling.profile import StepWork, predicted_ms
from molink.peer.profiling.profiler import measure, several_layers
from molink.shards.batching.ways import DecodingWay
from molink.shards.spec import Span

SESSIONS = (1, 8, 64)
SMALL_SESSIONS = (1, 2)
BAR = 0.15
"""Of the time of the step."""


def prediction(context: Context, findings: Findings) -> None:
    """The profile is measured first, in a process that has compiled nothing, as at a peer's first start."""
    scale = scale_for(context)
    spec = spec_for_scale(scale)
    middle = Span(spec.layers // 2, spec.layers // 2 + 1)
    measured = {0, *several_layers(spec, middle), spec.layers - 1}
    folder = write_sparse(scale, context.folder, context.device, measured)
    began_s = time.perf_counter()
    profile = measure(MeasuredModel(folder, spec, context.device, way=DecodingWay.FUSED))
    findings.note("the profile", f"measured in {time.perf_counter() - began_s:.1f} s")
    batches = ", ".join(f"{one.batch_size}: {one.layer_ms:.3f}" for one in profile.layer_latencies)
    findings.note("a layer, by batch size", f"{batches} ms")
    beside = {"step_ms": profile.step_ms, "embed_ms": profile.embed_ms, "head_ms": profile.head_ms}
    findings.note(
        "beside layers", ", ".join(f"{name} {figure:.3f}" for name, figure in beside.items()), **beside
    )
    bench = Bench(scale, context.device, decoding_of(context.device, records=True))
    for sessions in SMALL_SESSIONS if context.small else SESSIONS:
        engine = bench.engine(decoding=bench.decoding)
        taken_ms = 1000 * bench.median_s(bench.decode([engine], [bench.whole], sessions))
        work = StepWork(bench.layers, starts=True, ends=True, decode_contexts=(scale.context,) * sessions)
        said_ms = predicted_ms(profile, work)
        figures = {"predicted_ms": said_ms, "step_ms": taken_ms}
        off = abs(said_ms - taken_ms) / taken_ms
        findings.judge(f"{sessions} sessions: prediction off by", off, "of the step", BAR, **figures)
