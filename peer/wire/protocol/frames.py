"""A frame: a fixed prefix, a protobuf header, raw bytes. Nothing is pickled.

The frames that open a link are a gRPC message each; all others are messages that packets carry (`packets`).

offset  size  meaning
0       1     FRAME_VERSION
1       1     kind of the header
2       4     length of the header, big-endian
6       n     header (protobuf)
6 + n   ...   payload: a tensor or a part of a file, raw
"""

import struct
from dataclasses import dataclass
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from molink.peer.wire.protocol import molink_pb2 as pb

FRAME_VERSION = 1
MAX_FRAME_BYTES = 32 * 1024 * 1024
"""No message is longer."""
MAX_HEADER_BYTES = 1024 * 1024

_PREFIX = struct.Struct("!BBI")

_KINDS: dict[int, type[Message]] = {
    1: pb.Challenge,
    2: pb.Proof,
    3: pb.Welcome,
    4: pb.Request,
    5: pb.Response,
    6: pb.Start,
    7: pb.Activations,
    8: pb.Tokens,
    9: pb.Failed,
    10: pb.Stepped,
    11: pb.CopyParts,
    12: pb.CopiesKept,
    13: pb.Leaving,
    14: pb.Move,
    15: pb.History,
    16: pb.Guesses,
}
_NUMBERS = {header_type: kind for kind, header_type in _KINDS.items()}

HeaderT = TypeVar("HeaderT", bound=Message)


class ProtocolError(ValueError):
    """The other end sent what the protocol does not allow. The link is closed; nothing else is touched."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame."""

    header: Message
    payload: memoryview


def encode(header: Message, payload: bytes | memoryview = b"") -> bytes:
    """Encodes one frame.

    Raises:
        ProtocolError: the frame would be larger than the other end accepts.
    """
    body = header.SerializeToString()
    size = _PREFIX.size + len(body) + len(payload)
    if len(body) > MAX_HEADER_BYTES or size > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a {type(header).__name__} frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}"
        )
    return b"".join((_PREFIX.pack(FRAME_VERSION, _NUMBERS[type(header)], len(body)), body, payload))


def decode(data: bytes | memoryview) -> Frame:
    """Decodes the frame in `data`.

    Raises:
        ProtocolError: truncated, of an unknown version or kind, or not a valid header.
    """
    if len(data) < _PREFIX.size:
        raise ProtocolError(f"a frame of {len(data)} bytes is shorter than its prefix of {_PREFIX.size}")
    version, kind, header_bytes = _PREFIX.unpack_from(data)
    if version != FRAME_VERSION:
        raise ProtocolError(
            f"frame version {version} is not {FRAME_VERSION}: one of the two peers needs an update"
        )
    header_type = _KINDS.get(kind)
    if header_type is None:
        raise ProtocolError(f"unknown frame kind {kind}")
    end = _PREFIX.size + header_bytes
    if header_bytes > MAX_HEADER_BYTES or end > len(data):
        raise ProtocolError(f"a header of {header_bytes} bytes does not fit a frame of {len(data)}")
    header = header_type()
    try:
        header.ParseFromString(bytes(data[_PREFIX.size : end]))
    except DecodeError as error:
        raise ProtocolError(f"a damaged {header_type.__name__} header") from error
    return Frame(header, memoryview(data)[end:])


def expect(frame: Frame, header_type: type[HeaderT]) -> HeaderT:
    """The frame's header, if it is of that type.

    Raises:
        ProtocolError: it is another.
    """
    if not isinstance(frame.header, header_type):
        raise ProtocolError(f"expected {header_type.__name__}, got {type(frame.header).__name__}")
    return frame.header
