"""Limits on what py-libp2p reads from strangers: negotiation, identities, and multiplexed streams.

Its own reads take any length up to 2**64, its yamux only logs who sends more than its window holds, and its Noise takes
RSA keys of any size. What is changed here holds for one host, but for the length of negotiation messages.
"""

import weakref
from collections.abc import Awaitable, Callable

import trio
from libp2p.abc import IMuxedConn, INetworkService, IRawConnection, ISecureConn
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.io.abc import Reader
from libp2p.peer.id import ID
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.security.noise.patterns import IPattern, PatternXX
from libp2p.security.noise.pb import noise_pb2
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable
from libp2p.stream_muxer.yamux.yamux import (
    DEFAULT_WINDOW_SIZE,
    MAX_MESSAGE_SIZE,
    PROTOCOL_ID,
    Yamux,
    YamuxStream,
)
from libp2p.utils.varint import ParseError, read_varint_prefixed_bytes_limited

from molink.dht.identity.identity import PUBLIC_KEY_BYTES, is_sound

YAMUX = PROTOCOL_ID
MAX_NEGOTIATION_BYTES = 1024
MAX_STREAMS = 8
"""That one connection's other side has opened and that are not over."""
_MAX_ENTRIES = 64
"""Streams with what is left of those that are over."""
_MAX_UNREAD_BYTES = 4 * DEFAULT_WINDOW_SIZE
"""On one connection."""
_UNREAD_AT_LEISURE_BYTES = 64 * 1024
_MAX_UNREAD_OF_ALL_BYTES = 32 * 1024 * 1024
_ED25519_KEY = bytes((0x08, 0x01, 0x12, PUBLIC_KEY_BYTES))


def limit_negotiation() -> None:
    """Messages of multistream-select have at most 1 KiB from here on, in the whole process."""
    multiselect_communicator.read_delim = _read_delim


async def _read_delim(reader: Reader) -> bytes:
    message: bytes = await read_varint_prefixed_bytes_limited(reader, MAX_NEGOTIATION_BYTES)
    if message[-1:] != b"\n":
        raise ParseError("a negotiation's message ends in a newline")
    return message[:-1]


class SoundNoise(NoiseTransport):  # type: ignore[misc]
    """Noise between Ed25519 identities that somebody can hold; other keys are refused before they are computed with."""

    def __init__(self, key_pair: KeyPair, turn: Callable[[], Awaitable[None]]) -> None:
        """`turn`: waits until a handshake with whoever has begun one may be computed."""
        super().__init__(key_pair, create_noise_key_pair().private_key)
        self._turn = turn

    async def secure_inbound(self, conn: IRawConnection) -> ISecureConn:
        read = conn.read

        async def first_read(n: int | None = None) -> bytes:
            data: bytes = await read(n)
            del conn.read
            await self._turn()
            return data

        conn.read = first_read
        return await super().secure_inbound(conn)

    def get_pattern(self) -> IPattern:
        return _SoundPattern(self.local_peer, self.libp2p_privkey, self.noise_privkey)


class _SoundPattern(PatternXX):  # type: ignore[misc]
    def create_noise_state(self, prologue: bytes | None = None) -> object:
        state = super().create_noise_state(prologue)
        handshake = state.read_message

        def read_message(data: bytes) -> bytearray:
            payload: bytearray = handshake(data)
            if payload:
                _require_sound_identity(bytes(payload))
            return payload

        state.read_message = read_message
        return state


def _require_sound_identity(payload: bytes) -> None:
    key = noise_pb2.NoiseHandshakePayload.FromString(payload).identity_key
    if not key.startswith(_ED25519_KEY) or not is_sound(key[len(_ED25519_KEY) :]):
        raise ValueError("the other side's identity is no Ed25519 key that somebody can hold")


class _Streams(dict[int, YamuxStream]):
    """The streams of one connection. What would be too many ends the connection."""

    def __setitem__(self, stream_id: int, stream: YamuxStream) -> None:
        if not stream.is_initiator:
            opened = sum(not other.is_initiator and not other.closed for other in self.values())
            if opened >= MAX_STREAMS or len(self) >= _MAX_ENTRIES:
                raise ConnectionAbortedError("too many streams on one connection")
        stream._effective_rtt = _no_round_trip  # noqa: SLF001 its window does not grow then
        super().__setitem__(stream_id, stream)


def _no_round_trip() -> float:
    return 0.0


class BoundedYamux(Yamux):  # type: ignore[misc]
    """Yamux whose windows stay at 256 KiB, and which hangs up on who exceeds them."""

    def __init__(
        self,
        secured_conn: ISecureConn,
        peer_id: ID,
        connections: "weakref.WeakSet[BoundedYamux]",
    ) -> None:
        super().__init__(secured_conn, peer_id, is_initiator=secured_conn.is_initiator, on_close=_nothing)
        self.streams = _Streams()
        self.opened_at = trio.current_time()
        self._connections = connections
        connections.add(self)

    @property
    def unread_bytes(self) -> int:
        """Bytes that have arrived and nobody has read."""
        return sum(map(len, self.stream_buffers.values()))

    async def _read_data_body(self, length: int) -> bytes:
        unread = self.unread_bytes + length
        if length > MAX_MESSAGE_SIZE or unread > _MAX_UNREAD_BYTES:
            await self._hang_up()
        if unread > _UNREAD_AT_LEISURE_BYTES and self._too_much_of_all(length):
            most = max(self._connections, key=lambda connection: connection.unread_bytes)
            await (self._hang_up() if most is self else most.give_up())
        body: bytes = await super()._read_data_body(length)
        return body

    def _too_much_of_all(self, length: int) -> bool:
        unread = sum(connection.unread_bytes for connection in self._connections)
        return unread + length > _MAX_UNREAD_OF_ALL_BYTES

    async def give_up(self) -> None:
        """Ends the connection at once; what nobody has read is lost."""
        await self._cleanup_on_error()

    async def _hang_up(self) -> None:
        await self.give_up()
        raise MuxedConnUnavailable("more has been sent than may wait to be read")


async def _nothing() -> None:
    """Until the connection is registered, nobody waits for its end."""


def limit_streams(network: INetworkService) -> None:
    """Connections of this host are multiplexed by `BoundedYamux`, and by nothing else."""
    muxers = network.upgrader.muxer_multistream
    connections: weakref.WeakSet[BoundedYamux] = weakref.WeakSet()

    async def new_connection(conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        protocol, _ = await muxers._selector.select(conn, conn.is_initiator, muxers.negotiate_timeout)  # noqa: SLF001
        return muxers._annotate_connection(BoundedYamux(conn, peer_id, connections), conn, protocol)  # noqa: SLF001

    muxers.new_conn = new_connection
