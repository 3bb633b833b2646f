"""The cases `recorded` and `failing-capture`: what recording must not change."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from gpu.gpu_findings import Context, Findings
from support.devices.paged_reference import Tapes, WrittenOut
from support.models.circuit_runs import Circuit, engine_with, finish, start_run, step_runs
from support.models.exactness import TOLERANCE
from support.models.tiny_models import VOCABULARY, make_tiny_model
from torch import Tensor

from molink.shards.batching.decode import BATCH_SIZES, Decoding, decoding_on
from molink.shards.paged_attention.paged import BlockAddresses, Logits, PagedAttention, RotaryAngles
from molink.shards.spec import Span

ARCHITECTURES = ("llama", "qwen2_sliding", "gemma3", "mistral", "gpt2", "qwen3")
SMALL_ARCHITECTURES = ("llama",)
STEPS = 500
SMALL_STEPS = 60
FLAT_BYTES = 1 << 20
"""By so much the memory of the device may differ between the first steps and the last: rounding of the allocator."""
_WARM_STEPS = 50
_WHOLE = Span(0, 6)


def decoding_of(device: str, *, records: bool) -> Decoding:
    """As the device decodes, or as the tests' reference does on a processor."""
    if device == "cpu":
        return Decoding(WrittenOut(), Tapes() if records else None)
    decoding = decoding_on(device, records=records, fuses=True)
    assert decoding is not None
    return decoding


def recorded(context: Context, findings: Findings) -> None:
    """Logits of recorded and of unrecorded steps, at each size that is recorded and at some in between."""
    full, between = ((1, 2), (3,)) if context.small else (BATCH_SIZES, (3, 5, 17, 63))
    for name in SMALL_ARCHITECTURES if context.small else ARCHITECTURES:
        folder = make_tiny_model(name, context.folder)
        for dtype in ("float32",) if context.small else ("float32", "bfloat16"):
            ours, theirs = (
                _logits(folder, dtype, decoding_of(context.device, records=records), (*full, *between))
                for records in (True, False)
            )
            unlike = [size for size in full if not torch.equal(ours[size], theirs[size])]
            text = (
                f"batches of {', '.join(map(str, unlike))} differ" if unlike else f"{len(full)} batch sizes"
            )
            findings.hold(f"{name}, {dtype}: equal bit for bit", not unlike, text)
            if dtype == "float32":  # rows of nobody make the products larger, which may round otherwise
                apart = max(
                    float((ours[size] - theirs[size]).abs().max() / theirs[size].abs().max())
                    for size in between
                )
                findings.bound(f"{name}: with rows of nobody, off by", apart, "", TOLERANCE)


def _logits(folder: Path, dtype: str, decoding: Decoding, sizes: tuple[int, ...]) -> dict[int, Tensor]:
    """By number of sessions all logits of some steps of one token each, whatever the tokens."""
    circuit: Circuit = [(engine_with(folder, (0, 6), dtype=dtype, decoding=decoding), _WHOLE)]
    found = {}
    for size in sizes:
        runs = [start_run(circuit, prompt, 6) for prompt in _prompts(size)]
        finish(circuit, runs, 6)
        found[size] = torch.stack([torch.stack(run.logits[1:]) for run in runs])
        for run in runs:
            run.caches[0].close()
    return found


def _prompts(count: int) -> list[tuple[int, ...]]:
    draw = random.Random(count)
    return [
        tuple(draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 7, 16, 40)))) for _ in range(count)
    ]


class FailingAttention:
    """Attends as another does, and while a step is recorded does at its n-th call what breaks the recording."""

    def __init__(self, attention: PagedAttention, breaks: Callable[[Tensor], object], at_call: int) -> None:
        self._attention = attention
        self._breaks = breaks
        self._left = at_call
        self.broken = 0

    def store(self, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int) -> None:
        self._attention.store(keys, values, places, slot)

    def rotate_and_store(
        self, turned: RotaryAngles, keys: Tensor, values: Tensor, places: BlockAddresses, slot: int
    ) -> None:
        self._attention.rotate_and_store(turned, keys, values, places, slot)

    def attend(
        self, query: Tensor, places: BlockAddresses, slot: int, key_heads: int, logits: Logits
    ) -> Tensor:
        if recording(query.device):
            self._left -= 1
            if self._left < 0:
                self.broken += 1
                self._breaks(query)
        return self._attention.attend(query, places, slot, key_heads, logits)


def recording(device: torch.device) -> bool:
    """Whether what is launched now is recorded: on a card into a graph, in the tests' reference onto a tape."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return type(_get_current_dispatch_mode()).__name__ == "Tape"


def _raises(_: Tensor) -> None:
    raise RuntimeError("a kernel that cannot be recorded")


def _raises_another(_: Tensor) -> None:
    raise KeyError("what no RuntimeError is")


def _waits(query: Tensor) -> None:
    query.sum().item()  # invalidates the capture: its end raises too


FAILURES: dict[str, tuple[Callable[[Tensor], object], int]] = {
    "the first layer raises": (_raises, 0),
    "the last layer raises": (_raises, 5),
    "a layer raises what is no RuntimeError": (_raises_another, 2),
    "a layer waits for the device": (_waits, 3),
}


def failing_capture(context: Context, findings: Findings) -> None:
    """Many steps after each kind of failure: the tokens, the stream, and the device's memory."""
    folder = make_tiny_model("llama", context.folder)
    steps = SMALL_STEPS if context.small else STEPS
    prompts = _prompts(3)
    plain: Circuit = [
        (engine_with(folder, (0, 6), decoding=decoding_of(context.device, records=False)), _WHOLE)
    ]
    expected = finish(plain, [start_run(plain, prompt, steps) for prompt in prompts], steps)
    for name, (breaks, at_call) in FAILURES.items():
        decoding = decoding_of(context.device, records=True)
        failing = FailingAttention(decoding.attention, breaks, at_call)
        circuit: Circuit = [
            (engine_with(folder, (0, 6), decoding=replace(decoding, attention=failing)), _WHOLE)
        ]
        stream = None if context.small else torch.cuda.current_stream(context.device)
        runs = [start_run(circuit, prompt, steps) for prompt in prompts]
        memory: list[int] = []
        while len(runs[0].tokens) < steps:
            step_runs(circuit, runs)
            if not context.small and len(runs[0].tokens) in (_WARM_STEPS, steps):
                memory.append(torch.cuda.memory_allocated(context.device))
        same = [run.tokens for run in runs] == expected
        findings.hold(name, same and failing.broken > 0, f"{steps} steps, {failing.broken} broken captures")
        if not context.small:
            stayed = torch.cuda.current_stream(context.device) == stream
            findings.hold(f"{name}: stream", stayed, "as before" if stayed else "the capture's")
            grown = memory[-1] - memory[0]
            findings.bound(f"{name}: memory grown", grown, "bytes", FLAT_BYTES)
