"""A serving peer in this process, on a real engine behind real links, and a client that is linked to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.links.data_plane import DEADLINE_S, PATIENT_LINKS, End, describe, facts_at, hop_of
from support.models.circuit_runs import DEVICE
from support.models.tiny_models import make_tiny_model

from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.compute.backend import DeviceBackend, StageEngine
from molink.peer.engine.guessing import GuessesOf
from molink.peer.engine.metrics import PeerMetrics
from molink.peer.memory.lease_table import LeaseTimes
from molink.peer.memory.leases import LeaseBook
from molink.peer.memory.memory import MemoryPlan
from molink.peer.models.model import LocalModel
from molink.peer.profiling.step_times import StepTimes
from molink.peer.serving.artifact_server import ArtifactServer
from molink.peer.serving.data_plane import DataPlane, DataPlaneSettings, KnownSwarm, OfferedCompute
from molink.peer.serving.timeouts import TIMEOUTS, ServingTimeouts
from molink.peer.wire.link.certificate import Credentials, new_certificate
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.link_resources import LINK_TIMES
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame
from molink.shards.checkpoint import store
from molink.shards.spec import GUESSES, PENALTIES, ModelSpec, Span

LOW, HIGH = Span(0, 3), Span(3, 6)
NOBODY_ELSE = KnownSwarm()
PATIENT = ServingTimeouts(unreached_s=DEADLINE_S, silent_s=DEADLINE_S, whole_s=DEADLINE_S, prepared_s=3600.0)
"""Nobody is given up because the machine is busy."""
PATIENT_LEASES = LeaseTimes(ttl_s=3600.0, idle_s=3600.0, spared_s=3600.0, abandoned_s=3600.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return opened(make_tiny_model("llama", tmp_path_factory.mktemp("admission")))


def opened(folder: Path, dtype: str = "float32") -> LocalModel:
    manifest = store.read_manifest(folder)
    return LocalModel(folder, manifest, store.describe(manifest, dtype, "none", name="test/llama"))


@dataclass(slots=True)
class Served:
    """A peer and a client that has a link to it."""

    identity: Identity
    serving: DataPlane
    leases: LeaseBook
    spec: ModelSpec
    facts: PeerFacts
    client: End
    link: Link
    engine: StageEngine
    metrics: PeerMetrics

    def hop(self, span: Span) -> pb.Hop:
        return hop_of(self.identity, span, self.facts)

    def alone(self, session: int = 1, epoch: int = 1) -> pb.SessionDescriptor:
        """A circuit of this peer only."""
        return describe([self.hop(self.spec.whole)], session=session, epoch=epoch, spec=self.spec)

    def with_neighbour(self, other: Identity, facts: PeerFacts, *, epoch: int = 1) -> pb.SessionDescriptor:
        """This peer's first layers and another's last."""
        hops = [self.hop(LOW), hop_of(other, HIGH, facts)]
        return describe(hops, epoch=epoch, spec=self.spec)

    async def reserve(
        self, descriptor: pb.SessionDescriptor, hop: int = 0, ready_within_ms: int = 0
    ) -> pb.Response:
        asked = pb.Reserve(descriptor=descriptor, hop=hop, ready_within_ms=ready_within_ms)
        return await self._ask(pb.Request(reserve=asked))

    async def ready(self, descriptor: pb.SessionDescriptor) -> pb.Response:
        """The peer's answer once the lease is ready or refused."""
        return await once_ready(self.link, descriptor)

    async def readiness(self, descriptor: pb.SessionDescriptor) -> pb.Response:
        """The peer's answer now."""
        key = {"session": descriptor.session, "epoch": descriptor.epoch}
        return await self._ask(pb.Request(await_ready=pb.AwaitReady(**key, wait_ms=0)))

    async def release(self, descriptor: pb.SessionDescriptor) -> None:
        key = {"session": descriptor.session, "epoch": descriptor.epoch}
        assert (await self._ask(pb.Request(release=pb.Release(**key)))).HasField("released")

    def cache_tokens(self, descriptor: pb.SessionDescriptor) -> int | None:
        """The KV cache's room of a session that is here, 0 before it is ready, None where there is none."""
        session = self.serving.sessions.get(descriptor.session, descriptor.epoch)
        if session is None:
            return None
        return session.cache.capacity_tokens if session.cache is not None else 0

    async def _ask(self, request: pb.Request) -> pb.Response:
        return (await self.link.request(request, DEADLINE_S))[0]


async def once_ready(link: Link, descriptor: pb.SessionDescriptor) -> pb.Response:
    """The answer of a peer once the lease is ready or refused: as its client does, asks again until then."""
    asked = pb.AwaitReady(session=descriptor.session, epoch=descriptor.epoch, wait_ms=5000)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            response, _ = await link.request(pb.Request(await_ready=asked), DEADLINE_S)
            if response.readiness.ready or not response.HasField("readiness"):
                return response


def failures_told(peer: Served) -> asyncio.Queue[pb.Failed]:
    """What the client hears of failed sessions, from now on; nothing else reaches it any more."""
    failures: asyncio.Queue[pb.Failed] = asyncio.Queue()

    def on_frame(_: Link, frame: Frame) -> None:
        if isinstance(frame.header, pb.Failed):
            failures.put_nowait(frame.header)

    peer.client.handler.on_frame = on_frame  # type: ignore[method-assign]
    return failures


@asynccontextmanager
async def served(  # noqa: PLR0913 - what a test may say of a peer, by name
    model: LocalModel,
    *,
    kv_tokens: int = 200,
    swap_bytes: int = 0,
    span: Span | None = None,
    step_times: StepTimes | None = None,
    settings: DataPlaneSettings = DataPlaneSettings(),  # noqa: B008 - it is frozen
    swarm: KnownSwarm = NOBODY_ELSE,
    guesses: GuessesOf | None = None,
    lease_times: LeaseTimes = PATIENT_LEASES,
) -> AsyncIterator[Served]:
    """A peer with room for the weights of the span (None: all) and the KV cache of `kv_tokens` tokens in it, and swap
    space; and its client. With the product's own timeouts in its settings it has patient ones."""
    spec = model.spec
    if settings.timeouts is TIMEOUTS:
        settings = replace(settings, timeouts=PATIENT)
    if settings.link_times is LINK_TIMES:
        settings = replace(settings, link_times=PATIENT_LINKS)
    span = span if span is not None else spec.whole
    weights = spec.weight_bytes(span)
    kv_bytes = spec.kv_bytes(span, kv_tokens)
    memory = MemoryPlan(weights + kv_bytes, 0, weights, swap_bytes)
    leases = LeaseBook(spec, memory, times=lease_times)
    identity = Identity.generate()
    certificate = new_certificate(identity.peer_id)
    backend, metrics = DeviceBackend(model, DEVICE), PeerMetrics()
    serving = DataPlane(
        identity,
        Credentials(identity.peer_id, certificate),
        OfferedCompute(backend, ArtifactServer.of(model), leases, step_times, guesses=guesses),
        metrics,
        lambda: None,
        settings,
        swarm,
    )
    async with serving, End(is_client=True, times=PATIENT_LINKS) as client:
        facts = replace(
            facts_at(identity, certificate, f"127.0.0.1:{serving.port}"),
            activation_codecs=settings.activation_codecs,
            sampling_abilities=(PENALTIES, GUESSES),
        )
        link = await client.links.to(facts)
        running = asyncio.create_task(serving.admission.run())
        try:
            yield Served(identity, serving, leases, spec, facts, client, link, backend.engine, metrics)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
