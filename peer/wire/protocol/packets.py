"""A packet: one gRPC message on a link once it is open. A fixed header, and raw bytes whose meaning the type says.

offset  size  field
0       1     PACKET_VERSION
1       1     type
2       1     traffic class (DATA), else 0
3       1     flags: none yet, 0
4       4     length: of the whole message in bytes (DATA), code (CLOSE), else 0
8       4     offset of the chunk in its message (DATA), else 0
12      8     sequence (DATA), last sequence received (ACK), number to be sent back (PING, PONG), else 0
20      8     message number (DATA, CANCEL), sender's clock in microseconds (ACK), else 0
28      8     checksum: XXH3-64 of the rest (offset 36 on), seeded with the XXH3-64 of bytes 0 to 27
36      ...   DATA: the chunk. ACK: arrivals. CLOSE: the reason, in UTF-8. Else nothing

Numbers are unsigned and big-endian. docs/PROTOCOL.md has the rules by which packets are exchanged, and test vectors.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

import xxhash

from molink.peer.wire.protocol.frames import MAX_FRAME_BYTES, ProtocolError
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.values import MAX_CHUNK_BYTES

PACKET_VERSION = 1
HEADER_BYTES = 36
MAX_PACKET_BYTES = HEADER_BYTES + MAX_CHUNK_BYTES
"""Refused by gRPC before it is allocated."""
MAX_ARRIVALS = 64
MAX_REASON_BYTES = 512

_FIELDS = struct.Struct("!BBBBIIQQ")
_ARRIVAL = struct.Struct("!II")
_CHECKSUM_BYTES = 8
_CLASSES = tuple(TrafficClass)
_LARGEST_AGE_US = 2**32 - 1


class _Type(IntEnum):
    DATA = 1
    ACK = 2
    CANCEL = 3
    CLOSE = 4
    PING = 5
    PONG = 6


class CloseCode(IntEnum):
    """Close code: why an end closes a link."""

    DONE = 0
    """It is not needed any more, or the end stops."""
    MALFORMED = 1
    """Not a packet: too short, of an unknown version or type, or with fields that its type does not have."""
    CHECKSUM = 2
    """Damaged on the way, or not by this protocol's rule."""
    TOO_LARGE = 3
    """A message longer than MAX_FRAME_BYTES, or a chunk or list longer than allowed."""
    SEQUENCE = 4
    """A chunk that is not the next one."""
    OFFSET = 5
    """A chunk that does not continue its message, or contradicts the message's earlier chunks."""
    ACKNOWLEDGEMENT = 6
    """Chunks acknowledged, or resumed from, that were never sent, or that are gone."""
    OVERLOAD = 7
    """More unfinished messages, or more bytes of them, than a link may have."""
    MESSAGE = 8
    """A whole message that is not a frame, or that is out of place."""
    SILENT = 9
    """Nothing was heard for too long."""


class PacketError(ProtocolError):
    """A packet that the protocol does not allow. The link is closed with `code`."""

    def __init__(self, code: CloseCode, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class Data(NamedTuple):
    """DATA: a chunk of a message."""

    traffic_class: TrafficClass
    message: int
    message_bytes: int
    """Of the whole message."""
    offset: int
    sequence: int
    payload: memoryview


class Ack(NamedTuple):
    """ACK: every chunk up to `sequence` has arrived."""

    sequence: int
    departed_us: int
    """When this packet left, in microseconds on its sender's clock, of any origin."""
    arrivals: tuple[tuple[int, int], ...]
    """Sequence number, and microseconds between arrival and this packet's departure; of some chunks, ascending."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """CANCEL: nothing more comes of a message that was sent in part."""

    message: int


@dataclass(frozen=True, slots=True)
class Close:
    """CLOSE: the link ends now, for good."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ping:
    """PING: to be answered at once."""

    number: int


@dataclass(frozen=True, slots=True)
class Pong:
    """PONG: the answer to the ping of that number."""

    number: int


Packet = Data | Ack | Cancel | Close | Ping | Pong


def encode_data(
    traffic_class: TrafficClass,
    message: int,
    message_bytes: int,
    offset: int,
    sequence: int,
    payload: memoryview | bytes,
) -> bytes:
    """Encodes a DATA packet; it copies `payload` once."""
    fields = _FIELDS.pack(
        PACKET_VERSION, _Type.DATA, traffic_class, 0, message_bytes, offset, sequence, message
    )
    return sealed(fields, payload)


def encode_ack(ack: Ack) -> bytes:
    """An ACK packet. Arrivals longer ago than their field can say are said as long ago as it can."""
    payload = b"".join(
        _ARRIVAL.pack(ack.sequence - sequence, min(age_us, _LARGEST_AGE_US))
        for sequence, age_us in ack.arrivals
    )
    return sealed(_FIELDS.pack(PACKET_VERSION, _Type.ACK, 0, 0, 0, 0, ack.sequence, ack.departed_us), payload)


def encode_cancel(message: int) -> bytes:
    return sealed(_FIELDS.pack(PACKET_VERSION, _Type.CANCEL, 0, 0, 0, 0, 0, message))


def encode_close(code: int, reason: str) -> bytes:
    """Encodes a CLOSE packet, its reason cut to MAX_REASON_BYTES."""
    text = reason.encode("utf-8", "replace")[:MAX_REASON_BYTES].decode("utf-8", "ignore").encode()
    return sealed(_FIELDS.pack(PACKET_VERSION, _Type.CLOSE, 0, 0, code, 0, 0, 0), text)


def encode_ping(number: int) -> bytes:
    return sealed(_FIELDS.pack(PACKET_VERSION, _Type.PING, 0, 0, 0, 0, number, 0))


def encode_pong(number: int) -> bytes:
    return sealed(_FIELDS.pack(PACKET_VERSION, _Type.PONG, 0, 0, 0, 0, number, 0))


def decode(data: bytes) -> Packet:
    """Decodes the packet in `data`; the payload of a chunk is a view of it.

    Raises:
        PacketError: it is none.
    """
    if not HEADER_BYTES <= len(data) <= MAX_PACKET_BYTES:
        code = CloseCode.MALFORMED if len(data) < HEADER_BYTES else CloseCode.TOO_LARGE
        raise PacketError(code, f"a packet has {HEADER_BYTES} to {MAX_PACKET_BYTES} bytes, not {len(data)}")
    version, kind, traffic_class, flags, length, offset, sequence, number = _FIELDS.unpack_from(data)
    if version != PACKET_VERSION or kind not in _TYPES or flags:
        raise PacketError(
            CloseCode.MALFORMED,
            f"no packet of version {PACKET_VERSION}: version {version}, type {kind}, flags {flags}",
        )
    view = memoryview(data)
    payload = view[HEADER_BYTES:]
    checksum = xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(view[: _FIELDS.size]))
    if checksum.to_bytes(_CHECKSUM_BYTES) != view[_FIELDS.size : HEADER_BYTES]:
        raise PacketError(CloseCode.CHECKSUM, "a packet's checksum is wrong")
    if kind == _Type.DATA:
        return _data(traffic_class, number, length, offset, sequence, payload)
    if traffic_class or offset:
        raise PacketError(CloseCode.MALFORMED, "a packet without a chunk has a class or an offset")
    return _control(_Type(kind), length, sequence, number, payload)


_TYPES = frozenset(_Type)


def sealed(fields: bytes, payload: memoryview | bytes = b"") -> bytes:
    """The packet of these header fields, with its checksum."""
    checksum = xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(fields))
    return b"".join((fields, checksum.to_bytes(_CHECKSUM_BYTES), payload))


def _data(
    traffic_class: int, message: int, message_bytes: int, offset: int, sequence: int, payload: memoryview
) -> Data:
    if message_bytes > MAX_FRAME_BYTES:
        raise PacketError(
            CloseCode.TOO_LARGE, f"a message of {message_bytes} bytes is over the limit of {MAX_FRAME_BYTES}"
        )
    if traffic_class >= len(_CLASSES) or not message or not sequence:
        raise PacketError(
            CloseCode.MALFORMED, f"no chunk: class {traffic_class}, message {message}, sequence {sequence}"
        )
    if not payload or offset + len(payload) > message_bytes:
        raise PacketError(
            CloseCode.OFFSET,
            f"{len(payload)} bytes at {offset} are no chunk of a message of {message_bytes} bytes",
        )
    return Data(_CLASSES[traffic_class], message, message_bytes, offset, sequence, payload)


def _control(kind: _Type, length: int, sequence: int, number: int, payload: memoryview) -> Packet:
    if kind is _Type.ACK and not length:
        return _ack(sequence, number, payload)
    if kind is _Type.CLOSE and not sequence and not number:
        if len(payload) > MAX_REASON_BYTES:
            raise PacketError(CloseCode.TOO_LARGE, f"a reason of {len(payload)} bytes is too long")
        return Close(length, bytes(payload).decode("utf-8", "replace"))
    if not payload and not length:
        if kind is _Type.CANCEL and number and not sequence:
            return Cancel(number)
        if kind is _Type.PING and not number:
            return Ping(sequence)
        if kind is _Type.PONG and not number:
            return Pong(sequence)
    raise PacketError(CloseCode.MALFORMED, f"a {kind.name} has fields that are not its own")


def _ack(sequence: int, departed_us: int, payload: memoryview) -> Ack:
    count, rest = divmod(len(payload), _ARRIVAL.size)
    if rest or count > MAX_ARRIVALS:
        raise PacketError(CloseCode.MALFORMED, f"{len(payload)} bytes are no list of arrivals")
    arrivals = tuple((sequence - before, age_us) for before, age_us in _ARRIVAL.iter_unpack(payload))
    numbers = [one for one, _ in arrivals]
    if numbers and (numbers[0] < 1 or any(a >= b for a, b in pairwise(numbers))):
        raise PacketError(CloseCode.MALFORMED, "arrivals have to ascend, from 1")
    return Ack(sequence, departed_us, arrivals)
