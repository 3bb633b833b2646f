"""Frames: what goes in comes out, and bytes of whatever kind are a frame or a ProtocolError."""

import struct

import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from molink.peer.wire.protocol import frames
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import (
    FRAME_VERSION,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    ProtocolError,
    decode,
    encode,
    expect,
)

numbers = st.integers(0, 2**32 - 1)
long_numbers = st.integers(0, 2**64 - 1)
sessions = st.binary(min_size=16, max_size=16)
headers: st.SearchStrategy[Message] = st.one_of(
    st.builds(pb.Challenge, protocol_version=numbers, nonce=st.binary(max_size=40)),
    st.builds(pb.Proof, protocol_version=numbers, public_key=st.binary(), is_client=st.booleans()),
    st.builds(pb.Welcome, peer_id=st.text(st.characters(codec="utf-8"), max_size=60)),
    st.builds(
        pb.Request,
        id=long_numbers,
        await_ready=st.builds(pb.AwaitReady, session=sessions, epoch=numbers, wait_ms=numbers),
    ),
    st.builds(pb.Response, id=long_numbers, content=st.builds(pb.Content, total_bytes=long_numbers)),
    st.builds(pb.Start, session=sessions, epoch=numbers, token_ids=st.lists(numbers, max_size=20)),
    st.builds(
        pb.Activations,
        rows=st.lists(st.builds(pb.ActivationRow, session=sessions, rows=numbers), max_size=4),
        hidden_size=numbers,
        dtype=st.sampled_from(["float32", "bfloat16"]),
    ),
    st.builds(
        pb.Tokens,
        tokens=st.lists(
            st.builds(
                pb.Token, session=sessions, token_id=numbers, logprob=st.floats(width=32, allow_nan=False)
            ),
            max_size=4,
        ),
    ),
    st.builds(
        pb.Stepped,
        sessions=st.lists(st.builds(pb.SteppedTo, session=sessions, epoch=numbers, step=numbers), max_size=4),
    ),
    st.builds(
        pb.CopyParts,
        parts=st.lists(
            st.builds(pb.CopyPart, session=sessions, start=numbers, tokens=numbers, payload_bytes=numbers),
            max_size=4,
        ),
    ),
    st.builds(
        pb.CopiesKept,
        copies=st.lists(st.builds(pb.CopyKept, session=sessions, tokens=numbers, ended=st.booleans())),
    ),
    st.builds(pb.Leaving, session=sessions, epoch=numbers, within_ms=numbers, reason=st.text(max_size=20)),
    st.builds(pb.Move, session=sessions, epoch=numbers, next_epoch=numbers, position=numbers),
    st.builds(pb.History, session=sessions, position=numbers, token_ids=st.lists(numbers, max_size=20)),
    st.builds(
        pb.Guesses,
        guesses=st.lists(
            st.builds(pb.Guess, session=sessions, step=numbers, token_ids=st.lists(numbers, max_size=20)),
            max_size=4,
        ),
    ),
    st.builds(pb.Failed, session=sessions, epoch=numbers, code=st.sampled_from(["lost", "engine"])),
)


@given(headers, st.binary(max_size=200), st.booleans())
def test_what_is_encoded_is_decoded(header: Message, payload: bytes, as_view: bool) -> None:
    frame = decode(encode(header, memoryview(payload) if as_view else payload))
    assert frame.header == header
    assert type(frame.header) is type(header)
    assert bytes(frame.payload) == payload


def test_the_strategy_covers_every_kind_of_frame() -> None:
    kinds = {
        decode(struct.pack("!BBI", FRAME_VERSION, kind, 0)).header.DESCRIPTOR.name for kind in range(1, 17)
    }
    assert len(kinds) == 16
    with pytest.raises(ProtocolError, match="kind 17"):
        decode(struct.pack("!BBI", FRAME_VERSION, 17, 0))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except ProtocolError:
        return
    assert frame.payload.nbytes <= len(data)


@given(st.integers(1, 10), st.binary(max_size=120), st.binary(max_size=20))
def test_any_header_of_a_known_kind_is_read_or_a_protocol_error(
    kind: int, body: bytes, payload: bytes
) -> None:
    try:
        frame = decode(struct.pack("!BBI", FRAME_VERSION, kind, len(body)) + body + payload)
    except ProtocolError as error:
        assert "damaged" in str(error)  # noqa: PT017 - most bodies are read, and that is right too
        return
    assert bytes(frame.payload) == payload


@given(headers, st.binary(max_size=50), st.data())
def test_a_frame_cut_short_within_its_header_is_refused(
    header: Message, payload: bytes, data: st.DataObject
) -> None:
    whole = encode(header, payload)
    end = len(whole) - len(payload)
    with pytest.raises(ProtocolError):
        decode(whole[: data.draw(st.integers(0, end - 1))])


def test_the_payload_is_a_view_of_the_frame_and_not_a_copy() -> None:
    data = encode(pb.Activations(hidden_size=2, dtype="float32"), b"12345678")
    assert decode(data).payload.obj is data


@pytest.mark.parametrize("version", [0, FRAME_VERSION + 1, 255])
def test_another_version_is_refused_and_says_who_needs_an_update(version: int) -> None:
    data = bytearray(encode(pb.Response(id=1)))
    data[0] = version
    with pytest.raises(ProtocolError, match=f"version {version} .* update"):
        decode(bytes(data))


@pytest.mark.parametrize("kind", [0, 17, 255])
def test_an_unknown_kind_is_refused(kind: int) -> None:
    data = bytearray(encode(pb.Response(id=1)))
    data[1] = kind
    with pytest.raises(ProtocolError, match=f"kind {kind}"):
        decode(bytes(data))


def test_a_header_longer_than_the_frame_is_refused() -> None:
    with pytest.raises(ProtocolError, match="does not fit"):
        decode(struct.pack("!BBI", FRAME_VERSION, 4, 1) + b"")
    with pytest.raises(ProtocolError, match="does not fit"):
        decode(struct.pack("!BBI", FRAME_VERSION, 4, 2**32 - 1) + b"abc")


def test_a_header_over_its_limit_is_neither_sent_nor_read() -> None:
    fits = pb.Failed(detail="x" * (MAX_HEADER_BYTES - 4))
    assert fits.ByteSize() == MAX_HEADER_BYTES
    assert decode(encode(fits)).header == fits
    fits.detail += "x"
    with pytest.raises(ProtocolError, match="limit"):
        encode(fits)
    body = fits.SerializeToString()
    with pytest.raises(ProtocolError, match="does not fit"):
        decode(struct.pack("!BBI", FRAME_VERSION, 9, len(body)) + body)


def test_a_frame_over_its_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 100)
    room = 100 - len(encode(pb.Response(id=1)))
    assert len(encode(pb.Response(id=1), bytes(room))) == 100
    with pytest.raises(ProtocolError, match="Response frame of 101 bytes is over the limit of 100"):
        encode(pb.Response(id=1), bytes(room + 1))
    assert MAX_FRAME_BYTES >= 16 * 1024 * 1024


def test_expecting_another_header_is_a_protocol_error_that_names_both() -> None:
    frame = decode(encode(pb.Response(id=3)))
    assert expect(frame, pb.Response).id == 3
    with pytest.raises(ProtocolError, match="expected Proof, got Response"):
        expect(frame, pb.Proof)
