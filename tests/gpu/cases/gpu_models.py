"""The cases `architectures` and `quantized`: tiny models of every kind, on the device, beside transformers."""

import time
from pathlib import Path

import torch
from generate_models import PATH, served_rows
from gpu.gpu_findings import Context, Findings
from support.models.circuit_runs import Circuit, engine_with
from support.models.exactness import SPLITS, join, ragged_prompts
from support.models.measured_models import (
    in_bfloat16,
    joining_faults,
    preemption_faults,
    rounding_faults,
    sharing_faults,
    tiny_model,
)
from support.models.tiny_models import make_tiny_model

from molink.shards.checkpoint.store import describe
from molink.shards.spec import Span

SMALL_ARCHITECTURES = ("llama", "gemma2")
DENSE, EXPERTS = ("llama", "gemma2", "qwen3"), ("mixtral", "qwen2_moe", "gpt_oss")
SMALL_QUANTIZED = ("llama", "mixtral")
QUANTIZED_BAR = 2e-3
"""Largest difference of float32 logits, relative to the largest: the same rounded weights, multiplied otherwise."""
BYTES_BAR = 0.02
"""By what share of the announced weights those that are held may differ."""
_RESERVE_S = 20.0
"""Enough to finish the slowest kind that is begun."""


def architectures(context: Context, findings: Findings) -> None:
    """Three batchings in float32 and all of them in bfloat16, of every row of docs/MODELS.md that is served."""
    rows = SMALL_ARCHITECTURES if context.small else served_rows(PATH.read_text(encoding="utf-8"))
    left = list(context.share(list(rows)))
    count = len(left)
    deadline_s = time.monotonic() + context.budget_s - _RESERVE_S
    while left and time.monotonic() < deadline_s:
        name = left.pop(0)
        folder = context.folder / str(len(left))
        folder.mkdir()
        began_s = time.monotonic()
        faults = _faults(name, folder)
        took_s = time.monotonic() - began_s
        if faults:
            findings.hold(name, held=False, text="; ".join(faults))
        else:
            findings.note(name, "exact", took_s=round(took_s, 1))
    part = f" of part {context.part + 1} of {context.parts}" if context.parts > 1 else ""
    text = f"{count - len(left)} of {count}" + (f"; not reached: {', '.join(left)}" if left else "")
    findings.hold(f"kinds tried{part}", not left, text)


def _faults(name: str, folder: Path) -> list[str]:
    try:
        model = tiny_model(name, folder)
        circuit = model.circuit(SPLITS[0])
        faults = [
            f"{way.__name__.removesuffix('_faults')}: {fault}"
            for way in (joining_faults, sharing_faults, preemption_faults)
            for fault in way(model, circuit)
        ]
        return faults + [f"bfloat16: {fault}" for fault in rounding_faults(in_bfloat16(model))]
    except Exception as error:  # noqa: BLE001 - one kind's boundary: the others are tried all the same
        return [f"{type(error).__name__}: {error}".splitlines()[0]]


def quantized(context: Context, findings: Findings) -> None:
    """Logits of sessions that join each other beside those of the same quantized model on the processor."""
    for name in SMALL_QUANTIZED if context.small else (*DENSE, *EXPERTS):
        folder = make_tiny_model(name, context.folder)
        for kind in ("int8", "nf4"):
            spec = describe(folder, "float32", kind)
            here: Circuit = [
                (engine_with(folder, cut, quantization=kind, device=context.device), Span(*cut))
                for cut in ((0, 2), (2, 6))
            ]
            there: Circuit = [
                (engine_with(folder, (0, 6), quantization=kind, decoding=None, device="cpu"), Span(0, 6))
            ]
            prompts = ragged_prompts(spec.vocabulary_size)
            ours, theirs = join(here, prompts), join(there, prompts)
            apart = 0.0
            for one, other in zip(ours, theirs, strict=True):
                same = next(
                    (
                        i
                        for i, pair in enumerate(zip(one.tokens, other.tokens, strict=True))
                        if len(set(pair)) > 1
                    ),
                    len(one.tokens) - 1,
                )
                mine, expected = (torch.stack(run.logits[: same + 1]) for run in (one, other))
                apart = max(apart, float((mine - expected).abs().max() / expected.abs().max()))
            findings.bound(f"{name}, {kind}: logits off by", apart, "of the largest", QUANTIZED_BAR)
            held = sum(engine.weight_bytes for engine, _ in here)
            said = sum(spec.weight_bytes(span) for _, span in here)
            findings.bound(
                f"{name}, {kind}: weights beside announced", abs(held - said) / said, "", BYTES_BAR
            )
