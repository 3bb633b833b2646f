"""Dialled connection: a gRPC call of this end, with the channel that is its own and the way that it goes.

It begins with a knock: the other end's challenge has come, and this end's proof makes it a link's. Of connections that
are to resume one link, one at a time gives its proof: the other end leaves the present connection for the latest proof,
so a second one on its way would take the link from the first, and that again from the second as this end dials anew.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.link import LinkError, Resumed
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError

DIAL_TIMEOUT_S = 5.0
"""For a challenge, and then again for the proof."""
LEAST_PROOF_S = 0.5
"""What a proof may always take, where others wait for theirs."""
UNREACHED = "it cannot be reached"
_PROXY_REFUSED = "http proxy returned response code 502"
"""What gRPC says where the proxy in between was refused."""
FAILS = (TimeoutError, ProtocolError, grpc.aio.AioRpcError, asyncio.InvalidStateError)
"""What a dial raises when there is no proof at its end."""
_ANSWERS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""What the peer itself says when it takes no link."""


class GrpcStream(Protocol):
    """gRPC stream: what is used of a grpc.aio call."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...

    def cancel(self) -> bool: ...

    async def code(self) -> grpc.StatusCode: ...

    async def initial_metadata(self) -> grpc.aio.Metadata: ...

    async def trailing_metadata(self) -> grpc.aio.Metadata: ...

    async def details(self) -> str: ...


class DialledConnection:
    """A call of this end, with the channel that is its own."""

    def __init__(
        self, call: GrpcStream, channel: grpc.aio.Channel, way: str = "direct", host: str = ""
    ) -> None:
        """`way` is its name; `host`: where whoever opened the way sees the other end."""
        self.stream = call
        self.way = way
        self.host = host
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = channel

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self) -> None:
        self.lost()
        self.stream.cancel()
        await self._channel.close()


def way_of(connection: object) -> str:
    """The name of the way that a connection goes; empty: the other end has dialled it, and knows."""
    return connection.way if isinstance(connection, DialledConnection) else ""


Prove = Callable[[GrpcStream, PeerFacts, pb.Challenge, pb.Proof], Awaitable[pb.Welcome]]


@dataclass(frozen=True, slots=True)
class Knock:
    """A connection to a peer's pinned certificate, whose challenge has come: proof is the last step, a round trip."""

    connection: DialledConnection
    facts: PeerFacts
    question: pb.Challenge
    proving: Prove
    took_s: float
    """Until the challenge came: three round trips or more."""
    proof_s: float = DIAL_TIMEOUT_S
    """For the answer to the proof."""

    async def finish(self, asked: pb.Proof, timeout_s: float = math.inf) -> Resumed:
        """Raises LinkError; the connection is closed then."""
        try:
            async with asyncio.timeout(min(timeout_s, self.proof_s)):
                welcome = await self.proving(self.connection.stream, self.facts, self.question, asked)
        except FAILS as error:
            await self.connection.close()
            raise dial_error(self.facts.peer_id, error) from error
        except BaseException:
            await self.connection.close()
            raise
        return Resumed(self.connection, welcome.received)


class ProofTurn:
    """Turn of knocks that are to resume one link: who has it gives its proof, and passes it on where that fails."""

    def __init__(self, least_proof_s: float = LEAST_PROOF_S) -> None:
        self._turn = asyncio.Lock()
        self._least_proof_s = least_proof_s

    async def finish(self, knock: Knock, asked: pb.Proof) -> Resumed:
        """Waits for the turn, and gives the proof. Once one has succeeded, the others wait until they are cancelled.

        Raises:
            LinkError: as `Knock.finish`, or the other end has not answered in the time in which the challenge came.
        """
        try:
            await self._turn.acquire()
        except BaseException:
            await knock.connection.close()
            raise
        try:
            return await knock.finish(asked, max(self._least_proof_s, knock.took_s))
        except BaseException:
            self._turn.release()
            raise


def dial_error(peer_id: str, error: BaseException) -> LinkError:
    """What is said of a dial that failed with one of FAILS, or could not open its way."""
    return LinkError(peer_id, _why(error), final=_is_final(error))


async def read(call: GrpcStream) -> bytes:
    """The next message. Raises AioRpcError: the call has ended."""
    data = await call.read()
    if not isinstance(data, bytes):
        raise grpc.aio.AioRpcError(
            await call.code(),
            await call.initial_metadata(),
            await call.trailing_metadata(),
            await call.details(),
        )
    return data


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in _ANSWERS:
        return f"it refused this end: {(error.details() or '')[:200]}"
    return str(error) if isinstance(error, ProtocolError) else UNREACHED


def _is_final(error: BaseException) -> bool:
    """Whether another try would end the same: nobody listens there, or what answers is not who was meant."""
    if isinstance(error, grpc.aio.AioRpcError):
        details = (error.details() or "").lower()
        refused = "refused" in details or _PROXY_REFUSED in details
        return refused or error.code() is grpc.StatusCode.UNAUTHENTICATED
    return isinstance(error, ProtocolError)
