"""The data plane of one peer put together: links, acceptor, engine, stepper, admission."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from molink.dht.identity.dialable import ANYWHERE, Ranges
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.peer.compute.backend import Backend, StageEngine
from molink.peer.engine.engine_thread import EngineThread
from molink.peer.engine.layered_prefill import LayeredPrefill
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.engine.sessions import SessionTable
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.leases import LeaseBook
from molink.peer.profiling.step_times import StepTimes
from molink.peer.scheduling.decode_forecast import DecodeForecast
from molink.peer.scheduling.in_flight_rules import Rule, molink
from molink.peer.scheduling.microbatch import BatchLimits, batch_limits
from molink.peer.scheduling.prefill_chunks import Cut, chunk_lengths
from molink.peer.scheduling.prefill_slices import SliceSizer
from molink.peer.scheduling.prompt_gathering import PromptGathering
from molink.peer.serving.admission import Admission
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.layer_loader import LayerLoader
from molink.peer.serving.neighbours import NeighbourLinks, NewestFacts
from molink.peer.serving.service import PeerService
from molink.peer.wire.link.acceptor import Acceptor
from molink.peer.wire.link.certificate import Certificate
from molink.peer.wire.link.link import LinkHandler
from molink.peer.wire.link.links import Links
from molink.peer.wire.transport.line_quality import MeasureLine
from molink.peer.wire.transport.message_memory import MessageMemory, message_limit_bytes
from molink.shards.batching.engine import Engine


def _slice_sizer(engine: StageEngine, step_times: StepTimes | None) -> SliceSizer | None:
    """For engines of one process that have been measured."""
    return SliceSizer(step_times) if step_times and isinstance(engine, Engine) else None


class DataPlane:
    """One peer's data plane: serves sessions of a model between `__aenter__` and `__aexit__`; `run` it meanwhile."""

    def __init__(
        self,
        identity: Identity,
        swarm_key: SwarmKey | None,
        certificate: Certificate,
        backend: Backend,
        artifacts: ArtifactServer,
        leases: LeaseBook,
        listen: tuple[str, int],
        metrics: PeerMetrics,
        on_change: Callable[[], None],
        activation_codecs: tuple[str, ...] = (),
        rule: Rule = molink,
        *,
        limits: BatchLimits | None = None,
        cut: Cut = chunk_lengths,
        http_proxy: str | None = None,
        transmission_policy: str = "molink",
        step_times: StepTimes | None = None,
        is_announced: Callable[[str], bool] = lambda _: False,
        memory_bytes: int | None = None,
        own_ranges: Ranges = ANYWHERE,
        newest_facts: NewestFacts = lambda _: None,
        wrap: Callable[[LinkHandler], LinkHandler] = lambda handler: handler,
        folder: Path | None = None,
    ) -> None:
        """`cut` is how prompts are cut whose head is here; `limits` are those of `batch_limits` if nobody says. With
        `step_times`, prompts are computed so that decode beside them keeps its pace. `is_announced`: whether an
        identity has announced itself to the swarm. Messages may take a part of the peer's `memory_bytes`. Neighbours
        are dialled in `own_ranges` only (`dht/identity/dialable.py`); `newest_facts` are those that the swarm knows of
        an identity. `wrap` puts a handler of links before this one; in `folder` are the sockets of ways that are not
        direct."""
        sessions = SessionTable()
        spec = backend.engine.spec
        limits = limits or batch_limits(spec)
        service = PeerService(spec, sessions, artifacts, activation_codecs, is_announced)
        handler = self.handler = wrap(service)
        self._engine_thread = EngineThread()
        self.links = Links(
            identity,
            handler,
            swarm_key,
            is_client=False,
            http_proxy=http_proxy,
            transmission_policy=transmission_policy,
            memory=MessageMemory(
                message_limit_bytes(memory_bytes),
                lambda peer_id: service.serves(peer_id) or is_announced(peer_id),
            ),
            own_ranges=own_ranges,
            pace=service.pace,
            folder=folder,
        )
        sizes, engine = _slice_sizer(backend.engine, step_times), backend.engine
        layered_prefill = (
            LayeredPrefill(engine, sizes, limits) if sizes and isinstance(engine, Engine) else None
        )
        self.stepper = Stepper(
            identity.peer_id,
            spec,
            backend.engine,
            self._engine_thread,
            sessions,
            self.links,
            limits,
            metrics,
            rule,
            cut,
            DecodeForecast(self.links.expect_decode),
            layered_prefill,
            PromptGathering(step_times.predicted_ms, limits.max_tokens) if step_times else None,
        )
        self.loader = LayerLoader(spec, leases, backend, self._engine_thread, on_change)
        self.admission = Admission(
            identity.peer_id,
            spec,
            leases,
            sessions,
            backend,
            self._engine_thread,
            self.loader,
            NeighbourLinks(self.links, own_ranges, newest_facts),
            self.stepper,
            on_change,
        )
        service.attach(self.stepper, self.admission, self.links)
        self.measure_line: MeasureLine = self.links.line_quality
        self._acceptor = Acceptor(
            *listen,
            identity.peer_id,
            certificate,
            self.links,
            handler,
            swarm_key,
            is_member=is_announced,
            is_needed=lambda link: self.links.in_use(link) and service.serves(link.peer_id),
        )
        self._stack = AsyncExitStack()

    @property
    def port(self) -> int:
        """Where the acceptor listens."""
        return self._acceptor.port

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._engine_thread)
            await stack.enter_async_context(self.links)
            stack.push_async_callback(self.loader.close)
            stack.push_async_callback(self.admission.close)
            await stack.enter_async_context(self._acceptor)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def run(self) -> None:
        """Lets leases expire, until cancelled. Steps are driven by what arrives."""
        await self.admission.run()
