"""The test vectors of docs/PROTOCOL.md are what the code writes and reads."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from molink.peer.wire.protocol import frames, packets
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.packets import Ack, Cancel, Close, CloseCode, Data, Packet, Ping, Pong
from molink.peer.wire.transmission.classes import TrafficClass

DOCUMENT = (Path(__file__).parents[4] / "docs" / "PROTOCOL.md").read_text(encoding="utf-8")
VECTORS = re.findall(r"^(PACKET|FRAME) (\w+)(?: (.*))?\n((?:[0-9a-f]+\n)+)", DOCUMENT, re.MULTILINE)


def fields_of(text: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)=("[^"]*"|\S+)', text))


def data(fields: Mapping[str, str]) -> tuple[Packet, bytes]:
    payload = bytes.fromhex(fields["chunk"])
    packet = Data(
        TrafficClass[fields["class"]],
        int(fields["message"]),
        int(fields["length"]),
        int(fields["offset"]),
        int(fields["sequence"]),
        memoryview(payload),
    )
    return packet, packets.encode_data(
        packet.traffic_class, packet.message, packet.message_bytes, packet.offset, packet.sequence, payload
    )


def ack(fields: Mapping[str, str]) -> tuple[Packet, bytes]:
    listed = re.findall(r"(\d+):(\d+)", fields["arrivals"])
    arrivals = tuple((int(sequence), int(age_us)) for sequence, age_us in listed)
    packet = Ack(int(fields["sequence"]), int(fields["clock"]), arrivals)
    return packet, packets.encode_ack(packet)


def close(fields: Mapping[str, str]) -> tuple[Packet, bytes]:
    packet = Close(CloseCode[fields["code"]], fields["reason"].strip('"'))
    return packet, packets.encode_close(packet.code, packet.reason)


def cancel(fields: Mapping[str, str]) -> tuple[Packet, bytes]:
    return Cancel(int(fields["message"])), packets.encode_cancel(int(fields["message"]))


def ping(fields: Mapping[str, str]) -> tuple[Packet, bytes]:
    return Ping(int(fields["number"])), packets.encode_ping(int(fields["number"]))


def pong(fields: Mapping[str, str]) -> tuple[Packet, bytes]:
    return Pong(int(fields["number"])), packets.encode_pong(int(fields["number"]))


PACKETS: Mapping[str, Callable[[Mapping[str, str]], tuple[Packet, bytes]]] = {
    "DATA": data,
    "ACK": ack,
    "CANCEL": cancel,
    "CLOSE": close,
    "PING": ping,
    "PONG": pong,
}


def of(kind: str) -> list[Any]:
    return [
        pytest.param(name, text, bytes.fromhex(digits.replace("\n", "")), id=f"{name} {text}"[:60])
        for found, name, text, digits in VECTORS
        if found == kind
    ]


@pytest.mark.parametrize(("name", "text", "wire"), of("PACKET"))
def test_a_packet_is_written_and_read_as_documented(name: str, text: str, wire: bytes) -> None:
    packet, encoded = PACKETS[name](fields_of(text))
    assert encoded.hex() == wire.hex()
    assert packets.decode(wire) == packet


@pytest.mark.parametrize(("name", "text", "wire"), of("FRAME"))
def test_a_frame_is_written_and_read_as_documented(name: str, text: str, wire: bytes) -> None:
    said, _, payload = text.partition(" payload=")
    header = text_format.Parse(said, getattr(pb, name)())
    assert frames.encode(header, bytes.fromhex(payload)).hex() == wire.hex()
    frame = frames.decode(wire)
    assert (frame.header, frame.payload.hex()) == (header, payload)


def test_every_kind_of_packet_and_the_frames_of_the_handshake_have_a_vector() -> None:
    named = {name for _, name, _, _ in VECTORS}
    assert named >= {*PACKETS, "Challenge", "Proof", "Welcome", "Activations"}


def test_the_codes_of_the_document_are_those_of_the_code() -> None:
    codes = re.findall(r"^\| (\d+) \| ([A-Z_]+) \|", DOCUMENT, re.MULTILINE)
    assert [(int(number), name) for number, name in codes] == [(one.value, one.name) for one in CloseCode]
