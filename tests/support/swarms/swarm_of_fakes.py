"""A swarm as a client meets it, without sockets: peers that grant, refuse or stay silent as a test says."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from support.links.data_plane import SPEC
from support.swarms.swarm_examples import facts_of, state_of

from molink.client.circuit.scouting import ReachabilityProbes
from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts
from molink.dht.records.records import LayerLatency, PeerFacts, PeerView
from molink.peer.wire.link.link import LinkError
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.shards.spec import ModelSpec, Span


class FakePeer:
    """A peer and the client's link to it, in one. `refuse` and `refuse_once` map requests to refusals."""

    def __init__(self, *spans: Span, layer_ms: float = 1.0, free_weight_bytes: int = 0) -> None:
        self.identity = Identity.generate()
        self.peer_id = self.identity.peer_id
        self.closed_because: str | None = None
        self.unheard_s = 0.0
        self.rtt_ms: float | None = None
        self.reachable = True
        self.refuse: dict[str, pb.Refusal] = {}
        self.refuse_once: dict[str, pb.Refusal] = {}
        self.silent: set[str] = set()
        """Requests that are taken and never answered: the link says so at once, or waits in `hang`."""
        self.hang: asyncio.Event | None = None
        self.polls_until_ready = 0
        self.computing_ms = self.expected_ms = 0
        """For how long it says that its engine has been at one piece of work, and how long that should take."""
        self.waits = False
        """Whether it says that the session's rows wait there."""
        self.says_ready = True
        """Whether its answer to a reservation says that it is ready, too."""
        self.held_tokens = self.least_held_tokens = 0
        """Of a session's sequence, as it says when it is ready."""
        self.takes = True
        self.asked: list[str] = []
        """Kinds of requests that came over the link."""
        self.reserved: list[pb.SessionDescriptor] = []
        self.released: list[tuple[bytes, int]] = []
        self.renewed = 0
        self.starts: list[pb.Start] = []
        self.moves: list[pb.Move] = []
        self.histories: list[pb.History] = []
        self.handed_over = 0
        """How often it was told that its session is to go on elsewhere."""
        self.view = self._view(spans, layer_ms, free_weight_bytes)

    def announce_anew(self) -> None:
        """New facts, of a higher sequence."""
        facts = replace(self.view.facts, sequence=self.view.facts.sequence + 1)
        self.view = replace(self.view, facts=facts)

    async def request(self, request: pb.Request, timeout_s: float) -> tuple[pb.Response, memoryview]:
        await asyncio.sleep(0)
        self.asked.append(str(request.WhichOneof("body")))
        if self.asked[-1] == "reserve":
            self.handed_over += request.reserve.hand_over
            self.reserved.append(request.reserve.descriptor)
        return await self._answer(request, timeout_s)

    async def _answer(self, request: pb.Request, timeout_s: float) -> tuple[pb.Response, memoryview]:
        body = str(request.WhichOneof("body"))
        if body in self.silent:
            if self.hang is not None:
                self.hang.set()
                await asyncio.sleep(timeout_s)
            raise LinkError(self.peer_id, f"no answer to {body}")
        if body in self.refuse_once:
            return pb.Response(refusal=self.refuse_once.pop(body)), memoryview(b"")
        if body in self.refuse:
            return pb.Response(refusal=self.refuse[body]), memoryview(b"")
        if body == "reserve":
            if not self.says_ready or not request.reserve.ready_within_ms or self.polls_until_ready > 0:
                return pb.Response(reserved=pb.Reserved()), memoryview(b"")
            return await self._answer(pb.Request(await_ready=pb.AwaitReady()), timeout_s)
        self.polls_until_ready -= 1
        readiness = pb.Readiness(
            ready=self.polls_until_ready < 0,
            held_tokens=self.held_tokens,
            least_held_tokens=self.least_held_tokens,
            computing_ms=self.computing_ms,
            expected_ms=self.expected_ms,
            waits=self.waits,
        )
        return pb.Response(readiness=readiness), memoryview(b"")

    def post(self, frame: pb.Request | pb.Start | pb.Move | pb.History, **_: object) -> bool:
        if isinstance(frame, pb.History):
            self.histories.append(frame)
            return self.takes
        if isinstance(frame, pb.Move):
            self.moves.append(frame)
            return self.takes
        if isinstance(frame, pb.Start):
            if self.takes:
                self.starts.append(frame)
            return self.takes
        if frame.HasField("release"):
            self.released.append((frame.release.session, frame.release.epoch))
        if frame.HasField("await_ready"):
            self.renewed += 1
        return True

    def _view(self, spans: tuple[Span, ...], layer_ms: float, free_weight_bytes: int) -> PeerView:
        facts = replace(
            facts_of(self.identity),
            span_limit=None,
            layer_latencies=(LayerLatency(1, layer_ms),),
            model=replace(facts_of(self.identity).model, layers=SPEC.layers),
        )
        state = replace(
            state_of(self.identity), spans=spans, free_weight_bytes=free_weight_bytes, sessions=0, queued=0
        )
        return PeerView(facts, state, 0.0, sign_facts(facts, self.identity))


class FakeConnection:
    """What CircuitBuilder and ClientSession use of a SwarmConnection. It is its own `links`."""

    def __init__(self, *peers: FakePeer) -> None:
        self.peers = list(peers)
        self.links = self
        self.probes = ReachabilityProbes(self)  # type: ignore[arg-type]
        self.initial_peer_ids: frozenset[str] = frozenset()
        self.refreshes = 0
        self.sinks: dict[bytes, object] = {}
        self.newcomer: FakePeer | None = None
        """Joins at the next refresh."""

    def snapshot(self, model_hash: str | None = None) -> tuple[PeerView, ...]:
        views = tuple(peer.view for peer in self.peers)
        return tuple(view for view in views if model_hash in (None, view.facts.model.model_hash))

    def measured_rtt_ms(self) -> Mapping[tuple[str, str], float]:
        return {}

    async def refresh_soon(self, wait_s: float) -> None:
        self.refresh_now()
        await asyncio.sleep(min(wait_s, 0.005))

    def refresh_now(self) -> None:
        self.refreshes += 1
        if self.newcomer is not None:
            self.peers.append(self.newcomer)
            self.newcomer = None

    async def to(self, facts: PeerFacts) -> FakePeer:
        peer = self.find(facts.peer_id)
        if peer is None:
            raise LinkError(facts.peer_id, "nobody answers there")
        return peer

    def find(self, peer_id: str) -> FakePeer | None:
        return next((one for one in self.peers if one.peer_id == peer_id and one.reachable), None)

    def register(self, session: bytes, sink: object) -> None:
        self.sinks[session] = sink

    def unregister(self, session: bytes) -> None:
        del self.sinks[session]


def template(spec: ModelSpec = SPEC) -> pb.SessionDescriptor:
    """A session without a circuit yet."""
    return pb.SessionDescriptor(
        session=b"s" * 16, model_hash=spec.model_hash, prompt_tokens=3, capacity_tokens=10
    )
