"""Peers that lie: announced to a real swarm like any other, with a data plane that does what a test says."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from types import TracebackType
from typing import Self

from support.attackers.bystander import RECOVERY_S
from support.links.data_plane import Recorder, until

from molink.client.api.swarm import AsyncSwarm
from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.node.network import Network
from molink.dht.records.announcement import sign_facts, sign_state
from molink.dht.records.records import LayerLatency, LinkMeasurement, PeerView
from molink.peer.wire.link.acceptor import Acceptor
from molink.peer.wire.link.certificate import Credentials, new_certificate
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame
from molink.shards.spec import Span

AnswerStart = Callable[["Liar", Link, pb.Start], Awaitable[None]]
AnswerRequest = Callable[[pb.Request], Awaitable[tuple[pb.Response, bytes]]]


async def grants(request: pb.Request) -> tuple[pb.Response, bytes]:
    """Every lease, at once."""
    if request.HasField("reserve"):
        return pb.Response(reserved=pb.Reserved()), b""
    if request.HasField("await_ready"):
        return pb.Response(readiness=pb.Readiness(ready=True)), b""
    return pb.Response(released=pb.Released()), b""


async def says_nothing(_: "Liar", __: Link, ___: pb.Start) -> None:
    """Takes the prompt, and that is all."""


class Liar(Recorder):
    """A peer with an identity and a data plane, open between `__aenter__` and `__aexit__`."""

    def __init__(self, start: AnswerStart = says_nothing, request: AnswerRequest = grants) -> None:
        super().__init__()
        self.identity = Identity.generate()
        self.peer_id = self.identity.peer_id
        self.certificate = new_certificate(self.peer_id)
        self.address = ""
        self.asked = 0
        """Requests that came."""
        self.starts: list[pb.Start] = []
        self.descriptors: dict[bytes, pb.SessionDescriptor] = {}
        self._start = start
        self._request = request
        self._tasks: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        links = await self._stack.enter_async_context(Links(self.identity, self, None, is_client=False))
        acceptor = Acceptor("127.0.0.1", 0, Credentials(self.peer_id, self.certificate), links, self)
        await self._stack.enter_async_context(acceptor)
        self.address = f"127.0.0.1:{acceptor.port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    def on_frame(self, link: Link, frame: Frame) -> None:
        if isinstance(frame.header, pb.Start):
            self.starts.append(frame.header)
            task = asyncio.create_task(self._start(self, link, frame.header))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def on_request(self, _: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        self.asked += 1
        if request.HasField("reserve"):
            self.descriptors[request.reserve.descriptor.session] = request.reserve.descriptor
        return await self._request(request)


def claim(
    like: PeerView,
    identity: Identity,
    address: str,
    span: Span,
    *,
    certificate: bytes = b"",
    layer_ms: float = 0.001,
    near: Iterable[str] = (),
) -> tuple[bytes, bytes, bytes]:
    """Facts, state and goodbye of a peer that says that it serves a span at that address, faster than anybody, and that
    it is next to those that are `near` and to those that `like` has measured."""
    neighbours = dict.fromkeys((*near, *(one.peer_id for one in like.facts.links)))
    sequence = round(time.time() * 1000)
    host, _, port = address.rpartition(":")
    facts = replace(
        like.facts,
        peer_id=identity.peer_id,
        public_key=identity.public_key,
        sequence=sequence,
        ttl_s=600,
        name="liar",
        addresses=(f"/ip4/{host}/tcp/{port}/p2p/{identity.peer_id}",),
        grpc_addresses=(address,),
        certificate=certificate or new_certificate(identity.peer_id).der,
        span_limit=span,
        layer_latencies=(LayerLatency(1, layer_ms),),
        embed_ms=layer_ms,
        head_ms=layer_ms,
        step_ms=0.0,
        links=tuple(LinkMeasurement(peer_id, 0.01) for peer_id in neighbours),
    )
    state = replace(
        like.state,
        peer_id=identity.peer_id,
        sequence=sequence + 1,
        facts_sequence=sequence,
        ttl_s=300,
        spans=(span,),
        loading=(),
        sessions=0,
        queued=0,
    )
    gone = replace(state, sequence=sequence + 2, facts_sequence=0, ttl_s=0, spans=())
    return sign_facts(facts, identity), sign_state(state, identity), sign_state(gone, identity)


@asynccontextmanager
async def announced(
    addresses: Sequence[str], claims: Sequence[tuple[bytes, bytes, bytes]]
) -> AsyncIterator[Discovery]:
    """The claims, told to the swarm over one neighbour's links, and taken back at the end."""
    async with Discovery(Identity.generate(), initial_peers=addresses) as liar:
        await until(lambda: liar.stats.neighbours > 0)

        async def tell(network: Network, *records: bytes) -> None:
            for record in records:
                network.gossip.broadcast(record)
            await network.gossip.drained()

        told = [record for facts, state, _ in claims for record in (facts, state)]
        await liar.in_network(lambda network: tell(network, *told), timeout_s=RECOVERY_S)
        try:
            yield liar
        finally:
            await liar.in_network(
                lambda network: tell(network, *(gone for _, _, gone in claims)), timeout_s=RECOVERY_S
            )


async def until_known(client: AsyncSwarm, peer_ids: Iterable[str]) -> None:
    """The client has heard of these peers."""
    connection = client.connection
    wanted = set(peer_ids)
    async with asyncio.timeout(RECOVERY_S):
        while not wanted <= {view.peer_id for view in connection.snapshot()}:
            await connection.refresh_soon(0.2)


def view_of(client: AsyncSwarm, name: str) -> PeerView:
    connection = client.connection
    return next(view for view in connection.snapshot() if view.facts.name == name)
