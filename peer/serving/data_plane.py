"""The data plane of one peer put together: links, acceptor, engine, stepper, admission."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import ANYWHERE, Ranges
from molink.dht.identity.identity import Identity
from molink.peer.compute.backend import Backend, SlicingEngine, scores_prompts
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.guessing import GuessesOf
from molink.peer.engine.idle_engine import IdleEngine
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sessions import ServedSession, SessionTable
from molink.peer.engine.stepping import Stepper
from molink.peer.engine.steps import StepPayload
from molink.peer.hop.hop_core import HopCore
from molink.peer.hop.session import HopSettings
from molink.peer.masks.mask_worker import MaskedModel, MaskWorker
from molink.peer.memory.leases import LeaseBook
from molink.peer.profiling.step_times import StepTimes
from molink.peer.redundancy.input_log import InputLogs, log_limit_bytes
from molink.peer.redundancy.pair_roles import Roles
from molink.peer.scheduling.decode_forecast import DecodeForecast, on_loop_clock
from molink.peer.scheduling.in_flight_rules import Rule, molink
from molink.peer.scheduling.microbatch import BatchLimits, batch_limits
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.peer.serving.admission import Admission
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.copy_keeper import CopyKeeper
from molink.peer.serving.copy_sender import CopySender
from molink.peer.serving.copying import Copying
from molink.peer.serving.holder_roles import HolderRoles
from molink.peer.serving.layer_loader import LayerLoader, LeasedCompute
from molink.peer.serving.neighbours import NeighbourLinks, NewestFacts
from molink.peer.serving.prepared_epochs import PreparedEpochs
from molink.peer.serving.service import PeerService
from molink.peer.serving.timeouts import TIMEOUTS, ServingTimeouts
from molink.peer.wire.link.acceptor import Acceptor
from molink.peer.wire.link.certificate import Credentials
from molink.peer.wire.link.link import LinkHandler
from molink.peer.wire.link.link_resources import LINK_TIMES, LinkResources, LinkTimes
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.transport.line_quality import MeasureLine
from molink.peer.wire.transport.message_memory import MessageMemory, message_limit_bytes
from molink.peer.wire.transport.shared_uplink import SharedUplink
from molink.routing.cost.prefill_chunks import Cut, chunk_lengths
from molink.shards.spec import GRAMMARS, PROMPT_LOGPROBS


def _unwrapped(handler: LinkHandler) -> LinkHandler:
    return handler


def _nobody(_: str) -> bool:
    return False


def _nothing(_: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class KnownSwarm:
    """What a data plane asks about the swarm around it; by default nobody is known, and neighbours may be anywhere."""

    is_announced: Callable[[str], bool] = _nobody
    """Whether an identity has announced itself."""
    newest_facts: NewestFacts = _nothing
    own_ranges: Ranges = ANYWHERE
    """Neighbours are dialled in these only (`dht/identity/dialable.py`)."""


@dataclass(frozen=True, slots=True)
class DataPlaneSettings:
    """How one peer's data plane listens, sends and steps."""

    listen: tuple[str, int] = ("127.0.0.1", 0)
    activation_codecs: tuple[str, ...] = ()
    rule: Rule = molink
    """How many micro-batches circulate, where this peer is the head."""
    limits: BatchLimits | None = None
    """None: those of `batch_limits`."""
    cut: Cut = chunk_lengths
    """How prompts are cut whose head is here."""
    http_proxy: str | None = None
    transmission_policy: str = "molink"
    memory_bytes: int | None = None
    """The peer's; messages may take a part of it."""
    wrap: Callable[[LinkHandler], LinkHandler] = _unwrapped
    """Puts a handler of links before the data plane's own."""
    copies: bool = False
    """Whether copies are kept for others, and of what is here."""
    roles: Roles = Roles.OFF
    """Whether sessions go over to partners that have copies of them."""
    timeouts: ServingTimeouts = TIMEOUTS
    link_times: LinkTimes = LINK_TIMES
    folder: Path | None = None
    """Where the sockets of ways that are not direct are made; None: in a new one for each."""


@dataclass(frozen=True, slots=True, eq=False)
class OfferedCompute:
    """What a data plane serves sessions with."""

    backend: Backend
    artifacts: ArtifactServer
    leases: LeaseBook
    step_times: StepTimes | None = None
    """If they are known, prompts are computed so that decode beside them keeps its pace."""
    masked: MaskedModel | None = None
    """Whose tokens are masked where a grammar is asked for; None: there are no grammars here."""
    guesses: GuessesOf | None = None
    """Who guesses the tokens of sessions whose head is here; None: nobody."""

    @property
    def tail_abilities(self) -> tuple[str, ...]:
        """What it can do as a tail beside what every peer of this version can."""
        return *([PROMPT_LOGPROBS] if scores_prompts(self.backend.engine) else ()), *(
            [] if self.masked is None else [GRAMMARS]
        )


class DataPlane:
    """One peer's data plane: serves sessions of a model between `__aenter__` and `__aexit__`; `run` it meanwhile."""

    def __init__(
        self,
        identity: Identity,
        credentials: Credentials,
        compute: OfferedCompute,
        metrics: PeerMetrics,
        on_change: Callable[[], None],
        settings: DataPlaneSettings = DataPlaneSettings(),
        swarm: KnownSwarm = KnownSwarm(),
    ) -> None:
        """`on_change` hears of leases and layers that have come and gone."""
        backend, leases, step_times = compute.backend, compute.leases, compute.step_times
        rule, cut = settings.rule, settings.cut
        self.sessions = sessions = SessionTable(metrics.traces)
        """Those that it serves."""
        spec = backend.engine.spec
        limits = settings.limits or batch_limits(spec)
        service = PeerService(
            spec,
            sessions,
            compute.artifacts,
            settings.activation_codecs,
            swarm.is_announced,
            abilities=frozenset(compute.tail_abilities),
        )
        self.handler = settings.wrap(service)
        self._engine_thread = EngineThread()
        memory = MessageMemory(
            message_limit_bytes(settings.memory_bytes),
            lambda peer_id: service.serves(peer_id) or swarm.is_announced(peer_id),
        )
        self.links = Links(
            identity,
            self.handler,
            credentials.swarm_key,
            is_client=False,
            http_proxy=settings.http_proxy,
            own_ranges=swarm.own_ranges,
            resources=LinkResources(
                SharedUplink(settings.transmission_policy),
                memory,
                service.pace,
                settings.folder,
                settings.link_times,
            ),
        )
        core: HopCore[ServedSession, StepPayload] = HopCore(
            HopSettings(
                identity.peer_id,
                spec.activation_bytes,
                min(spec.most_step_tokens, limits.max_tokens),
                limits,
                rule,
                cut,
                self.links.uses_deadlines,
            ),
            SliceSizer(step_times) if step_times and isinstance(backend.engine, SlicingEngine) else None,
            PromptGathering(step_times.predicted_ms, limits.max_tokens) if step_times else None,
        )
        watch = DecodeForecast(self.links.expect_decode, on_loop_clock)
        self.stepper = Stepper(
            core, backend.engine, self._engine_thread, sessions, self.links, metrics, watch
        )
        self.stepper.predicted_ms = None if step_times is None else step_times.predicted_ms
        if compute.guesses is not None:
            self.stepper.guessing.source_of = compute.guesses
        if compute.masked is not None:
            self.stepper.draws.masks = MaskWorker(compute.masked)
        leased = LeasedCompute(spec, leases, backend, self._engine_thread, on_change, settings.timeouts)
        self.loader = LayerLoader(leased)
        self.links.newest_facts = swarm.newest_facts
        neighbours = NeighbourLinks(self.links, swarm.own_ranges, swarm.newest_facts, settings.timeouts)
        self.copying: Copying | None = None
        """None: no copies are kept, neither here nor of what is here."""
        if settings.copies:
            logs = InputLogs(log_limit_bytes(settings.memory_bytes))
            self.copying = self._open_copying(identity.peer_id, leased, neighbours, logs, settings.roles)
        self.admission = Admission(
            identity.peer_id, leased, sessions, self.loader, neighbours, self.stepper, self.copying
        )
        self._prepared = PreparedEpochs(
            identity.peer_id, sessions, self.admission, self.stepper, neighbours, self.links, self.copying
        )
        service.attach(self.stepper, self.admission, self.links, self._prepared, self.copying)
        self.roles: HolderRoles | None = None
        """None: without copies there are no roles."""
        if self.copying is not None:
            self.roles = HolderRoles(settings.roles, sessions, self.copying, self.links, step_times)
            metrics.watch_copies(self.copying.describe)
        self._acceptor = Acceptor(
            *settings.listen,
            credentials,
            self.links,
            self.handler,
            is_member=swarm.is_announced,
            is_needed=lambda link: self.links.in_use(link) and service.serves(link.peer_id),
        )
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        """Where the acceptor listens."""
        return self._acceptor.port

    @property
    def measure_line(self) -> MeasureLine:
        """What this machine's line is measured by."""
        return self.links.line_quality

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engine_thread)
            if self.stepper.draws.masks is not None:
                await stack.enter_async_context(self.stepper.draws.masks)
            await stack.enter_async_context(self.links)
            stack.push_async_callback(self.loader.close)
            stack.push_async_callback(self.admission.close)
            stack.push_async_callback(self._prepared.close)
            if self.copying is not None:
                stack.push_async_callback(self.copying.close)
            await stack.enter_async_context(self._acceptor)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def _open_copying(
        self, peer_id: str, compute: LeasedCompute, neighbours: NeighbourLinks, logs: InputLogs, roles: Roles
    ) -> Copying:
        engine, thread = compute.backend.engine, self._engine_thread
        idle = IdleEngine(thread)
        always = roles in (Roles.PAIRS, Roles.AUTO)
        sender = CopySender(engine, idle, self.sessions, neighbours, self.links, between_steps=always)
        keeper = CopyKeeper(peer_id, engine, compute.leases, thread, idle, logs, neighbours)
        keeper.writer.between_steps = always
        return Copying(sender, keeper, logs, engine.spec)

    def say_leaving(self, within_s: float, reason: str) -> None:
        """Tells the clients of all sessions that these have to be elsewhere by then."""
        for session in self.sessions:
            session.owner.post(
                pb.Leaving(
                    session=session.key.session,
                    epoch=session.key.epoch,
                    within_ms=round(within_s * 1000),
                    reason=reason,
                )
            )

    def describe_circuits(self) -> list[dict[str, object]]:
        """The circuits of sessions here, with how many go over each; JSON-ready. Clients are not told of."""
        counts = Counter(session.plan.circuit for session in self.sessions)
        return [
            {
                "sessions": sessions,
                "hops": [
                    {"peer_id": peer_id, "start": span.start, "stop": span.stop} for peer_id, span in circuit
                ],
            }
            for circuit, sessions in counts.most_common()
        ]

    async def run(self) -> None:
        """Lets leases expire, and suggests where sessions should be, until cancelled. Steps are driven by what
        arrives."""
        if self.roles is None:
            await self.admission.run(self._prepared.forget_ended)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.admission.run(self._prepared.forget_ended), name="let leases expire")
            tasks.create_task(self.roles.run(), name="suggest moves")
