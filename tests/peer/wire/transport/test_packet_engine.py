"""Two ends of a link in virtual time: over connections that break at any moment, every message arrives once and in the
order of its class and session, and neither end keeps more than it may."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.links.packet_examples import tampered
from support.properties import examples

from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.packets import CloseCode, PacketError
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.policies import POLICIES
from molink.peer.wire.transport import packet_sender
from molink.peer.wire.transport.acknowledgements import (
    BULK_CHUNKS,
    BULK_DELAY_S,
    BULK_INTERVAL_S,
    DelayedAcks,
)
from molink.peer.wire.transport.keepalive import RTT_SPANS, RoundTrips
from molink.peer.wire.transport.packet_engine import LinkClosed, PacketEngine
from molink.peer.wire.transport.reassembly import MAX_PARTIAL_BYTES
from molink.peer.wire.transport.retransmit_buffer import RetransmitBuffer
from molink.peer.wire.transport.shared_uplink import SharedUplink

KIB = 1024


def nothing() -> None:
    pass


class Side:
    """One end, what it was given, and what came out."""

    def __init__(self, policy: str = "molink") -> None:
        self.uplink = SharedUplink(policy)
        self.traffic = PacketEngine(self.uplink, nothing, nothing, 0.0)
        self.sent: list[bytes] = []
        self.arrived: list[bytes] = []
        self.wire: list[bytes] = []
        """Packets on their way to the other end."""


class Pair:
    """Two ends and the connection between them; each `turn` is a millisecond."""

    def __init__(self, policy: str = "molink") -> None:
        self.sides = (Side(policy), Side(policy))
        self.now_s = 0.0

    def turn(self) -> None:
        self.now_s += 0.001
        for side in self.sides:
            for _ in range(4):
                packet = side.traffic.next_packet(self.now_s)
                if isinstance(packet, float):
                    break
                side.wire.append(packet)
        for side, other in (self.sides, self.sides[::-1]):
            for packet in side.wire:
                message = other.traffic.on_packet(packet, self.now_s)
                if message is not None:
                    other.arrived.append(bytes(message))
            side.wire.clear()

    def cut(self, rng: random.Random) -> None:
        """The connection breaks; of what is on the way a part arrives. Then there is another."""
        for side, other in (self.sides, self.sides[::-1]):
            for packet in side.wire[: rng.randint(0, len(side.wire))]:
                message = other.traffic.on_packet(packet, self.now_s)
                if message is not None:
                    other.arrived.append(bytes(message))
            side.wire.clear()
        for side in self.sides:
            side.traffic.suspend(self.now_s)
        received = [side.traffic.received for side in self.sides]
        for side, number in zip(self.sides, received[::-1], strict=True):
            side.traffic.resume(number, self.now_s)

    def begin(self, rng: random.Random) -> None:
        """Packets leave, and are on their way."""
        self.now_s += 0.001
        for side in self.sides:
            for _ in range(rng.randint(0, 6)):
                packet = side.traffic.next_packet(self.now_s)
                if isinstance(packet, float):
                    break
                side.wire.append(packet)

    def settle(self) -> None:
        for _ in range(5_000):
            self.turn()
            if not any(side.traffic.owes_or_is_owed for side in self.sides):
                return
        raise AssertionError("something is still on its way")


def content(rng: random.Random, number: int, traffic_class: TrafficClass) -> bytes:
    size = rng.choice((10, 300, 20 * KIB, 150 * KIB, 700 * KIB))
    return bytes((traffic_class,)) + number.to_bytes(4) + rng.randbytes(16) * (size // 16)


@pytest.mark.full
@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32), policy=st.sampled_from([one for one in POLICIES if one != "concurrent"]))
def test_every_message_arrives_once_and_in_the_order_of_its_class_whatever_breaks(
    seed: int, policy: str
) -> None:
    rng, pair = random.Random(seed), Pair(policy)
    for step in range(60):
        for side in pair.sides:
            if rng.random() < 0.4:
                traffic_class = rng.choice(list(TrafficClass))
                message = content(rng, step, traffic_class)
                if side.traffic.push(message, traffic_class, (), pair.now_s):
                    side.sent.append(message)
        if rng.random() < 0.3:
            pair.begin(rng)
            pair.cut(rng)
        else:
            pair.turn()
    pair.settle()
    for side, other in (pair.sides, pair.sides[::-1]):
        for one in TrafficClass:
            assert [m for m in other.arrived if m[0] == one] == [m for m in side.sent if m[0] == one]


@settings(max_examples=examples(40), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_cancelled_session_leaves_nothing_behind_whatever_breaks(seed: int) -> None:
    rng, pair = random.Random(seed), Pair()
    side, other = pair.sides
    for number in range(12):
        message = content(rng, number, TrafficClass.PREFILL)
        kept = number % 2 == 0
        if (
            side.traffic.push(message, TrafficClass.PREFILL, (b"kept" if kept else b"gone",), pair.now_s)
            and kept
        ):
            side.sent.append(message)
        pair.begin(rng)
        if rng.random() < 0.5:
            pair.cut(rng)
        side.uplink.cancel(b"gone", pair.now_s)
        if rng.random() < 0.5:
            pair.begin(rng)
            pair.cut(rng)
    pair.settle()
    assert [message for message in other.arrived if int.from_bytes(message[1:5]) % 2 == 0] == side.sent
    assert other.traffic._reassembly.partial_bytes == len(other.traffic._reassembly) == 0
    assert not side.traffic._sender._waiting


def test_a_cancel_that_is_lost_after_its_chunks_were_acknowledged_is_sent_again() -> None:
    pair, rng = Pair(), random.Random(1)
    side, other = pair.sides
    assert side.traffic.push(bytes(20_000 * KIB), TrafficClass.PREFILL, (b"gone",), pair.now_s)
    pair.turn()
    side.uplink.cancel(b"gone", pair.now_s)
    lost = side.traffic.next_packet(pair.now_s)
    assert isinstance(lost, bytes)
    assert isinstance(packets.decode(lost), packets.Cancel)
    for _ in range(100):
        pair.turn()
    assert len(side.traffic._sender.buffer) == 0
    assert len(other.traffic._reassembly) == 1
    pair.cut(rng)
    pair.turn()
    assert len(other.traffic._reassembly) == other.traffic._reassembly.partial_bytes == 0


def test_an_end_that_hears_no_acknowledgement_stops_at_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packet_sender, "RetransmitBuffer", lambda: RetransmitBuffer(limit_bytes=64 * KIB))
    side = Side("fifo")
    while side.traffic.push(bytes(100 * KIB), TrafficClass.PREFILL, (), 0.0):
        assert len(side.traffic._sender._waiting) < 4096
    sent = 0
    while isinstance(packet := side.traffic.next_packet(1.0), bytes):
        sent += len(packet)
    assert sent <= (64 + 256 + 1) * KIB


def test_an_acknowledgement_tells_the_round_trip_without_the_time_that_it_was_held() -> None:
    pair = Pair()
    side, other = pair.sides
    round_trips = side.traffic.round_trips
    round_trips.answered(round_trips.asked(0.0), 0.020)
    assert round_trips.least_s == pytest.approx(0.020)
    for number in range(2 * RTT_SPANS):  # the way has become longer: acknowledgements say so before pings do
        round_trips.acknowledged(0.040, 0.5 + number)
    assert side.traffic.push(b"decode", TrafficClass.DECODE, (), 0.0)
    packet = side.traffic.next_packet(1.0)
    assert isinstance(packet, bytes)
    other.traffic.on_packet(packet, 501.0)  # another clock
    due_s = other.traffic.next_packet(501.0)
    assert isinstance(due_s, float)
    assert 501.0 < due_s <= 501.05
    assert other.traffic.next_packet(due_s - 0.001) == due_s
    ack = other.traffic.next_packet(due_s)
    assert isinstance(ack, bytes)
    side.traffic.on_packet(ack, 1.0 + 0.030 + (due_s - 501.0))
    assert side.traffic.round_trips.least_s == pytest.approx(0.030, abs=1e-5)


@given(
    pings_ms=st.lists(st.floats(10.0, 500.0), min_size=1, max_size=20),
    said_ms=st.lists(st.floats(0.0, 500.0), max_size=40),
)
def test_acknowledgements_bring_nobody_nearer_than_its_answers_to_pings(
    pings_ms: list[float], said_ms: list[float]
) -> None:
    round_trips, now_s = RoundTrips(nothing), 0.0
    for ping_ms in pings_ms:
        now_s += 4.0
        round_trips.answered(round_trips.asked(now_s), now_s + ping_ms / 1000)
        for one_ms in said_ms:
            now_s += 0.3
            round_trips.acknowledged(one_ms / 1000, now_s)
    assert round_trips.least_s is not None
    assert round_trips.least_s >= min(pings_ms) / 1000 - 1e-9


def test_an_answer_that_was_not_asked_for_or_is_guessed_measures_nothing() -> None:
    round_trips = RoundTrips(nothing)
    round_trips.secret = b"known to this end only"
    for number in range(100):
        round_trips.answered(number, 0.0)
    round_trips.acknowledged(0.001, 0.0)
    assert round_trips.least_s is None
    first, second = round_trips.asked(1.0), round_trips.asked(1.0)
    assert abs(first - second) > 2**20
    round_trips.answered(second + 1, 1.001)
    assert round_trips.least_s is None
    round_trips.answered(first, 1.03)
    round_trips.answered(first, 1.00001)
    assert round_trips.least_s == pytest.approx(0.03)


def test_of_bulk_each_second_chunk_is_acknowledged_at_once() -> None:
    pair = Pair()
    side, other = pair.sides
    assert side.traffic.push(bytes(400 * KIB), TrafficClass.PREFILL, (), 0.0)
    for _ in range(BULK_CHUNKS):
        packet = side.traffic.next_packet(0.0)
        assert isinstance(packet, bytes)
        other.traffic.on_packet(packet, 0.0)
    ack = other.traffic.next_packet(0.0)
    assert isinstance(ack, bytes)
    read = packets.decode(ack)
    assert isinstance(read, packets.Ack)
    assert read.sequence == BULK_CHUNKS
    assert [number for number, _ in read.arrivals] == [*range(1, BULK_CHUNKS + 1)]


@pytest.mark.parametrize(("gap_s", "held_s"), [(BULK_INTERVAL_S, 0.0), (BULK_INTERVAL_S / 2, BULK_DELAY_S)])
def test_of_bulk_a_single_chunk_is_acknowledged_at_once_if_none_was_lately_and_soon_if_one_was(
    gap_s: float, held_s: float
) -> None:
    acknowledging = DelayedAcks()
    acknowledging.record_arrival(1, TrafficClass.PREFILL, 0.0)
    assert acknowledging.take_ack(0.0) is not None
    acknowledging.record_arrival(2, TrafficClass.PREFILL, gap_s)
    assert acknowledging.due_s == gap_s + held_s


def test_an_acknowledgement_of_decode_alone_does_not_hold_up_that_of_bulk() -> None:
    acknowledging = DelayedAcks()
    acknowledging.record_arrival(1, TrafficClass.DECODE, 1.0)
    assert acknowledging.take_ack(acknowledging.due_s) is not None
    acknowledging.record_arrival(2, TrafficClass.PREFILL, 1.041)
    assert acknowledging.due_s == 1.041


@pytest.mark.parametrize("received", [0, 5])
def test_an_end_that_resumes_from_where_it_cannot_be_is_refused(received: int) -> None:
    pair = Pair()
    side = pair.sides[0]
    assert side.traffic.push(b"decode", TrafficClass.DECODE, (), 0.0)
    for _ in range(100):
        pair.turn()
    side.traffic.suspend(pair.now_s)
    with pytest.raises(PacketError) as refused:
        side.traffic.resume(received, pair.now_s)
    assert refused.value.code == CloseCode.ACKNOWLEDGEMENT


@pytest.mark.fuzz
@given(seed=st.integers(0, 2**64))
def test_whatever_comes_it_is_refused_or_taken_within_the_bounds(seed: int) -> None:
    """With the long profile, a million packets."""
    side, rng = Side(), random.Random(seed)
    for _ in range(500):
        try:
            side.traffic.on_packet(tampered(rng), 0.0)
        except PacketError as error:
            assert error.code in CloseCode  # noqa: PT017 - nearly all are refused
        except LinkClosed:
            pass
        assert side.traffic._reassembly.partial_bytes <= MAX_PARTIAL_BYTES
        assert len(side.traffic._sender._pongs) <= packet_sender.PONGS_WAITING


def test_who_waits_for_room_is_told_once_when_a_message_has_left_is_dropped_or_the_link_closes() -> None:
    pair = Pair()
    side, told = pair.sides[0], []
    content = bytes(8 * KIB * KIB)
    session = b"s" * 16
    assert side.traffic.push(content, TrafficClass.PREFILL, (session,), pair.now_s)
    side.traffic.when_room(lambda: told.append("left"))
    pair.turn()
    assert not told
    while not pair.sides[1].arrived:
        pair.turn()
    assert told == ["left"]
    assert side.traffic.push(content, TrafficClass.PREFILL, (session,), pair.now_s)
    side.traffic.when_room(lambda: told.append("dropped"))
    side.uplink.cancel(session, pair.now_s)
    assert told == ["left", "dropped"]
    side.traffic.when_room(lambda: told.append("closed"))
    side.traffic.close()
    assert told == ["left", "dropped", "closed"]
