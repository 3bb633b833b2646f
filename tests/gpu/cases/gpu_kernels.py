"""The cases `kernels` and `kernel-speed`: what Triton computes beside float64, and what each kernel takes."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu.gpu_findings import CannotRun, Context, Findings
from gpu.gpu_machine import missing_modules
from gpu.kernels.drawing_shapes import SUM_BAR, drawing_cases
from gpu.kernels.kernel_shapes import SLOT, TOLERANCES, Made, Shape, compared, shapes
from gpu.kernels.latent_shapes import latent_cases
from gpu.kernels.layer_shapes import Case, byte_cases, layer_cases, row_cases
from support.devices.fused_reference import fused_here

from molink.shards.kernels.drawing_kernels import drawing_kernels_on
from molink.shards.kernels.fused import Activation, FusedKernels, NormKind, fused_on
from molink.shards.paged_attention.paged import (
    BlockAddresses,
    Logits,
    NotPaged,
    PagedAttention,
    PagedLatentAttention,
    RotaryAngles,
)
from molink.shards.sampling.recordable import DrawingKernels

LONGEST = 32_000
EVEN_BAR = 1.5
"""One long row among short ones, over rows of one length with as many tokens in all."""
FUSED_BAR = 0.5
"""One launch over the launches that it stands for."""
_RESERVE_S = 10.0
_REPEATS = 20


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What computes here."""

    attention: PagedAttention
    latents: PagedLatentAttention
    fused: FusedKernels
    drawing: DrawingKernels | None = None
    """None where operations draw."""


def kernels(context: Context, findings: Findings) -> None:
    """On a card all shapes; on a processor two head sizes in Triton's interpreter, or, without Triton, as the tests'
    reference computes them."""
    found = _kernels(context, findings)
    wanted = [*_calls(found, context)]
    deadline_s = time.monotonic() + context.budget_s - _RESERVE_S
    most = dict.fromkeys((*TOLERANCES, "float64"), 0.0)
    faults: list[str] = []
    left = list(context.share([str(index) for index in range(len(wanted))]))
    count = len(left)
    while left and time.monotonic() < deadline_s:
        dtype, difference, wrong = wanted[int(left.pop(0))]()
        faults += wrong
        most[dtype] = max(most[dtype], difference)
    for dtype, difference in most.items():
        findings.bound(f"{dtype}: off by, of a row's largest", difference, "", TOLERANCES.get(dtype, SUM_BAR))
    findings.hold("calls compared", not left, f"{count - len(left)} of {count}")
    findings.hold("calls that are wrong", not faults, "; ".join(faults) or "none", faults=faults)


_Call = Callable[[], tuple[str, float, list[str]]]
"""A dtype, by how much it is off, and what is wrong."""


def _calls(found: _Kernels, context: Context) -> Iterator[_Call]:
    for shape in _shapes(context):

        def attend(shape: Shape = shape) -> tuple[str, float, list[str]]:
            seen = compared(found.attention, shape, context.device)
            return shape.dtype, seen.difference, seen.faults(shape)

        yield attend
    small = context.small
    for case in (
        *layer_cases(found.fused.layers, context.device, small=small),
        *byte_cases(found.fused.by_bytes, context.device, small=small),
        *(row_cases(found.fused.rows, context.device, small=small) if found.fused.rows else ()),
        *_latent_cases(found.latents, context),
        *(drawing_cases(found.drawing, context.device, small=small) if found.drawing else ()),
    ):

        def compare(case: Callable[[], object] = case) -> tuple[str, float, list[str]]:
            seen = case()
            return seen.dtype, seen.difference, seen.faults  # type: ignore[attr-defined]

        yield compare


def _latent_cases(attention: PagedLatentAttention, context: Context) -> Iterator[Case]:
    """Cards without enough shared memory for numbers of a dtype attend session by session in it."""
    dtypes = [dtype for dtype in TOLERANCES if context.small or _fits(attention, dtype, context.device)]
    return latent_cases(attention, context.device, 96 if context.small else LONGEST, tuple(dtypes))


def _fits(attention: PagedLatentAttention, dtype: str, device: str) -> bool:
    query, turned = (
        torch.zeros(1, 1, size, dtype=getattr(torch, dtype), device=device) for size in (512, 64)
    )
    nobody = BlockAddresses(
        *(torch.zeros(size, dtype=torch.long, device=device) for size in ((1, 4), (2, 1)))
    )
    try:
        attention.attend(query, turned, nobody, 0, 1.0)
    except NotPaged:
        return False
    return True


def _shapes(context: Context) -> list[Shape]:
    if not context.small:
        return shapes(LONGEST)
    return shapes(96, (64,)) if not missing_modules(("triton",)) else shapes(96, (64, 128))


def _kernels(context: Context, findings: Findings) -> _Kernels:
    if context.small:
        interprets = not missing_modules(("triton",))
        findings.note("kernels", "Triton's, interpreted" if interprets else "the reference: no Triton here")
        return _interpreted() if interprets else _written_out()
    if missing_modules(("triton",)):
        raise CannotRun("this torch has no Triton: sessions attend one after the other")
    from molink.shards.batching.decode import decoding_on

    decoding, fused = decoding_on(context.device, records=False), fused_on(torch.device(context.device))
    assert decoding is not None
    assert decoding.latents is not None
    assert fused is not None
    drawing = drawing_kernels_on(torch.device(context.device))
    findings.hold("kernels that draw tokens", drawing is not None, "used" if drawing else "not used")
    return _Kernels(decoding.attention, decoding.latents, fused, drawing)


def _interpreted() -> _Kernels:
    from gpu.kernels.kernel_interpreter import compute_bfloat16

    compute_bfloat16()
    from molink.shards.kernels.triton_bytes import TritonBytes
    from molink.shards.kernels.triton_drawing import TritonDrawing
    from molink.shards.kernels.triton_latents import TritonLatents
    from molink.shards.kernels.triton_layers import TritonLayers
    from molink.shards.kernels.triton_rows import TritonRows
    from molink.shards.paged_attention.paged_triton import TritonAttention

    return _Kernels(
        TritonAttention(108),
        TritonLatents(108, 227 << 10),
        FusedKernels(TritonLayers(), TritonBytes(108, 64 << 10), TritonRows()),
        TritonDrawing(),
    )


def _written_out() -> _Kernels:
    from support.devices.paged_reference import WrittenLatents, WrittenOut

    return _Kernels(WrittenOut(), WrittenLatents(), fused_here()[0])


def kernel_speed(context: Context, findings: Findings) -> None:
    """Each kernel beside what it stands for, many calls in one recording."""
    found = _kernels(context, findings)
    _attention_speed(found.attention, context, findings)
    _layer_speed(found, context, findings)


def _attention_speed(attention: PagedAttention, context: Context, findings: Findings) -> None:
    rows, long, short = (4, 64, 16) if context.small else (64, LONGEST, 500)
    mean = (long + (rows - 1) * short) // rows
    taken = {}
    for name, lengths in (("even", (mean,) * rows), ("one long", (long, *(short,) * (rows - 1)))):
        made = Made(Shape(64 if context.small else 128, "bfloat16", 4, 8, None, lengths), context.device, 0)
        logits = Logits(made.scaling)
        taken[name] = _us(
            lambda made=made, logits=logits: attention.attend(made.query, made.places, SLOT, 8, logits),
            context,
        )  # type: ignore[misc]
        findings.note(f"attention of {rows} rows, {name}", f"{taken[name]:.0f} us", us=taken[name])
    findings.judge("one long row over even ones", taken["one long"] / taken["even"], "", EVEN_BAR)
    made = Made(Shape(64 if context.small else 128, "bfloat16", 4, 8, None, (40,) * rows), context.device, 0)
    cos = sin = made.query[:, 0]
    key, value = made.fresh

    def apart() -> None:
        half = cos.shape[-1] // 2
        for states in (made.query, key):
            other = torch.cat((-states[..., half:], states[..., :half]), -1)
            states.copy_(states * cos[:, None] + other * sin[:, None])
        attention.store(key, value, made.places, SLOT)

    def together() -> None:
        attention.rotate_and_store(RotaryAngles(made.query, cos, sin), key, value, made.places, SLOT)

    _compare(f"rotation and store, {rows} rows", together, apart, context, findings)


def _layer_speed(found: _Kernels, context: Context, findings: Findings) -> None:
    rows, dim, inner = (2, 64, 96) if context.small else (64, 4096, 14336)
    states, added = (torch.randn(rows, dim, dtype=torch.bfloat16, device=context.device) for _ in range(2))
    weight, layers = torch.ones(dim, dtype=torch.bfloat16, device=context.device), found.fused.layers
    gate, up = (torch.randn(rows, inner, dtype=torch.bfloat16, device=context.device) for _ in range(2))
    written = fused_here()[0].layers
    _compare(
        f"sum and norm of {dim}, {rows} rows",
        lambda: layers.norm(states, added, weight, 1e-5, NormKind.ROUNDED),
        lambda: written.norm(states, added, weight, 1e-5, NormKind.ROUNDED),
        context, findings,
    )  # fmt: skip
    _compare(
        f"gate of {inner}, {rows} rows",
        lambda: layers.gate(gate, up, Activation.SILU),
        lambda: written.gate(gate, up, Activation.SILU),
        context, findings, bar=1.0,
    )  # fmt: skip
    columns = 2 * inner  # more bytes than the cache of any card holds
    bytes_ = torch.randint(-127, 128, (columns, dim), dtype=torch.int8, device=context.device)
    scales, plain = torch.ones(columns, device=context.device), bytes_.to(torch.bfloat16)
    for count in (1, 4, 16, 64):
        inputs = torch.randn(count, dim, dtype=torch.bfloat16, device=context.device)
        _compare(
            f"{count} rows by {columns} x {dim} bytes, over bfloat16",
            lambda inputs=inputs: found.fused.by_bytes.multiply(inputs, bytes_, scales, None),  # type: ignore[misc]
            lambda inputs=inputs: torch.nn.functional.linear(inputs, plain),  # type: ignore[misc]
            context, findings, bar=0.65 if count <= 16 else 1.0,
        )  # fmt: skip


def _compare(
    name: str,
    kernel: Callable[[], object],
    operations: Callable[[], object],
    context: Context,
    findings: Findings,
    bar: float = FUSED_BAR,
) -> None:
    ours_us, theirs_us = _us(kernel, context), _us(operations, context)
    figures = {"kernel_us": ours_us, "operations_us": theirs_us}
    findings.judge(f"{name} ({ours_us:.1f} us)", ours_us / theirs_us, "", bar, **figures)


def _us(call: Callable[[], object], context: Context) -> float:
    """Of one call, in microseconds: of many that are recorded, so that launches from Python do not count."""
    call()
    if context.small:
        began_s = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - began_s)
    torch.cuda.synchronize(context.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPEATS):
            call()
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times_us = []
    for _ in range(5):
        began.record()
        graph.replay()
        ended.record()
        torch.cuda.synchronize(context.device)
        times_us.append(1000 * began.elapsed_time(ended) / _REPEATS)
    return min(times_us)
