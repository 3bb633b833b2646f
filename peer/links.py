"""All links of one process: dialled on demand, accepted from others, one in use for each remote.

Two peers that dial each other at once get two links. Both ends then use the one that the smaller peer id dialled; the
end that dialled the other closes it when nothing has travelled on it for a while.
"""

import asyncio
from types import TracebackType
from typing import Protocol, Self

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from molink.dht.certificate import server_name
from molink.dht.identity import Identity
from molink.dht.records import PeerFacts
from molink.dht.swarm_key import SwarmKey
from molink.peer.handshake import HandshakeRefused, Remote, prove
from molink.peer.link import Link, LinkError, LinkHandler
from molink.peer.protocol import molink_pb2 as pb
from molink.peer.protocol.frames import MAX_FRAME_BYTES, ProtocolError, decode, encode, expect
from molink.peer.quiet import WatchedStream

LINK_METHOD = "/molink.Peer/Link"
DIAL_TIMEOUT_S = 5.0
AT_ONCE_S = 5.0
"""Of two links that come within this time neither is older: the two ends have dialled each other."""
SPARE_QUIET_S = 60.0
"""A spare link on which nothing has travelled for so long is closed. Longer than the largest frame is on its way."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_FRAME_BYTES),
    ("grpc.max_send_message_length", MAX_FRAME_BYTES),
    (
        "grpc.use_local_subchannel_pool",
        1,
    ),  # or a failed dial's back-off would delay the next one to the same address
)


class GrpcStream(Protocol):
    """What is used of a grpc.aio call."""

    async def read(self) -> object: ...

    async def write(self, message: bytes) -> None: ...

    def cancel(self) -> bool: ...

    async def code(self) -> grpc.StatusCode: ...

    async def initial_metadata(self) -> grpc.aio.Metadata: ...

    async def trailing_metadata(self) -> grpc.aio.Metadata: ...

    async def details(self) -> str: ...


class Links:
    """Owner of this process's links. Dial with `to`, look up with `find`; accepted links come in through `accepted`."""

    # A link in use that closes is replaced by a spare, if there is one: that may be when the other end closes what it
    # takes for a spare, or when it has lost a link that seems open here.

    def __init__(
        self,
        identity: Identity,
        handler: LinkHandler,
        swarm_key: SwarmKey | None,
        *,
        is_client: bool,
        http_proxy: str | None = None,
    ) -> None:
        """`http_proxy` is the URL of a proxy that links are dialled through with CONNECT. Of the environment only
        `no_proxy` counts then: hosts that are dialled directly all the same."""
        self._identity = identity
        self._handler = handler
        self._swarm_key = swarm_key
        self._is_client = is_client
        self._dial_options = [*CHANNEL_OPTIONS, *_proxy_options(http_proxy)]
        self._links: dict[str, Link] = {}
        """In use, by peer id."""
        self._spares: list[Link] = []
        self._opened_s: dict[Link, float] = {}
        self._dialled: dict[Link, WatchedStream] = {}
        """Those that this end dialled, and closes when they are spare."""
        self._dialling: dict[str, asyncio.Task[Link]] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for link in (*self._links.values(), *self._spares):
            link.close("this end is stopping")
        for task in (*self._dialling.values(), *self._running):
            task.cancel()
        await asyncio.gather(*self._dialling.values(), *self._running, return_exceptions=True)

    def find(self, peer_id: str) -> Link | None:
        """The open link to a peer or client, if there is one."""
        link = self._links.get(peer_id)
        if link is not None and link.closed_because is None:
            return link
        return next(
            (one for one in self._spares if one.peer_id == peer_id and one.closed_because is None), None
        )

    def in_use(self, link: Link) -> bool:
        """Whether this is the link to its remote, or was until it closed just now."""
        return self._links.get(link.peer_id) is link

    def all(self) -> tuple[Link, ...]:
        """Every open link that is in use."""
        return tuple(link for link in self._links.values() if link.closed_because is None)

    async def to(self, facts: PeerFacts, timeout_s: float = DIAL_TIMEOUT_S) -> Link:
        """The link to a peer: the open one, or a new one.

        Raises:
            LinkError: nobody answers there, or the one who does is not that peer.
        """
        link = self.find(facts.peer_id)
        if link is not None:
            return link
        dialling = self._dialling.get(facts.peer_id)
        if dialling is None:
            dialling = asyncio.create_task(self._dial(facts), name=f"dial {facts.peer_id}")
            self._dialling[facts.peer_id] = dialling
            dialling.add_done_callback(lambda _: self._dialling.pop(facts.peer_id, None))
            dialling.add_done_callback(_retrieve)
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(dialling)
        except TimeoutError:
            raise LinkError(facts.peer_id, f"not reached within {timeout_s:g} s") from None

    def accepted(self, link: Link) -> None:
        """Takes in a link that the other end dialled."""
        self._take(link)

    def forget(self, link: Link) -> None:
        """The link has closed."""
        self._opened_s.pop(link, None)
        self._dialled.pop(link, None)
        if link in self._spares:
            self._spares.remove(link)
        if self.in_use(link):
            del self._links[link.peer_id]
            spare = self.find(link.peer_id)
            if spare is not None:
                self._spares.remove(spare)
                self._links[spare.peer_id] = spare

    def _take(self, link: Link) -> None:
        """Puts a new link to use, or aside."""
        self._opened_s[link] = asyncio.get_running_loop().time()
        standing = self.find(link.peer_id)
        if standing is not None and self._prefers(standing, link):
            self._spares.append(link)
            return
        if standing is not None and standing not in self._spares:
            self._spares.append(standing)
        self._links[link.peer_id] = link

    def _prefers(self, standing: Link, new: Link) -> bool:
        """Whether the older of two open links stays in use: only if the two ends dialled each other at once, and then
        by whose peer id is smaller, which both ends know. Else the other end has lost the older link."""
        if self._opened_s[new] - self._opened_s[standing] > AT_ONCE_S:
            return False
        dialled, accepted = standing in self._dialled, standing not in self._dialled
        smaller_here = self._identity.peer_id < new.peer_id
        if (new in self._dialled) == dialled:
            return False
        return dialled if smaller_here else accepted

    async def _dial(self, facts: PeerFacts) -> Link:
        if not facts.grpc_addresses:
            raise LinkError(facts.peer_id, "it announces no address that can be dialled")
        reasons: list[str] = []
        for address in facts.grpc_addresses:
            try:
                return await self._dial_address(facts, address)
            except LinkError as error:
                reasons.append(f"{address}: {error.reason}")
        raise LinkError(facts.peer_id, "; ".join(reasons))

    async def _dial_address(self, facts: PeerFacts, address: str) -> Link:
        try:
            pinned = x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
        except ValueError as error:  # signed or not, what a peer announces need not be a certificate
            raise LinkError(facts.peer_id, "what it announces is not a certificate") from error
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(root_certificates=pinned),
            options=[*self._dial_options, ("grpc.ssl_target_name_override", server_name(facts.peer_id))],
        )
        call: GrpcStream = channel.stream_stream(LINK_METHOD)()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                await self._prove(call, facts)
        except (
            LinkError,
            TimeoutError,
            ProtocolError,
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
            asyncio.CancelledError,
        ) as error:
            call.cancel()
            await channel.close()
            if isinstance(error, (LinkError, asyncio.CancelledError)):
                raise
            raise LinkError(facts.peer_id, _why(error)) from error
        stream = WatchedStream(call)
        link = Link(stream, Remote(facts.peer_id, is_client=False), self._handler)
        self._dialled[link] = stream
        self._take(link)
        task = asyncio.create_task(self._run(link, call, channel), name=f"link {facts.peer_id}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return link

    async def _prove(self, call: GrpcStream, facts: PeerFacts) -> None:
        question = expect(decode(await _read(call)), pb.Challenge)
        proof = prove(question, self._identity, facts.certificate, self._swarm_key, is_client=self._is_client)
        await call.write(encode(proof))
        welcome = expect(decode(await _read(call)), pb.Welcome)
        if welcome.peer_id != facts.peer_id:
            raise HandshakeRefused(f"{welcome.peer_id} answered in its place")

    async def _run(self, link: Link, call: GrpcStream, channel: grpc.aio.Channel) -> None:
        retiring = asyncio.create_task(self._retire(link), name=f"retire {link.peer_id}")
        try:
            await link.run()
        finally:
            retiring.cancel()
            self.forget(link)
            call.cancel()
            await channel.close()

    async def _retire(self, link: Link) -> None:
        """Closes the link, which this end dialled, once it is spare and of no use any more."""
        while True:
            quiet_s = self._dialled[link].quiet_s if link in self._spares else 0.0
            if quiet_s >= SPARE_QUIET_S:
                link.close("another link to this peer is in use")
                return
            await asyncio.sleep(SPARE_QUIET_S - quiet_s)


def _proxy_options(http_proxy: str | None) -> list[tuple[str, str | int]]:
    """Without a proxy of ours, those that the environment names for the web are not used either."""
    if http_proxy is None:
        return [("grpc.enable_http_proxy", 0)]
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", http_proxy)]


async def _read(call: GrpcStream) -> bytes:
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
    if isinstance(error, TimeoutError):
        return f"no answer within {DIAL_TIMEOUT_S:g} s"
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name.lower()}: {error.details()}"
    return str(error)


def _retrieve(task: "asyncio.Task[Link]") -> None:
    """Marks a failed dial's error as seen, for when all who waited for it have given up."""
    if not task.cancelled():
        task.exception()
