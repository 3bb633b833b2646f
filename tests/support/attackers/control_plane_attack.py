"""What strangers do to a control plane: hosts that speak libp2p down to its bytes, and lie where they like. In trio."""

import contextlib
import os
import struct
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

import psutil
import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.messages import make_data_to_be_signed
from libp2p.security.noise.patterns import PatternXX
from libp2p.security.noise.pb import noise_pb2
from support.swarms.swarm_examples import QUICK, facts_of, state_of

from molink.dht.gossip import table
from molink.dht.gossip.table import PROTOCOL as TABLE
from molink.dht.gossip.table import pull
from molink.dht.host import listener
from molink.dht.host.compressed_stream import CompressedStream
from molink.dht.host.host import Host, Listen, open_host, peer_id_in
from molink.dht.identity.addresses import PeerAddress
from molink.dht.identity.identity import Identity
from molink.dht.membership.door import ConnectionLimits
from molink.dht.membership.membership import Membership
from molink.dht.node.joining import NetworkSettings
from molink.dht.node.network import Network, open_network

YAMUX, NOISE = "/yamux/1.0.0", "/noise"
DATA, WINDOW, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8
ED25519 = bytes((0x08, 0x01, 0x12, 0x20))


PATIENCE_S = 120.0
"""Less than what the silent have before they are cut off: who is served by then did not wait for that."""
PATIENT = replace(listener.LIMITS, proof_s=10 * PATIENCE_S, idle_s=10 * PATIENCE_S)
PATIENT_TABLE = replace(table.LIMITS, proof_s=10 * PATIENCE_S)


def nothing() -> None:
    """Nobody waits for changes."""


@contextlib.asynccontextmanager
async def victim(
    identity: Identity,
    connections: ConnectionLimits = PATIENT,
    table_callers: ConnectionLimits = PATIENT_TABLE,
    **timing: float,
) -> AsyncIterator[Network]:
    """A peer's control plane with gossip and tables, which has announced itself."""
    settings = NetworkSettings(
        identity,
        Listen("127.0.0.1", 0),
        (),
        None,
        replace(QUICK, interval_s=10.0, **timing),
        connections=connections,
        table_callers=table_callers,
    )
    membership = Membership(identity.peer_id, nothing)
    async with open_network(settings, membership) as network:
        network.publisher.announce(facts_of(identity), state_of(identity))
        with trio.fail_after(PATIENCE_S):
            while not membership.snapshot():  # noqa: ASYNC110 nothing to wait on
                await trio.sleep(0.01)
        yield network


async def table_of(host: Host, peer_id: str, *, timeout_s: float = PATIENCE_S) -> list[str]:
    """Whom a connected peer knows of, when asked in earnest."""
    membership = Membership(None, nothing)
    stream = CompressedStream(await host.open_stream(peer_id, TABLE, timeout_s=timeout_s))
    await pull(stream, membership, timeout_s=timeout_s)
    await stream.close()
    return [view.peer_id for view in membership.snapshot()]


async def newcomer_finds(address: str, *, timeout_s: float = PATIENCE_S) -> None:
    """Somebody whom nobody knows begins from the peer at this address, and learns of it."""
    async with open_host(Identity.generate(), None, None) as newcomer:
        peer_id = await newcomer.dial(address, timeout_s=timeout_s)
        assert peer_id in await table_of(newcomer, peer_id, timeout_s=timeout_s)


@contextlib.contextmanager
def memory_within(limit_bytes: int) -> Iterable[None]:
    """This process grows by less."""
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss
    yield
    grown = process.memory_info().rss - before
    assert grown < limit_bytes, f"grown by {grown / 2**20:.0f} MiB"


async def dialled(address: str) -> trio.SocketStream:
    """A TCP connection to a peer's libp2p port."""
    at = PeerAddress.parse(address)
    return await trio.open_tcp_stream(at.host, at.port)


def delimited(text: str) -> bytes:
    """A message of multistream-select."""
    message = text.encode() + b"\n"
    return bytes((len(message),)) + message


def varint(value: int) -> bytes:
    """As protobuf writes it."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


async def pour(stream: trio.abc.SendStream, size_bytes: int) -> int:
    """Sends until so many bytes are sent or the other side has had enough; returns how many went."""
    piece = bytes(2**18)
    sent = 0
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while sent < size_bytes:
            await stream.send_all(piece)
            sent += len(piece)
    return sent


@dataclass(frozen=True, slots=True)
class Claim:
    """An identity that may not be its own."""

    key: bytes
    """As libp2p writes it."""
    sign: Callable[[bytes], bytes]

    @classmethod
    def honest(cls) -> "Claim":
        """A free identity, but its own."""
        keys = create_new_key_pair(os.urandom(32))
        return cls(ED25519 + keys.public_key.to_bytes(), keys.private_key.sign)


class _Payload:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def serialize(self) -> bytes:
        return self._data


class _Pattern(PatternXX):
    """A handshake in which one says of oneself what one likes."""

    claim: Claim

    def make_handshake_payload(self, _: object = None) -> _Payload:
        signature = self.claim.sign(make_data_to_be_signed(self._validate_noise_static_key()))
        return _Payload(
            noise_pb2.NoiseHandshakePayload(
                identity_key=self.claim.key, identity_sig=signature
            ).SerializeToString()
        )


class Muxed:
    """A proven connection on which frames of yamux are written by hand."""

    def __init__(self, session: object) -> None:
        self.session = session

    async def frame(self, kind: int, flags: int, stream: int, length: int, body: bytes = b"") -> None:
        await self.session.write(struct.pack("!BBHII", 0, kind, flags, stream, length) + body)

    async def until_hung_up(self) -> None:
        """Reads and drops until the other side has closed."""
        with contextlib.suppress(Exception):
            while await self.session.read(65_536):
                pass


@contextlib.asynccontextmanager
async def proven(address: str, claim: Claim, *, muxer: str = YAMUX) -> AsyncIterator[Muxed]:
    """A connection as far as its muxer; raises whatever the other side's refusal causes."""
    raw = RawConnection(TrioTCPStream(await dialled(address)), True)
    try:
        select = MultiselectClient().select_one_of
        await select([NOISE], MultiselectCommunicator(raw), 5)
        keys = create_new_key_pair(os.urandom(32))
        pattern = _Pattern(
            ID.from_pubkey(keys.public_key), keys.private_key, create_noise_key_pair().private_key
        )
        pattern.claim = claim
        session = await pattern.handshake_outbound(raw, ID.from_base58(peer_id_in(address)))
        await select([muxer], MultiselectCommunicator(session), 5)
        yield Muxed(session)
    finally:
        raw.stream.stream.socket.close()
