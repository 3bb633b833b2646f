"""Circuits in virtual time as the MoLink papers draw them: when engines compute, and what lines carry."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from molink.peer.wire.transmission.classes import TrafficClass
from molink.shards.spec import Span
from molink.simnet.core.frames import SimulatedFrame
from molink.simnet.core.request_load import Request
from molink.simnet.core.serving_world import ServingWorld
from molink.simnet.core.simulated_peer import ComputeS
from molink.simnet.core.timeline import Timeline
from molink.simnet.devices.devices import DEVICES, DeviceProfile, SequenceChunk, Work
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.serve.scenario import Scenario, SimulatedStage, circuit_plan
from molink.simnet.serve.served_as import WHOLE_PROMPT_TOKENS, ServedAs

LLAMA_30B = ModelShape(
    name="llama-30b",
    architecture="llama",
    layers=60,
    hidden_size=6656,
    intermediate_size=17920,
    heads=52,
    kv_heads=52,
    head_dim=128,
    vocabulary_size=32000,
    context_length=2048,
)
"""13,312 bytes of activations a token."""
BANDWIDTH_MBPS = 100.0
_DEVICE: DeviceProfile = replace(DEVICES["rtx-4090"], memory_bytes=4 * DEVICES["rtx-4090"].memory_bytes)
"""The papers' servers have as many as the model needs; one computes at a time."""
_STAGES = (SimulatedStage(_DEVICE, Span(0, 30)), SimulatedStage(_DEVICE, Span(30, 60)))
_BATCH = 4
PROMPT_TOKENS = 1000
_AT_ONCE_S = 1e-6
PROMPT_S = 2.0
"""When the prompt comes, decode having settled."""


@dataclass(frozen=True, slots=True)
class IterationCost:
    """Of an iteration on one stage."""

    tokens: int
    compute_ms: float
    communication_ms: float


@dataclass(frozen=True, slots=True)
class EngineStep:
    """A step of an engine."""

    stage: int
    start_s: float
    taken_s: float
    prefill: bool


@dataclass(frozen=True, slots=True)
class Transmission:
    """Bytes that leave a stage's uplink one after the other, for the same phase."""

    stage: int
    start_s: float
    taken_s: float
    prefill: bool


@dataclass(frozen=True, slots=True)
class RunRecording:
    """Of a run, in order."""

    computing: tuple[EngineStep, ...]
    sending: tuple[Transmission, ...]


def prefill_cost(tokens: int) -> IterationCost:
    """Of a prompt: half the layers, then the line."""
    return _cost(tokens, [SequenceChunk(tokens, 0)])


def decode_cost(batch: int) -> IterationCost:
    """Of one token for each of so many sessions, of 512 tokens."""
    return _cost(batch, [SequenceChunk(1, 512)] * batch)


def alone(until_s: float = 5.0) -> RunRecording:
    """A prompt of 1,000 tokens, and nothing else."""
    return _two_stages("concurrent", ServedAs("2", WHOLE_PROMPT_TOKENS), [_prompt()], 1.0, until_s)


def competition(policy: str, until_s: float = 5.0) -> RunRecording:
    """Two micro-batches of four decode; a prompt of 1,000 tokens comes between them."""
    decoding = [Request(number, 0.001 * number, 1, 200) for number in range(2 * _BATCH)]
    return _two_stages(policy, ServedAs("2", WHOLE_PROMPT_TOKENS), [*decoding, _prompt()], 1.0, until_s)


def bubbles(micro_batches: int, delay_ms: float = 10.0, until_s: float = 3.0) -> RunRecording:
    """So many micro-batches decode on two stages."""
    decoding = [Request(number, 0.001 * number, 1, 200) for number in range(_BATCH * micro_batches)]
    served_as = ServedAs(f"{micro_batches}", WHOLE_PROMPT_TOKENS)
    return _two_stages("molink", served_as, decoding, delay_ms, until_s)


def busy(parts: Sequence[EngineStep | Transmission], window_s: tuple[float, float]) -> float:
    """Of one engine, or one uplink: the part of the window in which it did something."""
    start_s, end_s = window_s
    inside = (min(end_s, one.start_s + one.taken_s) - max(start_s, one.start_s) for one in parts)
    return sum(max(0.0, seconds) for seconds in inside) / (end_s - start_s)


def _prompt() -> Request:
    return Request(2 * _BATCH, PROMPT_S, PROMPT_TOKENS, 1000)


def _cost(tokens: int, chunks: Sequence[SequenceChunk]) -> IterationCost:
    compute_s = _DEVICE.compute_s(LLAMA_30B, _STAGES[0].span, chunks, 0)
    return IterationCost(
        tokens, 1000 * compute_s, tokens * LLAMA_30B.spec().activation_bytes * 8 / (1000 * BANDWIDTH_MBPS)
    )


def _two_stages(
    policy: str, served_as: ServedAs, requests: Sequence[Request], delay_ms: float, until_s: float
) -> RunRecording:
    scenario = Scenario(LLAMA_30B, _STAGES, BANDWIDTH_MBPS, delay_ms, 0.0)
    return record(scenario, policy, served_as, requests, until_s)


def record(
    scenario: Scenario, policy: str, served_as: ServedAs, requests: Sequence[Request], until_s: float
) -> RunRecording:
    """What engines and uplinks do until then. Raises ValueError as `circuit_plan` does."""
    timeline = Timeline()
    steps: list[EngineStep] = []

    def noted(stage: int, compute_s: ComputeS) -> ComputeS:
        def noting(span: Span, work: Work, sampled: int) -> float:
            taken_s = compute_s(span, work, sampled)
            prefill = work.attended > work.tokens  # a row that is alone attends to as many as it reads
            steps.append(EngineStep(stage, timeline.now_s, taken_s, prefill))
            return taken_s

        return noting

    plan = circuit_plan(scenario, policy, served_as)
    plan = replace(plan, compute_s=tuple(noted(stage, one) for stage, one in enumerate(plan.compute_s)))
    world = ServingWorld(plan, timeline)
    sent: list[list[Transmission]] = [[] for _ in world.channels]
    bytes_per_s = scenario.bandwidth_mbps * 1e6 / 8
    for stage, channels in enumerate(world.channels):
        channels.on_sent = partial(_note, sent[stage], stage, bytes_per_s)
    world.desk.arrive(requests)
    timeline.run(until_s)
    return RunRecording(tuple(steps), tuple(one for own in sent for one in own))


def _note(
    sent: list[Transmission],
    stage: int,
    bytes_per_s: float,
    frame: SimulatedFrame,
    size_bytes: int,
    left_s: float,
) -> None:
    """Chunks that follow each other at once are one."""
    prefill = frame.traffic_class is TrafficClass.PREFILL
    start_s = left_s - size_bytes / bytes_per_s
    last = sent[-1] if sent else None
    if last is not None and last.prefill == prefill and start_s - last.start_s - last.taken_s < _AT_ONCE_S:
        start_s = sent.pop().start_s
    sent.append(Transmission(stage, start_s, left_s - start_s, prefill))
