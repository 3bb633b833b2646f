"""Packets of every type, and packets that were tampered with."""

import random

from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.packets import Ack, Cancel, Data, Packet, Ping, Pong
from molink.peer.wire.transmission.classes import TrafficClass

EXAMPLES = [
    packets.encode_data(TrafficClass.PREFILL, 3, 100, 10, 7, bytes(range(40))),
    packets.encode_ack(Ack(9, 1_000_000, ((7, 2600), (9, 40)))),
    packets.encode_cancel(3),
    packets.encode_close(4, "a chunk too many"),
    packets.encode_ping(5),
    packets.encode_pong(5),
]


def encoded(packet: Packet) -> bytes:
    """The packet as it was on the wire; not for CLOSE, whose reason may not have been text."""
    if isinstance(packet, Data):
        return packets.encode_data(
            packet.traffic_class,
            packet.message,
            packet.message_bytes,
            packet.offset,
            packet.sequence,
            packet.payload,
        )
    if isinstance(packet, Ack):
        return packets.encode_ack(packet)
    if isinstance(packet, Cancel):
        return packets.encode_cancel(packet.message)
    if isinstance(packet, Ping):
        return packets.encode_ping(packet.number)
    assert isinstance(packet, Pong)
    return packets.encode_pong(packet.number)


def tampered(rng: random.Random) -> bytes:
    """An example, changed in a few places, or noise. Its checksum is right more often than not, so that what comes
    after the checksum is reached."""
    if not rng.randrange(10):
        return rng.randbytes(rng.randrange(100))
    wire = bytearray(rng.choice(EXAMPLES))
    for _ in range(rng.randint(0, 3)):
        at = rng.randrange(len(wire) + 1)
        wire[at : at + rng.randint(0, 6)] = rng.randbytes(rng.randint(0, 6))
    if rng.randrange(4) and len(wire) >= packets.HEADER_BYTES:
        return seal(bytes(wire))
    return bytes(wire)


def seal(wire: bytes) -> bytes:
    """The same with the checksum that it should have."""
    return packets.sealed(wire[:28], wire[packets.HEADER_BYTES :])
