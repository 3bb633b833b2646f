"""Strangers that a test sends against real peers: of the control plane in a thread of their own, of links here."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import trio
from support.links.raw_links import dialled, question_of

from molink.client.local.local_swarm import LocalPeer
from molink.dht.host.framing import FrameStream, StreamEndedError
from molink.dht.host.host import DialError, Host, open_host
from molink.dht.identity.identity import Identity
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.dialled_connection import GrpcStream
from molink.peer.wire.link.handshake import LINK_ID_BYTES, prove
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import decode, encode, expect

DEADLINE_S = 120.0


async def on_control_plane(attack: Callable[[], Awaitable[None]], within_s: float = DEADLINE_S) -> None:
    """Runs an attack that trio's hosts make, while the test's loop goes on."""

    async def bounded() -> None:
        with trio.fail_after(within_s):
            await attack()

    await asyncio.to_thread(trio.run, bounded)


@contextmanager
def until_turned_away() -> Iterator[None]:
    """What the block does ends when the other side has had enough of it."""
    try:
        yield
    except* (StreamEndedError, DialError, trio.TooSlowError):
        pass


@asynccontextmanager
async def stream_to(
    peer: LocalPeer, protocol: str, identity: Identity | None = None
) -> AsyncIterator[tuple[Host, FrameStream]]:
    """In trio: a stranger's stream to a peer."""
    async with open_host(identity or Identity.generate(), None, None) as host:
        await host.dial(peer.address, timeout_s=DEADLINE_S)
        stream = await host.open_stream(peer.peer_id, protocol, timeout_s=DEADLINE_S)
        try:
            yield host, stream
        finally:
            await stream.reset()


@asynccontextmanager
async def proven_link(
    facts: PeerFacts, identity: Identity | None = None, *, link_id: bytes = bytes(LINK_ID_BYTES)
) -> AsyncIterator[GrpcStream]:
    """A stranger's call to a peer's port that has been let in, and does nothing more by itself."""
    async with asyncio.timeout(DEADLINE_S), dialled(facts) as call:
        question = await question_of(call)
        proof = prove(
            question,
            identity or Identity.generate(),
            facts.certificate,
            None,
            link_id=link_id,
            is_client=True,
        )
        await call.write(encode(proof))
        data = await call.read()
        assert isinstance(data, bytes)
        assert expect(decode(data), pb.Welcome).peer_id == facts.peer_id
        yield call


def damaged(record: bytes, at: Sequence[int], by: bytes) -> bytes:
    """`record` with one byte changed at each of `at`."""
    changed = bytearray(record)
    for place, value in zip(at, by, strict=True):
        changed[place % len(changed)] ^= value or 1
    return bytes(changed)
