"""A peer process of an emulation: the product's Serving on loopback, with a backend of choice and without libp2p.

    python -m molink.simnet.emulate.processes peer CONFIGURATION

The configuration is a JSON object (see PeerConfiguration). It prints a JSON line about itself when it is ready, and one
of counters for every line on its stdin; at the end of stdin it leaves (see `child_process`).
"""

import asyncio
import gc
import json
import logging
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts
from molink.dht.records.records import (
    COORDINATE_DIMENSIONS,
    Coordinate,
    PeerFacts,
)
from molink.peer.announcing.announcer import PeerContact, ServingTerms, own_facts
from molink.peer.compute.backend import DeviceBackend, MeasuredModel
from molink.peer.daemon.peer import SWITCH_INTERVAL_S
from molink.peer.device.device import default_memory_bytes, describe_device
from molink.peer.engine.guessing import HeadGuesses
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.memory.leases import LeaseBook, Refused
from molink.peer.memory.memory import plan_memory
from molink.peer.models.model import ModelRequest, open_model
from molink.peer.profiling.profiler import cached_or_measured
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.in_flight_rules import rule_named
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.data_plane import DataPlane, DataPlaneSettings, OfferedCompute
from molink.peer.wire.link.certificate import Credentials, new_certificate
from molink.shards.spec import Span
from molink.signals import run_loop
from molink.simnet.core.guessing import SimulatedSpeculation, bundled_draft
from molink.simnet.devices.model_shapes import MODEL_SHAPES
from molink.simnet.devices.named_devices import device_named
from molink.simnet.emulate.processes.timed_backend import Machine, timed_machine
from molink.simnet.serve.served_as import MOST_SESSIONS, cut_of, limits_of

_FACTS_TTL_S = 24 * 3600
_COORDINATE_ERROR = 0.05
"""Of a coordinate that nobody estimated: it is known."""


@dataclass(frozen=True, slots=True)
class PeerConfiguration:
    """What a peer process is told."""

    name: str
    model: str
    tensors_per_boundary: int
    """Of a timed machine (`ModelShape`); one that really computes sends one."""
    device: str | None
    """The profile that computing is timed from; None: it really computes, on this machine's processor."""
    start: int
    stop: int
    http_proxy: str | None
    uplink_mbps: float
    """What it knows of its line from the beginning, as a peer that has measured it does."""
    delay_ms: float
    """The same: to every other peer, one way."""
    policy: str
    micro_batches: str
    prefill_chunk_tokens: int | None
    """None: the head chooses, and prompts are gathered, and computed in slices while sessions decode."""
    speculation: str
    """Guessed tokens of a trip: auto, draft, off, or a number."""


@dataclass(frozen=True, slots=True)
class PeerReport:
    """What a peer process says when it is ready."""

    facts: str
    """The signed record, in hexadecimal digits."""
    free_kv_bytes: int
    most_sessions: int


@dataclass(frozen=True, slots=True)
class PeerCounters:
    """What a peer has used since its start."""

    at_s: float
    """On a clock of its own."""
    busy_s: float
    """The engine's time."""
    cpu_s: float
    """The whole process's."""
    steps: int
    rows: int


class EmulatedPeer:
    """Owner of one Serving and what it needs; `run` it once."""

    def __init__(self, configuration: PeerConfiguration) -> None:
        self._configuration = configuration
        self._metrics = PeerMetrics()

    async def run(self) -> None:
        """Serves until stdin ends."""
        configuration = self._configuration
        machine = await self._machine()
        spec = machine.backend.engine.spec
        span = Span(configuration.start, configuration.stop)
        limits = limits_of(spec, configuration.prefill_chunk_tokens)
        memory = plan_memory(spec, machine.memory_bytes, limits.max_tokens)
        leases = LeaseBook(
            spec, memory, span_limit=span, max_sessions=MOST_SESSIONS, max_sessions_per_owner=MOST_SESSIONS
        )
        refused = leases.preload(span, asyncio.get_running_loop().time())
        if isinstance(refused, Refused):
            raise SystemExit(f"layers {span} of {spec.name} do not fit this machine: {refused.detail}")
        identity = Identity.generate()
        certificate = new_certificate(identity.peer_id)
        step_times = StepTimes(machine.profile)
        self._metrics.compare(step_times)
        chunk_tokens = configuration.prefill_chunk_tokens
        speculation = SimulatedSpeculation.named(configuration.speculation)
        serving = DataPlane(
            identity,
            Credentials(identity.peer_id, certificate),
            OfferedCompute(
                machine.backend,
                machine.artifacts,
                leases,
                step_times if chunk_tokens is None else None,
                guesses=None if speculation is None else _guesses(speculation),
            ),
            self._metrics,
            lambda: None,
            DataPlaneSettings(
                rule=rule_named(configuration.micro_batches),
                limits=limits,
                cut=cut_of(chunk_tokens),
                http_proxy=configuration.http_proxy,
                transmission_policy=configuration.policy,
            ),
        )
        async with serving:
            await serving.loader.load(span)
            facts = own_facts(
                identity,
                PeerContact(configuration.name, (), (f"127.0.0.1:{serving.port}",), certificate),
                machine.device,
                spec,
                machine.profile,
                ServingTerms(span, step_tokens=limits.max_tokens),
            )
            record = sign_facts(_with_line(facts, configuration), identity)
            _print(asdict(PeerReport(record.hex(), leases.free_kv_bytes, MOST_SESSIONS)))
            gc.collect()
            gc.freeze()
            running = asyncio.create_task(serving.run(), name="serve")
            try:
                while await asyncio.to_thread(sys.stdin.readline):
                    _print(asdict(self._counters()))
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

    async def _machine(self) -> Machine:
        configuration = self._configuration
        if configuration.device is not None:
            shape = replace(
                MODEL_SHAPES[configuration.model], tensors_per_boundary=configuration.tensors_per_boundary
            )
            return timed_machine(shape, device_named(configuration.device))
        with tempfile.TemporaryDirectory(prefix="molink-emulate-") as folder:
            request = ModelRequest(configuration.model)
            model = await open_model(request, (), Path(folder) / "digests", lambda _: None)
            measured = MeasuredModel(model.folder, model.spec, "cpu", model.stand_ins())
            profile = await asyncio.to_thread(cached_or_measured, measured, Path(folder) / "profiles")
        backend, artifacts = DeviceBackend(model, "cpu"), ArtifactServer.of(model)
        return Machine(backend, artifacts, describe_device("cpu"), profile, default_memory_bytes("cpu"))

    def _counters(self) -> PeerCounters:
        def value(name: str) -> float:
            return self._metrics.registry.get_sample_value(name) or 0.0

        return PeerCounters(
            at_s=time.perf_counter(),
            busy_s=value("molink_step_seconds_sum"),
            cpu_s=time.process_time(),
            steps=round(value("molink_steps_total")),
            rows=round(value("molink_rows_total")),
        )


def _guesses(speculation: SimulatedSpeculation) -> HeadGuesses:
    """No tables: every session says the same tape."""
    draft = bundled_draft() if speculation.drafts else None
    return HeadGuesses(tables=False, draft=draft, fixed=speculation.fixed)


def _with_line(facts: PeerFacts, configuration: PeerConfiguration) -> PeerFacts:
    """With what routers and other peers predict transmissions from. Two heights and no distance make a round trip."""
    coordinate = None
    if configuration.delay_ms > 0:
        coordinate = Coordinate((0.0,) * COORDINATE_DIMENSIONS, configuration.delay_ms, _COORDINATE_ERROR)
    return replace(
        facts,
        sequence=1,
        ttl_s=_FACTS_TTL_S,
        uplink_mbps=configuration.uplink_mbps,
        coordinate=coordinate,
    )


def _print(value: dict[str, object]) -> None:
    print(json.dumps(value), flush=True)


def main() -> None:
    """The process's whole life. A Ctrl-C is its parent's to handle: the end of stdin follows."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    run_loop(EmulatedPeer(PeerConfiguration(**json.loads(sys.argv[1]))).run())
