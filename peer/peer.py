"""A peer's life: find the swarm, know the model, measure the machine, serve, drain, leave."""

import asyncio
import gc
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from molink.dht.certificate import Certificate, new_certificate
from molink.dht.description import describe_swarm
from molink.dht.discovery import Discovery
from molink.dht.errors import BootstrapUnreachable
from molink.dht.errors import PortInUse as ControlPortInUse
from molink.dht.identity import Identity
from molink.dht.key_file import KeyFileError
from molink.dht.records import PeerFacts, PeerView
from molink.dht.swarm_key import SwarmKey
from molink.peer.announcer import Announcer, joining_machine, own_facts
from molink.peer.backend import DeviceBackend
from molink.peer.codec_effect import measure_codec
from molink.peer.codecs import opted_in
from molink.peer.device import cap_gpu_memory, choose_device, default_memory_bytes, describe_device
from molink.peer.handout import Handout
from molink.peer.leases import LeaseBook, Refused
from molink.peer.link.acceptor import PortInUse
from molink.peer.machine_readings import MachineReader, NvidiaGpu, ReadMachine
from molink.peer.memory import plan_memory
from molink.peer.memory_guard import MemoryGuard, own_memory_bytes
from molink.peer.metrics import PeerMetrics, describe_line, describe_predictions
from molink.peer.metrics_server import HOST as METRICS_HOST
from molink.peer.metrics_server import MetricsServer
from molink.peer.model import LocalModel, most_needed, open_model
from molink.peer.pausing import Pausing
from molink.peer.placing import Placing
from molink.peer.prober import Prober
from molink.peer.profile import Profile
from molink.peer.profiler import cached_or_measured
from molink.peer.running import say
from molink.peer.serving import Serving, batch_limits
from molink.peer.settings import JoinSettings, where_to_join
from molink.peer.state_dir import StateDir
from molink.peer.step_times import StepTimes
from molink.routing.placement import describe_preview
from molink.shards.catalog import ModelNotFound
from molink.shards.errors import WeightsError
from molink.shards.spec import ModelSpec, Span
from molink.shards.store import StoreError

DRAIN_S = 30.0
"""Sessions that still run may end within this time before the peer goes."""
SWITCH_INTERVAL_S = 0.0002
"""The engine's thread waits at most about so long for the event loop to let go of the interpreter; Python's default of
5 ms is longer than a whole step."""
_log = logging.getLogger(__name__)


class PeerError(Exception):
    """The peer cannot serve, for a reason that its owner can mend."""


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """What a serving peer is made of."""

    discovery: Discovery
    model: LocalModel
    leases: LeaseBook
    serving: Serving
    announcer: Announcer
    placing: Placing | None
    """None: the owner has chosen the layers."""
    pausing: Pausing
    memory_guard: MemoryGuard | None
    """None: the device itself refuses more."""
    step_times: StepTimes


class Peer:
    """One peer, from join to leave. `run` it once."""

    def __init__(
        self,
        settings: JoinSettings,
        state: StateDir,
        report: Callable[[str], None],
        read_machine: ReadMachine | None = None,
    ) -> None:
        """`read_machine` tells what the volunteer does; by default it is read of this machine."""
        self.addresses: tuple[str, ...] = ()
        self.metrics = PeerMetrics()
        self._settings = settings
        self._state = state
        self._report = report
        self._read_machine = read_machine
        self._leaving = asyncio.Event()
        self._at_once = asyncio.Event()
        self._changed = asyncio.Event()
        self._parts: _Parts | None = None

    async def run(self, on_ready: Callable[["Peer"], None]) -> None:
        """Joins, serves, and returns when it has left.

        Raises:
            PeerError: it cannot; the sentence says what to do.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            async with AsyncExitStack() as stack:
                parts = self._parts = await self._open(stack)
                await parts.announcer.announce(facts_too=True)
                self.addresses = parts.discovery.addresses
                # What start-up made (half a million objects, torch's own above all) stays: a full collection that
                # walks it would hold up a token for a tenth of a second.
                gc.collect()
                gc.freeze()
                on_ready(self)
                await self._serve(parts)
        except (KeyFileError, ModelNotFound, StoreError, WeightsError, PortInUse, ControlPortInUse) as error:
            raise PeerError(str(error)) from error
        except BootstrapUnreachable as error:
            raise PeerError(f"{error}. Or start a swarm of your own with --new-swarm") from error

    def leave(self, *, at_once: bool = False) -> None:
        """Drains and stops; `at_once` without draining. Call it on the loop."""
        self._leaving.set()
        if at_once:
            self._at_once.set()

    def status(self) -> dict[str, object]:
        """This peer and the swarm as it knows it, JSON-ready."""
        parts = self._parts
        if parts is None:
            return {"ready": False}
        return {
            "ready": True,
            "peer_id": parts.announcer.facts.peer_id,
            "name": parts.announcer.facts.name,
            "model": parts.model.spec.name,
            "model_hash": parts.model.spec.model_hash,
            "dtype": parts.model.spec.dtype,
            "addresses": list(self.addresses),
            "spans": [[span.start, span.stop] for span in parts.leases.held],
            "sessions": len(parts.leases.leases),
            "draining": parts.leases.draining,
            "paused": parts.pausing.paused_for,
            "sent_activation_bytes": self.metrics.activation_bytes,
            **describe_predictions(parts.step_times),
            **describe_line(parts.serving.measure_line()),
            **describe_swarm(parts.discovery.snapshot()),
        }

    async def _open(self, stack: AsyncExitStack) -> _Parts:
        settings = self._settings
        device = choose_device(settings.device)
        identity = Identity.load_or_create(self._state.identity_key)
        swarm_key = SwarmKey.load(settings.swarm_key) if settings.swarm_key else None
        self._report("Looking for the swarm")
        discovery = await stack.enter_async_context(self._discovery(identity, swarm_key))
        # what this very peer said before it was started again binds nobody
        others = tuple(view for view in discovery.snapshot() if view.peer_id != identity.peer_id)
        model = await self._model(others)
        leases = self._lease_book(model, device)
        cap_gpu_memory(device, leases.cap_bytes)
        profile, activation_codecs = await self._measure(model, device)
        guard = self._memory_guard(device, leases)
        certificate = new_certificate(identity.peer_id)
        serving = await stack.enter_async_context(
            self._serving(identity, swarm_key, certificate, model, device, leases, activation_codecs)
        )
        self._state.remember_ports(_port_of(discovery.addresses[0]), serving.port)
        await self._open_metrics(stack, serving)
        facts = own_facts(
            identity,
            settings.name or socket.gethostname(),
            discovery.addresses,
            (self._data_address(discovery, serving.port),),
            certificate,
            describe_device(device),
            model.spec,
            settings.layers,
            profile,
            activation_codecs,
        )
        step_times = StepTimes(profile)
        self.metrics.compare(step_times)
        prober = Prober(identity.peer_id, serving.links, lambda: discovery.snapshot(model.spec.model_hash))
        announcer = self._announcer(discovery, facts, model.spec, leases, serving, prober, step_times)
        stack.push_async_callback(discovery.leave)
        pausing = self._pausing(device, leases, serving, announcer)
        parts = _Parts(discovery, model, leases, serving, announcer, None, pausing, guard, step_times)
        if settings.layers is not None:
            await self._preload(parts, settings.layers)
            return parts
        return replace(parts, placing=await self._place(parts, profile, prober))

    def _discovery(self, identity: Identity, swarm_key: SwarmKey | None) -> Discovery:
        settings = self._settings
        return Discovery(
            identity,
            listen_host=settings.listen,
            port=settings.port or _free(settings.listen, self._state.ports()[0]),
            announce_host=settings.announce,
            initial_peers=where_to_join(settings).initial_peers,
            swarm_key=swarm_key,
        )

    def _announcer(
        self,
        discovery: Discovery,
        facts: PeerFacts,
        spec: ModelSpec,
        leases: LeaseBook,
        serving: Serving,
        prober: Prober,
        step_times: StepTimes,
    ) -> Announcer:
        stepper, line = serving.stepper, serving.measure_line
        return Announcer(discovery, facts, spec, leases, stepper, prober, self._changed, line, step_times)

    async def _measure(self, model: LocalModel, device: str) -> tuple[Profile, tuple[str, ...]]:
        """How fast this machine is with the model, and the lossy codecs that its owner lets activations travel in."""
        self._report(f"Measuring this machine with {model.spec.name}")
        profile = await asyncio.to_thread(
            cached_or_measured, model.folder, model.spec, device, self._state.profiles, self._report
        )
        activation_codecs = opted_in(self._settings.activation_codec, model.spec.dtype)
        if model.spec.layers > 1:
            for codec in activation_codecs:
                self._report(f"Measuring what {codec} activations do to {model.spec.name}")
                effect = await asyncio.to_thread(measure_codec, model.folder, model.spec, device, codec)
                say(str(effect))
        return profile, activation_codecs

    def _serving(
        self,
        identity: Identity,
        swarm_key: SwarmKey | None,
        certificate: Certificate,
        model: LocalModel,
        device: str,
        leases: LeaseBook,
        activation_codecs: tuple[str, ...],
    ) -> Serving:
        settings = self._settings
        return Serving(
            identity,
            swarm_key,
            certificate,
            DeviceBackend(model, device),
            Handout.of(model),
            leases,
            (settings.listen, settings.grpc_port or _free(settings.listen, self._state.ports()[1])),
            self.metrics,
            self._changed.set,
            activation_codecs,
            settings.rule,
            http_proxy=settings.http_proxy,
            transmission_policy=settings.transmission_policy,
        )

    async def _open_metrics(self, stack: AsyncExitStack, serving: Serving) -> None:
        self.metrics.watch(serving.measure_line)
        if self._settings.metrics_port is not None:
            served = await stack.enter_async_context(
                MetricsServer(self.metrics.registry, self._settings.metrics_port)
            )
            say(f"Metrics: http://{METRICS_HOST}:{served.port}/metrics")

    def _data_address(self, discovery: Discovery, port: int) -> str:
        """Where others dial this peer's links, as HOST:PORT."""
        host = self._settings.announce or discovery.addresses[0].split("/")[2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def _model(self, views: tuple[PeerView, ...]) -> LocalModel:
        identifier = self._settings.model
        if identifier is None:
            identifier = most_needed(views)
            _log.info("no --model was given: serving %s", identifier)
        settings = self._settings
        return await open_model(
            identifier, settings.dtype, settings.quantization, views, self._state.digests, self._report
        )

    def _lease_book(self, model: LocalModel, device: str) -> LeaseBook:
        total = self._settings.memory_bytes or default_memory_bytes(device)
        limit = self._settings.layers
        if limit is not None and limit.stop > model.spec.layers:
            raise PeerError(
                f"--layers {limit.start}:{limit.stop}: {model.spec.name} has {model.spec.layers} layers"
            )
        try:
            memory = plan_memory(model.spec, total, batch_limits(model.spec).max_tokens)
        except ValueError as error:
            raise PeerError(str(error)) from error
        return LeaseBook(model.spec, memory, span_limit=limit)

    def _memory_guard(self, device: str, leases: LeaseBook) -> MemoryGuard | None:
        if device != "cpu":
            return None
        return MemoryGuard(leases.cap_bytes, leases, self._changed.set, own_memory_bytes)

    def _pausing(self, device: str, leases: LeaseBook, serving: Serving, announcer: Announcer) -> Pausing:
        rules = self._settings.comfort
        heeds_programs = rules.heeds_programs(device)
        gpu = NvidiaGpu.of(device) if heeds_programs else None
        read = self._read_machine or MachineReader(gpu, heeds_programs=heeds_programs)
        return Pausing(rules, device, read, leases, serving.admission, announcer, say)

    async def _preload(self, parts: _Parts, span: Span) -> None:
        """Exactly this span, from the start. Others hear of it before, and choose other layers meanwhile."""
        self._report(f"Loading layers {span}")
        answer = parts.leases.preload(span, asyncio.get_running_loop().time())
        if isinstance(answer, Refused):
            raise PeerError(
                f"layers {span} do not fit: {answer.detail}. Give more --memory, or fewer --layers"
            )
        await parts.announcer.announce(facts_too=True)
        await parts.serving.admission.load(span)

    async def _place(self, parts: _Parts, profile: Profile, prober: Prober) -> Placing:
        """Takes the layers that the swarm needs most."""
        self._report("Measuring round trips to the swarm")
        await prober.probe()
        spec, leases = parts.model.spec, parts.leases
        placing = Placing(parts.discovery, spec, leases, parts.serving.admission, parts.announcer)
        await placing.join(
            lambda: joining_machine(parts.announcer.facts.peer_id, spec, leases, profile, prober),
            lambda preview: say(describe_preview(preview)),
        )
        return placing

    async def _serve(self, parts: _Parts) -> None:
        """Until told to leave; then the sessions may end, and the swarm hears that this peer goes."""
        tasks = [
            asyncio.create_task(parts.serving.run(), name="serve"),
            asyncio.create_task(parts.announcer.keep_announced(), name="announce"),
            asyncio.create_task(parts.announcer.keep_probing(), name="probe"),
        ]
        tasks.append(asyncio.create_task(parts.pausing.keep_comfortable(), name="keep comfortable"))
        if parts.memory_guard is not None:
            tasks.append(asyncio.create_task(parts.memory_guard.keep_within(), name="keep within memory"))
        if parts.placing is not None:
            tasks.append(asyncio.create_task(parts.placing.keep_placed(), name="keep placed"))
        leaving = asyncio.create_task(self._leaving.wait(), name="wait to leave")
        try:
            done, _ = await asyncio.wait({*tasks, leaving}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {leaving}:
                task.result()  # a duty never returns: what ended it is an error
            await self._drain(parts)
        finally:
            for task in (*tasks, leaving):
                task.cancel()
            await asyncio.gather(*tasks, leaving, return_exceptions=True)

    async def _drain(self, parts: _Parts) -> None:
        parts.leases.drain()
        await parts.announcer.announce()
        deadline_s = asyncio.get_running_loop().time() + DRAIN_S
        while parts.leases.leases and asyncio.get_running_loop().time() < deadline_s:
            self._changed.clear()
            waits = [asyncio.create_task(event.wait()) for event in (self._changed, self._at_once)]
            await asyncio.wait(waits, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if self._at_once.is_set():
                return


def _free(host: str, port: int | None) -> int:
    """The remembered port if it is free still, else 0 for any."""
    if port is None:
        return 0
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return 0
    return port


def _port_of(address: str) -> int:
    """The TCP port of a libp2p multiaddress such as /ip4/127.0.0.1/tcp/4001/p2p/ID."""
    parts = address.split("/")
    return int(parts[parts.index("tcp") + 1])
