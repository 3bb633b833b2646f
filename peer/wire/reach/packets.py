"""Packets between a relay and whoever uses it: a fixed prefix and a body of fixed fields, read to the byte.

What follows the last packet of a conversation belongs to somebody else's TLS, so nothing is read beyond a packet's end.

offset  size  meaning
0       1     RELAY_VERSION
1       1     type
2       2     length of the body, at most MAX_BODY_BYTES, big-endian
4       n     body: the fields of that type, in order
"""

import asyncio
import socket
import struct
from dataclasses import dataclass, fields

RELAY_VERSION = 1
MAX_BODY_BYTES = 512
NONCE_BYTES = 32
TOKEN_BYTES = 16
_PREFIX = struct.Struct("!BBH")


class RelayError(ConnectionError):
    """A relay, or who uses it, is not there, refuses, or does not keep to the protocol."""


class RelayUnreachable(RelayError):
    """Nobody answers where the relay is to be."""


class RelayHungUp(RelayError):
    """The other end has closed the connection."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """The relay's first word."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class RelayProof:
    """Who uses the relay: its key, and a signature over both nonces and both identities."""

    public_key: bytes
    nonce: bytes
    signature: bytes
    swarm_proof: bytes
    """HMAC of the same under the swarm key; empty outside private swarms."""


@dataclass(frozen=True, slots=True)
class RelayWelcome:
    """Who the relay is, and where it sees the other end's connection come from: signed too."""

    signature: bytes
    observed: str
    """host:port, an IPv6 host in brackets."""
    swarm_proof: bytes


@dataclass(frozen=True, slots=True)
class Stay:
    """This connection stays: invitations come over it."""


@dataclass(frozen=True, slots=True)
class ReachRequest:
    """Have the peer with that key, which stays here, come: to a connection that the relay joins to this one or, if
    `direct`, to the relay that the asker itself is."""

    public_key: bytes
    token: bytes
    direct: bool


@dataclass(frozen=True, slots=True)
class Invite:
    """Somebody asks for the peer that stays: it is to dial this relay, or if `direct` that of the asker, and join."""

    public_key: bytes
    token: bytes
    direct: bool


@dataclass(frozen=True, slots=True)
class Invited:
    """The peer was told to come directly; this conversation is over."""


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """The invited peer comes: this connection is to be joined to that of who asked."""

    token: bytes


@dataclass(frozen=True, slots=True)
class Joined:
    """From here on each byte goes to the other end, and each of its bytes comes."""

    host: str
    """Where the relay sees the other end."""


@dataclass(frozen=True, slots=True)
class RelayRefusal:
    """What was asked is not done; the conversation is over."""

    reason: str


@dataclass(frozen=True, slots=True)
class DialBack:
    """Dial the host that this comes from, at a port, and look for the certificate of that hash (SHA-256)."""

    port: int
    certificate_hash: bytes


@dataclass(frozen=True, slots=True)
class DialledBack:
    """Whether the certificate was found there."""

    found: bool


@dataclass(frozen=True, slots=True)
class RelayPing:
    """Is somebody there?"""


@dataclass(frozen=True, slots=True)
class RelayPong:
    """Somebody is."""


Packet = (
    Challenge
    | RelayProof
    | RelayWelcome
    | Stay
    | ReachRequest
    | Invite
    | Invited
    | JoinRequest
    | Joined
    | RelayRefusal
    | DialBack
    | DialledBack
    | RelayPing
    | RelayPong
)

_TEXT, _PORT, _FLAG, _MAYBE = -1, -2, -3, -4
"""Kinds of fields beside those of so many bytes: text after its length (1 byte), 2 bytes, 0 or 1, and 32 bytes or none
after their number (1 byte)."""
_MAYBE_BYTES = 32

_TYPES: tuple[tuple[int, type[Packet], tuple[int, ...]], ...] = (
    (1, Challenge, (NONCE_BYTES,)),
    (2, RelayProof, (32, NONCE_BYTES, 64, _MAYBE)),
    (3, RelayWelcome, (64, _TEXT, _MAYBE)),
    (4, Stay, ()),
    (5, ReachRequest, (32, TOKEN_BYTES, _FLAG)),
    (6, Invite, (32, TOKEN_BYTES, _FLAG)),
    (7, Invited, ()),
    (8, JoinRequest, (TOKEN_BYTES,)),
    (9, Joined, (_TEXT,)),
    (10, RelayRefusal, (_TEXT,)),
    (11, DialBack, (_PORT, 32)),
    (12, DialledBack, (_FLAG,)),
    (13, RelayPing, ()),
    (14, RelayPong, ()),
)
_KINDS = {packet_type: (number, kinds) for number, packet_type, kinds in _TYPES}
_BY_NUMBER = {number: (packet_type, kinds) for number, packet_type, kinds in _TYPES}


def encode_relay(packet: Packet) -> bytes:
    """Encodes one packet. Texts are cut to 255 bytes.

    Raises:
        ValueError: a field has another length than its type says.
    """
    number, kinds = _KINDS[type(packet)]
    body = b"".join(
        _encode_field(getattr(packet, field.name), kind)
        for field, kind in zip(fields(packet), kinds, strict=True)
    )
    return _PREFIX.pack(RELAY_VERSION, number, len(body)) + body


def decode_relay(data: bytes) -> Packet:
    """Decodes the packet that `data` is, to its last byte.

    Raises:
        RelayError: it is none.
    """
    if len(data) < _PREFIX.size:
        raise RelayError(f"a packet of {len(data)} bytes is shorter than its prefix")
    number, length = _parse_prefix(data[: _PREFIX.size])
    body = data[_PREFIX.size :]
    if len(body) != length:
        raise RelayError(f"a body of {len(body)} bytes is announced as one of {length}")
    packet_type, kinds = _BY_NUMBER[number]
    values: list[object] = []
    at = 0
    for kind in kinds:
        value, at = _decode_field(body, at, kind)
        values.append(value)
    if at != length:
        raise RelayError(f"{length - at} bytes follow the last field of a {packet_type.__name__}")
    return packet_type(*values)  # type: ignore[arg-type]


async def read_relay(connection: socket.socket) -> Packet:
    """Reads the next packet of a non-blocking socket, and not a byte more.

    Raises:
        RelayError: what comes is none, or the other end has hung up.
        OSError: the connection broke.
    """
    prefix = await _read_exactly(connection, _PREFIX.size)
    _, length = _parse_prefix(prefix)
    return decode_relay(prefix + await _read_exactly(connection, length))


async def write_relay(connection: socket.socket, packet: Packet) -> None:
    """Writes one packet. One at a time on a socket. Raises OSError."""
    await asyncio.get_running_loop().sock_sendall(connection, encode_relay(packet))


def _parse_prefix(prefix: bytes) -> tuple[int, int]:
    version, number, length = _PREFIX.unpack(prefix)
    if version != RELAY_VERSION:
        raise RelayError(f"version {version} of the relay protocol is not {RELAY_VERSION}")
    if number not in _BY_NUMBER:
        raise RelayError(f"unknown packet type {number}")
    if length > MAX_BODY_BYTES:
        raise RelayError(f"a body of {length} bytes is longer than {MAX_BODY_BYTES}")
    return number, length


async def _read_exactly(connection: socket.socket, count: int) -> bytes:
    loop = asyncio.get_running_loop()
    data = b""
    while len(data) < count:
        part = await loop.sock_recv(connection, count - len(data))
        if not part:
            raise RelayHungUp("the other end hung up")
        data += part
    return data


def _encode_field(value: object, kind: int) -> bytes:
    if isinstance(value, bool):
        return bytes((value,))
    if isinstance(value, int):
        return struct.pack("!H", value)
    if isinstance(value, str):
        text = value.encode()[:255].decode(errors="ignore").encode()
        return bytes((len(text),)) + text
    assert isinstance(value, bytes)  # noqa: S101 - there are no other fields
    if len(value) != kind and not (kind == _MAYBE and len(value) in (0, _MAYBE_BYTES)):
        raise ValueError(f"a field of {len(value)} bytes is not one of its type")
    return bytes((len(value),)) + value if kind == _MAYBE else value


def _decode_field(body: bytes, at: int, kind: int) -> tuple[object, int]:
    size = {_PORT: 2, _FLAG: 1}.get(kind, kind)
    if kind in (_TEXT, _MAYBE):
        if at >= len(body):
            raise RelayError("a field's length is missing")
        size, at = body[at], at + 1
    data = body[at : at + size]
    if len(data) != size:
        raise RelayError("a field is cut off")
    return _value(data, kind), at + size


def _value(data: bytes, kind: int) -> object:
    if kind == _PORT:
        return struct.unpack("!H", data)[0]
    if kind == _FLAG:
        if data[0] > 1:
            raise RelayError(f"a flag is 0 or 1, not {data[0]}")
        return data[0] == 1
    if kind == _MAYBE and len(data) not in (0, _MAYBE_BYTES):
        raise RelayError(f"a proof of {len(data)} bytes is not one of {_MAYBE_BYTES}")
    if kind != _TEXT:
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise RelayError("a text is not UTF-8") from error
    if not text.isprintable():
        raise RelayError("a text is not printable")
    return text
