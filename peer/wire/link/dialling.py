"""Dialling: a TLS connection to a peer's pinned certificate, on which this end then proves who it is.

Addresses are what strangers announce. Those of one peer are tried side by side, a little apart, and each only where the
swarm is (`dht/identity/dialable.py`); one that many claim is dialled once for all of them (`address_book.py`). Why a
dial failed is told in the same words whatever happened, so that nobody learns from them what listens in this machine's
network.
"""

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import Protocol

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from molink.dht.identity.dialable import ANYWHERE, Ranges, dialled_as
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import PeerFacts
from molink.peer.wire.link.address_book import AddressBook, DialFailure
from molink.peer.wire.link.certificate import server_name
from molink.peer.wire.link.handshake import HandshakeRefused, prove
from molink.peer.wire.link.link import LinkError, Resumed
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError, decode, encode, expect
from molink.peer.wire.protocol.packets import MAX_PACKET_BYTES
from molink.shards.backoff import Backoff

LINK_METHOD = "/molink.Peer/Link"
DIAL_TIMEOUT_S = 5.0
STAGGER_S = 0.25
"""Between the dials of one peer's addresses (RFC 8305, section 5)."""
MOST_ADDRESSES = 8
"""Of one peer that are dialled."""
LOOK_TIMEOUT_S = 2.0
"""For a look at the certificate of who answers in a peer's place."""
UNREACHED = "it cannot be reached"
_ANSWERS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED)
"""What the peer itself says when it takes no link."""
REDIALS = 12
REDIAL_BACKOFF = Backoff(first_s=0.05, longest_s=0.2)
"""Before each try to resume a link whose connection broke: what breaks connections may break the next few as well."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_PACKET_BYTES),
    ("grpc.max_send_message_length", MAX_PACKET_BYTES),
    # or a failed dial's back-off would delay the next one to the same address
    ("grpc.use_local_subchannel_pool", 1),
)

_log = logging.getLogger(__name__)


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

    def __init__(self, call: GrpcStream, channel: grpc.aio.Channel) -> None:
        self.stream = call
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._channel = channel

    def lost(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)

    async def close(self) -> None:
        self.lost()
        self.stream.cancel()
        await self._channel.close()


class Dialler:
    """Dials peers for one identity."""

    def __init__(
        self,
        identity: Identity,
        swarm_key: SwarmKey | None,
        *,
        is_client: bool,
        http_proxy: str | None,
        own_ranges: Ranges,
    ) -> None:
        self._identity = identity
        self._swarm_key = swarm_key
        self._is_client = is_client
        self._proxied = http_proxy is not None
        self._options = [*CHANNEL_OPTIONS, *_proxy_options(http_proxy)]
        self._book = AddressBook()
        self._at: dict[str, asyncio.Lock] = {}
        """Held while an address is dialled."""
        self.ranges = own_ranges
        """Where the swarm is: announced addresses of other ranges are not dialled."""

    async def dial(self, facts: PeerFacts, link_id: bytes) -> DialledConnection:
        """Dials a proven connection for a new link.

        Raises:
            LinkError: nobody answers at any of the peer's addresses, or the one who does is not that peer.
        """
        return (await self._dial(facts, pb.Proof(link_id=link_id))).connection  # type: ignore[return-value]

    async def redial(self, facts: PeerFacts, link_id: bytes, received: int) -> Resumed:
        """Another connection for a link whose connection broke; tries a few times.

        Raises:
            LinkError: nobody is there, or the other end does not know the link.
        """
        asked = pb.Proof(link_id=link_id, resumes=True, received=received)
        for failures in range(REDIALS):
            await asyncio.sleep(REDIAL_BACKOFF.after(failures) if failures else 0.0)
            try:
                return await self._dial(facts, asked)
            except LinkError as error:
                if error.final:
                    raise
                last = error
        raise last

    async def _dial(self, facts: PeerFacts, asked: pb.Proof) -> Resumed:
        """Over whichever of the peer's addresses it proves itself first."""
        addresses = await self._permitted(facts)
        try:
            pinned = x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
        except ValueError as error:  # signed or not, what a peer announces need not be a certificate
            raise LinkError(facts.peer_id, "what it announces is not a certificate") from error
        dials: list[asyncio.Task[Resumed]] = []
        won: Resumed | None = None
        try:
            for address in addresses:
                dials.append(asyncio.create_task(self._dial_once(facts, address, pinned, asked)))
                timeout_s = STAGGER_S if len(dials) < len(addresses) else None
                won = await _first(dials, timeout_s)
                if won is not None:
                    return won
        finally:
            await _abandon(dials, won)
        failures = [failure for dial in dials if isinstance(failure := dial.exception(), LinkError)]
        said = next((failure.reason for failure in failures if failure.reason != UNREACHED), UNREACHED)
        raise LinkError(facts.peer_id, said, final=all(failure.final for failure in failures))

    async def _permitted(self, facts: PeerFacts) -> tuple[str, ...]:
        """The addresses at which that peer may be dialled from here.

        Raises:
            LinkError: there is none.
        """
        if not facts.grpc_addresses:
            raise LinkError(facts.peer_id, "it announces no address that can be dialled")
        announced = facts.grpc_addresses[:MOST_ADDRESSES]
        if self.ranges == ANYWHERE or self._proxied:
            return announced
        found = await asyncio.gather(*(dialled_as(address, self.ranges) for address in announced))
        addresses = tuple(dict.fromkeys(address for addresses in found for address in addresses))
        if not addresses:
            raise LinkError(facts.peer_id, UNREACHED)
        return addresses[:MOST_ADDRESSES]

    async def _dial_once(self, facts: PeerFacts, address: str, pinned: bytes, asked: pb.Proof) -> Resumed:
        """One dial at a time to an address, and none if it is known that the peer is not there."""
        lock = self._at.setdefault(address, asyncio.Lock())
        clock = asyncio.get_running_loop().time
        try:
            async with lock:
                why_not = self._book.why_not(address, facts.peer_id, facts.certificate, clock())
                if why_not is not None:
                    raise LinkError(facts.peer_id, why_not)
                resumed = await self._dial_address(facts, address, pinned, asked)
        finally:
            if not lock.locked():
                self._at.pop(address, None)
        self._book.record_proof(address, facts.peer_id)
        return resumed

    async def _dial_address(self, facts: PeerFacts, address: str, pinned: bytes, asked: pb.Proof) -> Resumed:
        channel = grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(root_certificates=pinned),
            options=[*self._options, ("grpc.ssl_target_name_override", server_name(facts.peer_id))],
        )
        connection = DialledConnection(channel.stream_stream(LINK_METHOD)(), channel)
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                welcome = await self._prove(connection.stream, facts, asked)
        except (
            LinkError,
            TimeoutError,
            ProtocolError,
            grpc.aio.AioRpcError,
            asyncio.InvalidStateError,
            asyncio.CancelledError,
        ) as error:
            await connection.close()
            if isinstance(error, (LinkError, asyncio.CancelledError)):
                raise
            await self._learn(facts, address, error)
            raise LinkError(facts.peer_id, _why(error), final=_is_final(error)) from error
        return Resumed(connection, welcome.received)

    async def _learn(self, facts: PeerFacts, address: str, error: Exception) -> None:
        """Notes that the peer was not found there, and if another was, whose certificate that one has."""
        if isinstance(error, ProtocolError):
            return  # it answered, with the certificate that was pinned
        _log.debug("dialling %s at %s failed: %s", facts.peer_id, address, error)
        certificate = None
        if isinstance(error, grpc.aio.AioRpcError):
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                return
            if "handshake" in (error.details() or "").lower() and not self._proxied:
                certificate = await _certificate_at(address)
        at_s = asyncio.get_running_loop().time()
        self._book.record_failure(address, DialFailure(at_s, facts.peer_id, certificate))

    async def _prove(self, call: GrpcStream, facts: PeerFacts, asked: pb.Proof) -> pb.Welcome:
        question = expect(decode(await _read(call)), pb.Challenge)
        proof = prove(
            question,
            self._identity,
            facts.certificate,
            self._swarm_key,
            link_id=asked.link_id,
            is_client=self._is_client,
        )
        proof.resumes, proof.received = asked.resumes, asked.received
        await call.write(encode(proof))
        welcome = expect(decode(await _read(call)), pb.Welcome)
        if welcome.peer_id != facts.peer_id:
            raise HandshakeRefused(f"{welcome.peer_id} answered in its place")
        if welcome.resumed != asked.resumes:
            raise HandshakeRefused("it does not know this link any more")
        return welcome


def _proxy_options(http_proxy: str | None) -> Sequence[tuple[str, str | int]]:
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


async def _first(dials: Sequence["asyncio.Task[Resumed]"], timeout_s: float | None) -> Resumed | None:
    """What the first that succeeds gives; None if all have failed, or none has succeeded within `timeout_s`."""
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    under_way = {dial for dial in dials if not dial.done()}
    while under_way:
        left_s = None if deadline is None else max(0.0, deadline - asyncio.get_running_loop().time())
        done, under_way = await asyncio.wait(under_way, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        for dial in done:
            if not dial.cancelled() and dial.exception() is None:
                return dial.result()
        if not done:
            return None
    return None


async def _abandon(dials: Sequence["asyncio.Task[Resumed]"], won: Resumed | None) -> None:
    """Ends the dials that are still under way, and closes what they opened besides the one that has won; that too if
    this is cancelled, for then nobody gets it."""
    for dial in dials:
        dial.cancel()
    try:
        await asyncio.gather(*dials, return_exceptions=True)
    except asyncio.CancelledError:
        won = None
        raise
    finally:
        for dial in dials:
            opened = _opened(dial)
            if opened is not None and opened is not won:
                await opened.connection.close()


def _opened(dial: "asyncio.Future[Resumed]") -> Resumed | None:
    """What an ended dial has opened."""
    if not dial.done() or dial.cancelled() or dial.exception() is not None:
        return None
    return dial.result()


async def _certificate_at(address: str) -> bytes | None:
    """The certificate of whoever answers there, unchecked; None if nobody does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(LOOK_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except (OSError, TimeoutError, ValueError):
        return None
    try:
        session: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return session.getpeercert(binary_form=True)
    finally:
        writer.transport.abort()


def _why(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError) and error.code() in _ANSWERS:
        return f"it refused this end: {(error.details() or '')[:200]}"
    return str(error) if isinstance(error, ProtocolError) else UNREACHED


def _is_final(error: BaseException) -> bool:
    """Whether another try would end the same: nobody listens there, or what answers is not who was meant."""
    if isinstance(error, grpc.aio.AioRpcError):
        refused = "refused" in (error.details() or "").lower()
        return refused or error.code() is grpc.StatusCode.UNAUTHENTICATED
    return isinstance(error, ProtocolError)
