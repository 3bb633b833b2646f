"""Dialling: a TLS connection to a peer's pinned certificate, on which this end then proves who it is.

Addresses are what strangers announce. Those of one peer are tried side by side, a little apart, and each only where the
swarm is (`dht/identity/dialable.py`); one that many claim is dialled once for all of them (`address_book.py`). Why a
dial failed is told in the same words whatever happened, so that nobody learns from them what listens in this machine's
network.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import grpc
import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from molink.dht.identity.dialable import ANYWHERE, Ranges, dialled_as
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.records import PeerFacts, RelayAt
from molink.peer.wire.link.address_book import AddressBook, DialFailure
from molink.peer.wire.link.certificate import server_name
from molink.peer.wire.link.dialled_connection import (
    DIAL_TIMEOUT_S,
    FAILS,
    UNREACHED,
    DialledConnection,
    GrpcStream,
    Knock,
    ProofTurn,
    dial_error,
    read,
)
from molink.peer.wire.link.handshake import HandshakeRefused, prove
from molink.peer.wire.link.ladder import (
    ConnectedT,
    Ladder,
    Rung,
    abandon_dials,
    certificate_at,
    first_connected,
)
from molink.peer.wire.link.link import LinkError, Resumed
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError, decode, encode, expect
from molink.peer.wire.protocol.packets import MAX_PACKET_BYTES
from molink.peer.wire.reach.packets import RelayUnreachable
from molink.peer.wire.reach.ways import LocalTarget, Relayed, Way
from molink.shards.backoff import Backoff

LINK_METHOD = "/molink.Peer/Link"
MOST_ADDRESSES = 8
"""Of one peer that are dialled."""
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
        folder: Path | None = None,
        dial_s: float = DIAL_TIMEOUT_S,
    ) -> None:
        """`folder`: where the sockets of ways that are not direct are made; by default a new one for each. `dial_s`:
        for a challenge, and then again for the proof."""
        self._dial_s = dial_s
        self._identity = identity
        self._swarm_key = swarm_key
        self._is_client = is_client
        self._proxied = http_proxy is not None
        self._options = [*CHANNEL_OPTIONS, *_proxy_options(http_proxy)]
        self._book = AddressBook()
        self.ladder = Ladder(identity, swarm_key, folder)
        self._at: dict[str, asyncio.Lock] = {}
        """Held while an address is dialled."""
        self.ranges = own_ranges
        """Where the swarm is: announced addresses of other ranges are not dialled."""
        self.preferred_relays: Callable[[PeerFacts], tuple[RelayAt, ...]] = lambda facts: facts.relays
        """The relays of a peer in the order in which they are tried."""
        self.is_member: Callable[[str], bool] = lambda _: True
        """Whether a peer is in the swarm, as far as is known. Relays that are not are tried last: who stays at others
        by now need not have said so yet."""

    async def dial(self, facts: PeerFacts, link_id: bytes) -> DialledConnection:
        """Dials a proven connection for a new link.

        Raises:
            LinkError: nobody answers at any of the peer's addresses, or the one who does is not that peer.
        """
        return (await self._dial(facts, pb.Proof(link_id=link_id))).connection  # type: ignore[return-value]

    async def redial(self, facts: PeerFacts, link_id: bytes, received: int) -> Resumed:
        """Another connection for a link whose connection broke; tries a few times. One at a time gives its proof.

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

    async def knock(self, facts: PeerFacts) -> Knock:
        """A connection over whichever way answers first, on which only this end's proof is missing.

        Raises:
            LinkError: none answers, or what does is not that peer.
        """
        pinned = _pinned(facts)

        async def climb(rung: Rung) -> Knock:
            if rung.way is not None:
                return await self.knock_over(facts, rung.way)
            try:
                return await self._knock(facts, rung.address, pinned, "direct", "")
            except FAILS as error:
                raise dial_error(facts.peer_id, error) from error

        return await self._first(facts, climb)

    async def _dial(self, facts: PeerFacts, asked: pb.Proof) -> Resumed:
        """Over whichever way the peer answers first."""
        pinned, turn = _pinned(facts), ProofTurn()

        async def climb(rung: Rung) -> Resumed:
            knock, peer_id = await self._climb(facts, rung, pinned)
            # the other end has a link go on over the latest proof's connection, and begin over the first one's
            resumed = await (turn.finish(knock, asked) if asked.resumes else knock.finish(asked))
            if peer_id:
                self._book.record_proof(rung.address, peer_id)
            return resumed

        return await self._first(facts, climb)

    async def _first(
        self, facts: PeerFacts, climb: Callable[[Rung], Coroutine[object, object, ConnectedT]]
    ) -> ConnectedT:
        """What the first rung gives that can be climbed. Raises LinkError."""
        rungs = await self._permitted(facts)
        dials: list[asyncio.Task[ConnectedT]] = []
        won: ConnectedT | None = None
        try:
            for rung, later in zip(rungs, (*rungs[1:], None), strict=True):
                dials.append(asyncio.create_task(climb(rung)))
                timeout_s = None if later is None else later.start_s - rung.start_s
                won = await first_connected(dials, timeout_s)
                if won is not None:
                    return won
        finally:
            await abandon_dials(dials, won)
        failures = [failure for dial in dials if isinstance(failure := dial.exception(), LinkError)]
        said = next((failure.reason for failure in failures if failure.reason != UNREACHED), UNREACHED)
        raise LinkError(facts.peer_id, said, final=all(failure.final for failure in failures))

    async def _permitted(self, facts: PeerFacts) -> tuple[Rung, ...]:
        """The rungs to that peer: its addresses, and its relays, where they may be dialled from here.

        Raises:
            LinkError: there is none.
        """
        relays = () if self._proxied else self.preferred_relays(facts)
        if not facts.grpc_addresses and not relays:
            raise LinkError(facts.peer_id, "it announces no address that can be dialled")
        addresses = facts.grpc_addresses[:MOST_ADDRESSES]
        if self.ranges != ANYWHERE and not self._proxied:
            addresses = (await self._within(addresses))[:MOST_ADDRESSES]
        ranges = self.ranges
        found = await asyncio.gather(*(dialled_as(relay.address, ranges) for relay in relays))
        places = [
            RelayAt(relay.peer_id, at[0])
            for relay, at in zip(relays, found, strict=True)
            if at and relay.peer_id not in (facts.peer_id, self._identity.peer_id)
        ]
        places.sort(key=lambda relay: not self.is_member(relay.peer_id))
        now_s = asyncio.get_running_loop().time()
        stays_here = any(relay.peer_id == self._identity.peer_id for relay in facts.relays)
        rungs = self.ladder.rungs(facts.peer_id, addresses, places, now_s=now_s, stays_here=stays_here)
        if not rungs:
            raise LinkError(facts.peer_id, UNREACHED)
        return rungs

    async def _within(self, addresses: Sequence[str]) -> tuple[str, ...]:
        """The IP addresses in the swarm's own ranges that these stand for."""
        found = await asyncio.gather(*(dialled_as(address, self.ranges) for address in addresses))
        return tuple(dict.fromkeys(address for known in found for address in known))

    async def _climb(self, facts: PeerFacts, rung: Rung, pinned: bytes) -> tuple[Knock, str]:
        """One rung: the peer's address, or a way to it over a relay. Also whom a proof shows to be at the rung's
        address; empty: nobody."""
        if rung.way is not None and rung.relay is None:
            return await self.knock_over(facts, rung.way), ""
        if rung.way is None or rung.relay is None:
            return await self._knock_once(facts, rung.address, pinned), facts.peer_id
        clock = asyncio.get_running_loop().time
        relay_id = rung.relay.peer_id
        if self._book.why_not(rung.address, relay_id, b"", clock()) is not None:
            raise LinkError(facts.peer_id, UNREACHED)
        try:
            return await self.knock_over(facts, rung.way), relay_id
        except LinkError as error:
            if isinstance(error.__cause__, RelayUnreachable):
                # that of nobody in particular, so that all who name it wait
                self._book.record_failure(rung.address, DialFailure(clock(), ""))
            raise

    async def knock_over(self, facts: PeerFacts, way: Way) -> Knock:
        """A connection over a way that is not direct, on which only this end's proof is missing.

        Raises:
            LinkError: the way does not open, or at its end is another peer.
        """
        try:
            opened = await way.open()
        except OSError as error:
            _log.debug("%s %s failed: %s", facts.peer_id, way.name, error)
            raise LinkError(facts.peer_id, UNREACHED) from error
        target = self.ladder.target()
        try:
            address = await target.open(opened.connection)
            knock = await self._knock(facts, address, _pinned(facts), way.name, opened.host)
            knock.connection.gone.add_done_callback(lambda _: self._end(way, target))
            return knock
        except (*FAILS, OSError) as error:
            raise dial_error(facts.peer_id, error) from error
        finally:
            target.close()

    def _end(self, way: Way, target: LocalTarget) -> None:
        target.end()
        if isinstance(way, Relayed):
            self.ladder.record_end(way.relay, asyncio.get_running_loop().time())

    async def _knock_once(self, facts: PeerFacts, address: str, pinned: bytes) -> Knock:
        """One dial at a time to an address, and none if it is known that the peer is not there."""
        lock = self._at.setdefault(address, asyncio.Lock())
        clock = asyncio.get_running_loop().time
        try:
            async with lock:
                why_not = self._book.why_not(address, facts.peer_id, facts.certificate, clock())
                if why_not is not None:
                    raise LinkError(facts.peer_id, why_not)
                try:
                    return await self._knock(facts, address, pinned, "direct", "")
                except FAILS as error:
                    await self._learn(facts, address, error)
                    raise dial_error(facts.peer_id, error) from error
        finally:
            if not lock.locked():
                self._at.pop(address, None)

    async def _knock(self, facts: PeerFacts, target: str, pinned: bytes, way: str, host: str) -> Knock:
        """Raises what is in FAILS."""
        name = server_name(facts.peer_id)
        channel = grpc.aio.secure_channel(
            target,
            grpc.ssl_channel_credentials(root_certificates=pinned),
            options=[*self._options, ("grpc.ssl_target_name_override", name)],
        )
        connection = DialledConnection(channel.stream_stream(LINK_METHOD)(), channel, way, host)
        clock = asyncio.get_running_loop().time
        began_s = clock()
        try:
            async with asyncio.timeout(self._dial_s):
                question = expect(decode(await read(connection.stream)), pb.Challenge)
        except BaseException:
            await connection.close()
            raise
        return Knock(connection, facts, question, self._prove, clock() - began_s, self._dial_s)

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
                certificate = await certificate_at(address)
        at_s = asyncio.get_running_loop().time()
        self._book.record_failure(address, DialFailure(at_s, facts.peer_id, certificate))

    async def _prove(
        self, call: GrpcStream, facts: PeerFacts, question: pb.Challenge, asked: pb.Proof
    ) -> pb.Welcome:
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
        welcome = expect(decode(await read(call)), pb.Welcome)
        if welcome.peer_id != facts.peer_id:
            raise HandshakeRefused(f"{welcome.peer_id} answered in its place")
        if welcome.resumed != asked.resumes:
            raise HandshakeRefused("it does not know this link any more")
        return welcome


def _pinned(facts: PeerFacts) -> bytes:
    """The certificate to be found. Raises LinkError: signed or not, what a peer announces need not be one."""
    try:
        return x509.load_der_x509_certificate(facts.certificate).public_bytes(Encoding.PEM)
    except ValueError as error:
        raise LinkError(facts.peer_id, "what it announces is not a certificate") from error


def _proxy_options(http_proxy: str | None) -> Sequence[tuple[str, str | int]]:
    """Without a proxy of ours, those that the environment names for the web are not used either."""
    if http_proxy is None:
        return [("grpc.enable_http_proxy", 0)]
    return [("grpc.enable_http_proxy", 1), ("grpc.http_proxy", http_proxy)]
