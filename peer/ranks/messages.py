"""What a peer and its ranks say to each other through pipes: a header in JSON and raw bytes, each with its length."""

import json
import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<II")
MAX_HEADER_BYTES = 64 * 2**20
MAX_PAYLOAD_BYTES = 2**31


class PipeError(Exception):
    """What came out of a pipe is no message."""


def write_message(
    stream: BinaryIO, header: Mapping[str, object], payload: bytes | bytearray | memoryview = b""
) -> None:
    """Raises OSError where nobody reads any more."""
    encoded = json.dumps(header, separators=(",", ":")).encode()
    stream.write(_LENGTHS.pack(len(encoded), len(payload)) + encoded)
    if payload:
        stream.write(payload)
    stream.flush()


def read_message(stream: BinaryIO) -> tuple[dict[str, Any], bytearray] | None:
    """The next message; None if the other end has closed or gone.

    Raises:
        PipeError: lengths beyond bounds, or a header that is no JSON object.
    """
    lengths = _read_exactly(stream, _LENGTHS.size)
    if lengths is None:
        return None
    header_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise PipeError(f"a message of {header_bytes} and {payload_bytes} bytes is too long")
    encoded = _read_exactly(stream, header_bytes)
    payload = _read_exactly(stream, payload_bytes)
    if encoded is None or payload is None:
        return None
    try:
        header = json.loads(encoded)
    except ValueError as error:
        raise PipeError(f"a header is no JSON: {error}") from error
    if not isinstance(header, dict):
        raise PipeError("a header is no JSON object")
    return header, payload


def _read_exactly(stream: BinaryIO, count: int) -> bytearray | None:
    """So many bytes, straight into their place; None if the stream ends before."""
    content = bytearray(count)
    view, done = memoryview(content), 0
    while done < count:
        read = stream.readinto(view[done:])  # type: ignore[attr-defined] # buffered streams have it
        if not read:
            return None
        done += read
    return content
