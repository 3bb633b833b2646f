"""A circuit that serves, as a scenario says: the same one that `emulate` starts as processes. Pure."""

from dataclasses import dataclass, replace
from functools import lru_cache

from molink.dht.records.records import DeviceProperties, PeerFacts, ServedModel
from molink.peer.memory.memory import plan_memory
from molink.peer.scheduling.in_flight_rules import rule_named
from molink.peer.scheduling.microbatch import BatchLimits
from molink.routing.cost.pipeline import PipelineStage, stage_of
from molink.shards.spec import ModelSpec, Span
from molink.simnet.core.guessing import SimulatedSpeculation
from molink.simnet.core.matrices import Latencies
from molink.simnet.core.request_load import Request
from molink.simnet.core.room import fitting_tokens
from molink.simnet.core.serving_world import OPENING_MESSAGES, SimulatedCircuit
from molink.simnet.core.simulated_peer import ComputeS
from molink.simnet.devices.devices import USABLE_MEMORY, DeviceProfile, StepParts, Work
from molink.simnet.devices.model_shapes import ModelShape
from molink.simnet.devices.timed_profile import timed_profile
from molink.simnet.serve.served_as import MOST_SESSIONS, ServedAs, cut_of, limits_of

SOFTWARE_MS = 2.5
"""Handing a step's output to the link and taking it in at the other end, half of it each, as emulated peers were seen
to need: the one constant of the machine that emulates. Profiles of devices know nothing of it."""
STEPS_REMEMBERED = 4096
"""By their rows and how many draw a token: what matrices take is the same each time."""


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """A machine of the circuit."""

    device: DeviceProfile
    span: Span


@dataclass(frozen=True, slots=True)
class Scenario:
    """A circuit and its lines; what differs by policy is not here."""

    shape: ModelShape
    stages: tuple[SimulatedStage, ...]
    bandwidth_mbps: float
    """Of every uplink."""
    delay_ms: float
    """From any machine to any other, one way; where they are not equally far, the mean of the circuit's links."""
    software_ms: float
    """What a message costs the machine that takes it, beside the step: frames, queues, Python."""
    jitter_ms: float = 0.0
    seed: int = 0
    latency_ms: Latencies | None = None
    """Between machines; None: everywhere `delay_ms`."""


def circuit_plan(scenario: Scenario, policy: str, served_as: ServedAs) -> SimulatedCircuit:
    """The scenario under one policy.

    Raises:
        ValueError: the model does not fit the machines, or no policy or rule has that name.
    """
    shape, chunk_tokens = scenario.shape, served_as.prefill_chunk_tokens
    spec = shape.spec()
    spans = tuple(stage.span for stage in scenario.stages)
    limits = limits_of(spec, chunk_tokens)
    facts = [
        replace(simulated_facts(spec, shape, stage, hop), step_tokens=limits.max_tokens)
        for hop, stage in enumerate(scenario.stages)
    ]

    hops, software_s = len(spans), scenario.software_ms / 1000
    latency_ms = scenario.latency_ms or ((scenario.delay_ms,) * hops,) * hops
    links_ms = [latency_ms[hop][(hop + 1) % hops] if hops > 1 else 0.0 for hop in range(hops)]

    def stages_of(request: Request) -> tuple[PipelineStage, ...]:
        context_tokens = request.prompt_tokens + request.new_tokens / 2
        return tuple(
            stage_of(one, span, spec, link_ms, scenario.bandwidth_mbps, context_tokens)
            for one, span, link_ms in zip(facts, spans, links_ms, strict=True)
        )

    return SimulatedCircuit(
        spec=spec,
        spans=spans,
        compute_s=tuple(_compute(shape, stage.device) for stage in scenario.stages),
        uplink_mbps=(scenario.bandwidth_mbps,) * hops,
        delay_s=tuple(tuple(one_ms / 1000 + software_s / 2 for one_ms in row) for row in latency_ms),
        kv_tokens=min(_kv_tokens(spec, stage, limits) for stage in scenario.stages),
        most_sessions=MOST_SESSIONS,
        policy=policy,
        rule=rule_named(served_as.micro_batches),
        cut=cut_of(chunk_tokens),
        limits=limits,
        stages_of=stages_of,
        profiles=None
        if chunk_tokens is not None
        else tuple(timed_profile(shape, stage.device) for stage in scenario.stages),
        opening_s=OPENING_MESSAGES * software_s,
        hand_on_s=software_s / 2,
        to_client_s=software_s,
        jitter_ms=scenario.jitter_ms,
        seed=scenario.seed,
        speculation=SimulatedSpeculation.named(served_as.speculation, served_as.temperature),
    )


def simulated_facts(spec: ModelSpec, shape: ModelShape, stage: SimulatedStage, number: int) -> PeerFacts:
    """What a peer on that machine would announce, as far as decisions depend on it."""
    profile, device = timed_profile(shape, stage.device), stage.device
    return PeerFacts(
        peer_id=f"{number}", public_key=b"", sequence=1, ttl_s=3600, protocol_version=0, version="", name=f"{number}",
        addresses=(), grpc_addresses=(f"10.0.{number // 256}.{number % 256}:1",), certificate=b"",
        device=DeviceProperties("cuda", device.name, 1, device.memory_bytes, "", 1),
        model=ServedModel.of(spec),
        span_limit=stage.span,
        layer_latencies=profile.layer_latencies,
        embed_ms=profile.embed_ms,
        head_ms=profile.head_ms,
        step_ms=profile.step_ms,
        load_bytes_per_s=profile.load_bytes_per_s,
        prefill_latencies=profile.prefill_latencies,
        decode_context_ms=profile.decode_context_ms,
        prefill_context_ms=profile.prefill_context_ms,
    )  # fmt: skip


def _compute(shape: ModelShape, device: DeviceProfile) -> ComputeS:
    @lru_cache(STEPS_REMEMBERED)
    def parts(start: int, stop: int, rows: int, sampled: int) -> StepParts:
        return device.without_contexts(shape, Span(start, stop), rows, sampled)

    def compute_s(span: Span, work: Work, sampled: int) -> float:
        return device.parts_s(parts(span.start, span.stop, work.rows, sampled), work)

    return compute_s


def _kv_tokens(spec: ModelSpec, stage: SimulatedStage, limits: BatchLimits) -> int:
    memory = plan_memory(spec, int(USABLE_MEMORY * stage.device.memory_bytes), limits.max_tokens)
    free_bytes = memory.total_bytes - memory.workspace_bytes - spec.weight_bytes(stage.span)
    if free_bytes <= 0:
        raise ValueError(f"layers {stage.span} of {spec.name} do not fit {stage.device.name}")
    return fitting_tokens(spec, stage.span, free_bytes)
