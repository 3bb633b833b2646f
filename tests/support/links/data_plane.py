"""Ends of links to test with: peers and clients on loopback sockets, and descriptors of sessions between them."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from support.deadline import DEADLINE_S
from support.swarms.swarm_examples import MODEL, facts_of

from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.announcement import sign_facts
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.acceptor import Acceptor, listen_address
from molink.peer.wire.link.certificate import Certificate, Credentials, new_certificate
from molink.peer.wire.link.link import Link
from molink.peer.wire.link.link_resources import LINK_TIMES, LinkResources, LinkTimes
from molink.peer.wire.link.links import Links
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import Frame, ProtocolError
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink
from molink.shards.spec import ModelSpec, Span

SPEC = ModelSpec(
    model_hash=MODEL.model_hash,
    content_hash=MODEL.content_hash,
    name=MODEL.name,
    architecture=MODEL.architecture,
    layers=6,
    hidden_size=8,
    vocabulary_size=384,
    context_length=1024,
    dtype="float32",
    quantization="none",
    layer_bytes=(64,) * 6,
    embed_bytes=512,
    head_bytes=512,
    kv_bytes_per_token=(32,) * 6,
    stop_token_ids=(1,),
)

PATIENT_DIALS = replace(LINK_TIMES, dial_s=DEADLINE_S)
"""Nobody who is dialled is given up because the machine is busy."""
PATIENT_LINKS = replace(PATIENT_DIALS, busy_lost_after_s=DEADLINE_S)
"""Nor is anybody who is silent for that."""
Answer = Callable[[Link, pb.Request], Awaitable[tuple[pb.Response, bytes]]]


T = TypeVar("T")
P = ParamSpec("P")


async def soon(result: Awaitable[T]) -> T:
    """The result, or TimeoutError after the tests' deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return await result


def asynchronous(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Runs a test on a loop of its own, within a deadline; it must leave no task of the product behind."""

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def whole() -> None:
            async with asyncio.timeout(DEADLINE_S):
                await test(*args, **kwargs)
            try:
                await until(lambda: not left_over())
            except TimeoutError:
                raise AssertionError(f"tasks still run: {left_over()}") from None

        asyncio.run(whole())

    return run


def left_over() -> list[str]:
    """Tasks that still run, gRPC's own aside: that of a call may stay when its channel is closed (grpc/grpc#41875)."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    return [repr(task) for task in tasks if not _is_of_grpc(task.get_coro())]


def _is_of_grpc(work: object) -> bool:
    code = getattr(work, "cr_code", None) or getattr(work, "gi_code", None)
    return code is not None and "grpc" in Path(code.co_filename).parts


async def until(holds: Callable[[], bool]) -> None:
    """Returns when `holds`, or fails at the tests' deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110 - what it waits for is the product's, which sets no event for tests
            await asyncio.sleep(0.005)


async def released(_: Link, __: pb.Request) -> tuple[pb.Response, bytes]:
    """The shortest answer."""
    return pb.Response(released=pb.Released()), b""


class Recorder:
    """A LinkHandler that keeps what comes, and answers as it is told. A Failed frame is out of place for it."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[tuple[str, Frame]] = asyncio.Queue()
        self.closed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.answer: Answer = released

    def on_frame(self, link: Link, frame: Frame) -> None:
        if isinstance(frame.header, pb.Failed):
            raise ProtocolError("a Failed is out of place here")
        self.frames.put_nowait((link.peer_id, frame))

    async def on_request(self, link: Link, request: pb.Request) -> tuple[pb.Response, bytes]:
        return await self.answer(link, request)

    def on_closed(self, link: Link, reason: str) -> None:
        self.closed.put_nowait((link.peer_id, reason))


class End:
    """A peer's data plane, or with `is_client` a client's, which nobody can dial."""

    def __init__(  # noqa: PLR0913 - what a test may say of an end, by name
        self,
        *,
        is_client: bool = False,
        swarm_key: SwarmKey | None = None,
        host: str = "127.0.0.1",
        http_proxy: str | None = None,
        members: Collection[str] = (),
        needed: bool = False,
        memory: MessageMemory | None = None,
        identity: Identity | None = None,
        proof_s: float = DEADLINE_S,
        times: LinkTimes = PATIENT_DIALS,
    ) -> None:
        """`members` are known to belong to the swarm; `needed`: sessions use every link. `identity`: somebody new,
        unless told. `proof_s`: as `Acceptor`."""
        self.identity = identity or Identity.generate()
        self.peer_id = self.identity.peer_id
        self.certificate = new_certificate(self.peer_id)
        self.handler = Recorder()
        self.links = Links(
            self.identity,
            self.handler,
            swarm_key,
            is_client=is_client,
            http_proxy=http_proxy,
            resources=LinkResources(SharedUplink(), memory or MessageMemory(), times=times),
        )
        self.facts = facts_at(self.identity, self.certificate)
        self._is_client = is_client
        self._host = host
        self._members = members
        self._needed = needed
        self._proof_s = proof_s
        self._swarm_key = swarm_key
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.links)
        if not self._is_client:
            acceptor = Acceptor(
                self._host,
                0,
                Credentials(self.peer_id, self.certificate, self._swarm_key),
                self.links,
                self.handler,
                is_member=self._members.__contains__,
                is_needed=lambda _: self._needed,
                proof_s=self._proof_s,
            )
            await self._stack.enter_async_context(acceptor)
            address = listen_address(self._host, acceptor.port)
            self.facts = facts_at(self.identity, self.certificate, address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def linked(self, peer_id: str) -> Link:
        """The link that this peer dials, once it is here: the dialler may use it a moment earlier."""
        await until(lambda: self.links.find(peer_id) is not None)
        link = self.links.find(peer_id)
        assert link is not None
        return link


def facts_at(identity: Identity, certificate: Certificate, *addresses: str) -> PeerFacts:
    """The facts of a peer that presents `certificate` at `addresses`."""
    return replace(facts_of(identity), grpc_addresses=addresses, certificate=certificate.der)


def hop_of(identity: Identity, span: Span, facts: PeerFacts | None = None) -> pb.Hop:
    """A hop of a descriptor, its facts signed."""
    sealed = sign_facts(facts if facts is not None else facts_of(identity), identity)
    return pb.Hop(
        peer_id=identity.peer_id, start=span.start, stop=span.stop, quantization="none", facts=sealed
    )


def describe(
    hops: Sequence[pb.Hop], *, session: int = 1, epoch: int = 1, spec: ModelSpec = SPEC
) -> pb.SessionDescriptor:
    """A session of 5 prompt tokens and 15 to generate."""
    return pb.SessionDescriptor(
        session=bytes([session]) * 16,
        epoch=epoch,
        model_hash=spec.model_hash,
        hops=hops,
        sampling=pb.Sampling(max_new_tokens=15, top_p=1.0, stop_token_ids=[1]),
        prompt_tokens=5,
        capacity_tokens=20,
    )
