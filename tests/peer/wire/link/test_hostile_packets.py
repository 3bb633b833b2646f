"""What breaks the rules of a link ends it, with a code that says which, and touches nothing else."""

import random

import pytest
from support.links.data_plane import DEADLINE_S, End, asynchronous, soon
from support.links.raw_end import raw_link

from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.frames import MAX_FRAME_BYTES, encode
from molink.peer.wire.protocol.packets import CloseCode
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.reassembly import MAX_PARTIAL_MESSAGES


def request() -> pb.Request:
    return pb.Request(release=pb.Release(session=bytes(16), epoch=1))


def damaged(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes((whole[at] ^ 1,)) + whole[at + 1 :]


WHOLE = packets.encode_data(TrafficClass.PREFILL, 1, 8, 0, 1, b"1234")
OFFENCES: dict[str, tuple[CloseCode, list[bytes]]] = {
    "nothing": (CloseCode.MALFORMED, [b""]),
    "a frame": (CloseCode.MALFORMED, [encode(pb.Request(id=1))]),
    "random bytes": (CloseCode.MALFORMED, [random.Random(1).randbytes(1000)]),
    "another version": (CloseCode.MALFORMED, [damaged(WHOLE, 0)]),
    "an unknown type": (CloseCode.MALFORMED, [bytes((1, 99)) + WHOLE[2:]]),
    "cut off": (CloseCode.CHECKSUM, [WHOLE[:-1]]),
    "a damaged chunk": (CloseCode.CHECKSUM, [damaged(WHOLE, len(WHOLE) - 1)]),
    "a damaged header": (CloseCode.CHECKSUM, [damaged(WHOLE, 15)]),
    "a message too long": (
        CloseCode.TOO_LARGE,
        [packets.encode_data(TrafficClass.PREFILL, 1, MAX_FRAME_BYTES + 1, 0, 1, b"1")],
    ),
    "a chunk beyond its message": (
        CloseCode.OFFSET,
        [packets.encode_data(TrafficClass.PREFILL, 1, 3, 0, 1, b"1234")],
    ),
    "a gap in the sequence": (
        CloseCode.SEQUENCE,
        [packets.encode_data(TrafficClass.PREFILL, 1, 8, 0, 2, b"1234")],
    ),
    "a chunk twice": (CloseCode.SEQUENCE, [WHOLE, WHOLE]),
    "a gap in the message": (
        CloseCode.OFFSET,
        [WHOLE, packets.encode_data(TrafficClass.PREFILL, 1, 8, 5, 2, b"123")],
    ),
    "an overlap": (CloseCode.OFFSET, [WHOLE, packets.encode_data(TrafficClass.PREFILL, 1, 8, 3, 2, b"123")]),
    "a second beginning": (
        CloseCode.OFFSET,
        [WHOLE, packets.encode_data(TrafficClass.PREFILL, 1, 8, 0, 2, b"1234")],
    ),
    "another length": (
        CloseCode.OFFSET,
        [WHOLE, packets.encode_data(TrafficClass.PREFILL, 1, 9, 4, 2, b"1234")],
    ),
    "an acknowledgement of what was never sent": (
        CloseCode.ACKNOWLEDGEMENT,
        [packets.encode_ack(packets.Ack(1, 0, ()))],
    ),
    "too many unfinished messages": (
        CloseCode.OVERLOAD,
        [
            packets.encode_data(TrafficClass.PREFILL, number, 8, 0, number, b"1")
            for number in range(1, MAX_PARTIAL_MESSAGES + 2)
        ],
    ),
}


@pytest.mark.parametrize("case", OFFENCES)
@asynchronous
async def test_a_packet_out_of_the_rules_ends_the_link_with_its_code_and_no_other(case: str) -> None:
    code, sent = OFFENCES[case]
    async with End() as end, End() as other, raw_link(end) as raw:
        link = await other.links.to(end.facts)
        for packet in sent:
            await raw.call.write(packet)
        assert (await raw.closed()).code == code
        closed, reason = await soon(end.handler.closed.get())
        assert closed == raw.peer_id
        assert reason.startswith("protocol error")
        assert (await link.request(request(), DEADLINE_S))[0].HasField("released")
