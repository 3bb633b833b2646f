"""Any bytes are a packet or a PacketError; chunks make messages again, and nothing else does."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.packet_examples import EXAMPLES, encoded, tampered

from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.packets import (
    MAX_ARRIVALS,
    MAX_PACKET_BYTES,
    Ack,
    CloseCode,
    Data,
    PacketError,
)
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.reassembly import Reassembly

CLASSES = st.sampled_from(TrafficClass)
LONG = st.integers(1, 2**64 - 1)


@given(CLASSES, LONG, LONG, st.integers(0, 1000), st.binary(min_size=1, max_size=2000), st.integers(0, 1000))
def test_a_chunk_is_read_as_it_was_written(
    traffic_class: TrafficClass, message: int, sequence: int, offset: int, chunk: bytes, more: int
) -> None:
    length = offset + len(chunk) + more
    wire = packets.encode_data(traffic_class, message, length, offset, sequence, chunk)
    read = packets.decode(wire)
    assert read == Data(traffic_class, message, length, offset, sequence, memoryview(chunk))
    assert isinstance(read, Data)
    assert read.payload.obj is wire


@given(
    st.integers(MAX_ARRIVALS, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.lists(
        st.tuples(st.integers(0, MAX_ARRIVALS - 1), st.integers(0, 2**33)),
        max_size=MAX_ARRIVALS,
        unique_by=lambda one: one[0],
    ),
)
def test_an_acknowledgement_is_read_as_it_was_written_but_for_very_old_arrivals(
    sequence: int, clock: int, ages: list[tuple[int, int]]
) -> None:
    arrivals = tuple((sequence - before, age_us) for before, age_us in sorted(ages, reverse=True))
    read = packets.decode(packets.encode_ack(Ack(sequence, clock, arrivals)))
    kept = tuple((number, min(age_us, 2**32 - 1)) for number, age_us in arrivals)
    assert read == Ack(sequence, clock, kept)


@given(st.text(max_size=700), st.integers(0, 2**32 - 1))
def test_a_reason_is_cut_between_characters(reason: str, code: int) -> None:
    read = packets.decode(packets.encode_close(code, reason))
    assert isinstance(read, packets.Close)
    assert read.code == code
    assert reason.encode("utf-8", "replace").decode().startswith(read.reason)


@pytest.mark.parametrize("whole", EXAMPLES, ids=lambda wire: packets.decode(wire).__class__.__name__)
def test_a_single_damaged_bit_is_found(whole: bytes) -> None:
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PacketError):
            packets.decode(bytes(damaged))


@pytest.mark.parametrize("whole", EXAMPLES, ids=lambda wire: packets.decode(wire).__class__.__name__)
def test_a_packet_that_is_cut_off_or_longer_is_refused(whole: bytes) -> None:
    for length in range(len(whole)):
        with pytest.raises(PacketError):
            packets.decode(whole[:length])
    with pytest.raises(PacketError):
        packets.decode(whole + b"\0")


def test_the_largest_packet_is_read_and_a_larger_one_refused() -> None:
    chunk = bytes(MAX_PACKET_BYTES - packets.HEADER_BYTES)
    whole = packets.encode_data(TrafficClass.WEIGHTS, 1, len(chunk), 0, 1, chunk)
    assert isinstance(packets.decode(whole), Data)
    with pytest.raises(PacketError) as refused:
        packets.decode(whole + b"\0")
    assert refused.value.code == CloseCode.TOO_LARGE


@given(st.one_of(st.binary(max_size=200), st.builds(tampered, st.randoms(use_true_random=False))))
def test_any_bytes_are_a_packet_or_a_packet_error(wire: bytes) -> None:
    try:
        packet = packets.decode(wire)
    except PacketError as error:
        assert error.code in CloseCode  # noqa: PT017 - nearly all are refused
        return
    assert isinstance(packet, packets.Close) or encoded(packet) == wire


@given(
    messages=st.lists(st.tuples(CLASSES, st.binary(min_size=1, max_size=400)), min_size=1, max_size=12),
    seed=st.integers(0, 2**32),
)
def test_messages_cut_and_mixed_in_any_way_become_whole_again(
    messages: list[tuple[TrafficClass, bytes]], seed: int
) -> None:
    rng, reassembly = random.Random(seed), Reassembly()
    left = {number: (one, 0) for number, (one, _) in enumerate(messages, 1)}
    whole: dict[int, bytes] = {}
    sequence = 0
    while left:
        number = rng.choice([*left])
        traffic_class, offset = left[number]
        content = messages[number - 1][1]
        size = rng.randint(1, len(content) - offset)
        sequence += 1
        message = reassembly.add_chunk(
            Data(
                traffic_class,
                number,
                len(content),
                offset,
                sequence,
                memoryview(content)[offset : offset + size],
            )
        )
        left[number] = (traffic_class, offset + size)
        assert (message is not None) == (offset + size == len(content))
        if message is not None:
            whole[number] = bytes(message)
            del left[number]
        assert reassembly.partial_bytes == sum(offset for _, offset in left.values())
        assert len(reassembly) == sum(offset > 0 for _, offset in left.values())
    assert whole == {number: content for number, (_, content) in enumerate(messages, 1)}


def test_unfinished_messages_take_what_has_arrived_of_them_and_no_more_than_the_limit() -> None:
    reassembly = Reassembly(limit_bytes=1000)
    declared = 32 * 1024 * 1024
    assert reassembly.add_chunk(Data(TrafficClass.PREFILL, 1, declared, 0, 1, memoryview(bytes(600)))) is None
    assert reassembly.partial_bytes == 600
    with pytest.raises(PacketError) as refused:
        reassembly.add_chunk(Data(TrafficClass.WEIGHTS, 2, declared, 0, 2, memoryview(bytes(401))))
    assert refused.value.code == CloseCode.OVERLOAD
    assert reassembly.partial_bytes == 600
    reassembly.drop_message(1)
    assert (reassembly.partial_bytes, len(reassembly)) == (0, 1)
