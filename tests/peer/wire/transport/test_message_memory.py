"""What links may hold of messages: never more than there is, by identity and by all, and members before strangers."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.properties import examples

from molink.peer.wire.protocol import packets
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.keepalive import TICK_S
from molink.peer.wire.transport.message_memory import (
    LEAST_LIMIT_BYTES,
    MEMBER_BYTES,
    MOST_LIMIT_BYTES,
    STRANGER_BYTES,
    UNACKNOWLEDGED_BYTES,
    MemoryAccount,
    MessageMemory,
    message_limit_bytes,
)
from molink.peer.wire.transport.packet_engine import PacketEngine
from molink.peer.wire.transport.reassembly import PARTIAL_BYTES
from molink.peer.wire.transport.shared_uplink import SharedUplink

MIB = 1024 * 1024


def memory(limit_bytes: int = LEAST_LIMIT_BYTES, *members: str) -> MessageMemory:
    return MessageMemory(limit_bytes, members.__contains__)


def test_messages_may_take_a_part_of_the_peers_memory_and_always_some_frames() -> None:
    assert message_limit_bytes(None) == message_limit_bytes(600 * 1000**2) == LEAST_LIMIT_BYTES
    assert message_limit_bytes(8 * 1024**3) == 512 * MIB
    assert message_limit_bytes(10**15) == MOST_LIMIT_BYTES


def test_all_links_of_a_stranger_together_leave_no_more_unfinished_than_its_share() -> None:
    budget = memory()
    links = [budget.open("stranger") for _ in range(24)]
    taken = sum(link.take_in(MIB) for _ in range(62) for link in links) * MIB
    assert taken == STRANGER_BYTES == budget.taken_bytes


def test_one_member_may_leave_two_of_the_largest_frames_unfinished_and_no_more() -> None:
    budget = memory(LEAST_LIMIT_BYTES, "member")
    links = [budget.open("member") for _ in range(4)]
    taken = sum(link.take_in(MIB) for _ in range(62) for link in links) * MIB
    assert taken == MEMBER_BYTES


def test_many_strangers_leave_the_last_tenth_and_give_up_more_for_a_member() -> None:
    budget, gone = memory(LEAST_LIMIT_BYTES, "member"), []
    for number in range(64):
        link = budget.open(f"stranger {number}", lambda number=number: gone.append(number))
        for _ in range(8):
            link.take_in(MIB)
    assert budget.taken_bytes <= LEAST_LIMIT_BYTES * 0.9
    gone.clear()
    member = budget.open("member")
    assert all(member.take_in(MIB) for _ in range(60))
    assert gone
    assert budget.taken_bytes <= LEAST_LIMIT_BYTES


def test_who_holds_most_of_equals_makes_room_and_who_asks_for_more_than_that_does_not_get_it() -> None:
    gone: list[str] = []
    budget = memory(32 * MIB, "a", "b", "c")
    large = budget.open("a", lambda: gone.append("a"))
    assert large.take_in(28 * MIB)
    small = budget.open("b", lambda: gone.append("b"))
    assert not small.take_in(29 * MIB)
    assert small.take_in(4 * MIB)
    assert budget.open("c").take_in(2 * MIB)
    assert gone == ["a"]
    assert not large.take_in(1)
    large.give_in(28 * MIB)
    large.close()
    assert budget.taken_bytes == 6 * MIB


def test_what_is_not_acknowledged_waits_and_is_told_of_room_when_it_fits() -> None:
    budget, told = memory(LEAST_LIMIT_BYTES, "a"), []
    link = budget.open("a", room=lambda: told.append(budget.taken_bytes))
    assert link.take_out(UNACKNOWLEDGED_BYTES - MIB)
    assert not link.take_out(2 * MIB)
    link.give_out(MIB // 2)
    assert not told
    link.give_out(MIB // 2)
    assert told == [UNACKNOWLEDGED_BYTES - 2 * MIB]
    assert link.take_out(2 * MIB)
    assert link.take_out(MIB, always=True)


class AnyUse(RuleBasedStateMachine):
    """Links of members and strangers come, take, give and go in any order."""

    LIMIT_BYTES = 100

    def __init__(self) -> None:
        super().__init__()
        self.memory = memory(self.LIMIT_BYTES, "member 0", "member 1")
        self.links: list[MemoryAccount] = []

    @rule(identity=st.sampled_from(["member 0", "member 1", "stranger 0", "stranger 1", "stranger 2"]))
    def open(self, identity: str) -> None:
        self.links.append(self.memory.open(identity))

    @precondition(lambda self: self.links)
    @rule(data=st.data(), size_bytes=st.integers(1, 60), out=st.booleans())
    def take(self, data: st.DataObject, size_bytes: int, out: bool) -> None:
        link = data.draw(st.sampled_from(self.links))
        (link.take_out if out else link.take_in)(size_bytes)

    @precondition(lambda self: self.links)
    @rule(data=st.data(), out=st.booleans())
    def give(self, data: st.DataObject, out: bool) -> None:
        link = data.draw(st.sampled_from(self.links))
        give: Callable[[int], None] = link.give_out if out else link.give_in
        give(data.draw(st.integers(0, link.out_bytes if out else link.in_bytes)))

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        link = data.draw(st.sampled_from(self.links))
        link.close()
        self.links.remove(link)

    @invariant()
    def no_more_is_taken_than_there_is_and_all_is_counted(self) -> None:
        assert self.memory.taken_bytes == sum(link.in_bytes + link.out_bytes for link in self.links)
        assert 0 <= self.memory.taken_bytes <= self.LIMIT_BYTES


TestAnyUse = AnyUse.TestCase
TestAnyUse.settings = settings(max_examples=examples(40), stateful_step_count=30)


@given(st.integers(0, 2**50))
def test_the_limit_never_falls_as_memory_grows(memory_bytes: int) -> None:
    assert message_limit_bytes(memory_bytes) <= message_limit_bytes(memory_bytes + 2**30)


def traffic_of(budget: MessageMemory, identity: str, uplink: SharedUplink | None = None) -> PacketEngine:
    return PacketEngine(uplink or SharedUplink(), lambda: None, lambda: None, 0.0, budget.open(identity))


def looks(traffic: PacketEngine, since_s: float, until_s: float) -> list[str]:
    """What is said of a link that is looked at every TICK_S."""
    times = [since_s + TICK_S * tick for tick in range(round((until_s - since_s) / TICK_S) + 1)]
    return [said for now_s in times if (said := traffic.stalled(now_s)) is not None]


def chunk(sequence: int, message: int, offset: int) -> bytes:
    return packets.encode_data(TrafficClass.PREFILL, message, 100_000, offset, sequence, bytes(10_000))


def test_a_message_of_which_nothing_more_comes_ends_its_link_after_30_s_though_others_go_on() -> None:
    traffic = traffic_of(memory(), "a")
    traffic.on_packet(chunk(1, 1, 0), 0.0)
    for number in range(1, 6):
        traffic.on_packet(chunk(1 + number, 2, 10_000 * (number - 1)), 5.0 * number)
        assert looks(traffic, 5.0 * (number - 1), 5.0 * number) == []
    assert set(looks(traffic, 25.0, 31.0)) == {"nothing more has come of a message for 30 s"}


def test_what_is_not_acknowledged_ends_its_link_after_30_s() -> None:
    traffic = traffic_of(memory(), "a")
    assert looks(traffic, 0.0, 60.0) == []
    assert traffic.push(bytes(10_000), TrafficClass.WEIGHTS, (), 60.0)
    assert isinstance(traffic.next_packet(60.0), bytes)
    assert looks(traffic, 60.0, 90.0) == []
    assert set(looks(traffic, 90.0, 91.0)) == {"nothing was acknowledged for 30 s"}


def test_an_end_that_slept_blames_nobody() -> None:
    traffic = traffic_of(memory(), "a")
    traffic.on_packet(chunk(1, 1, 0), 0.0)
    assert looks(traffic, 0.0, 10.0) == []
    assert looks(traffic, 3600.0, 3620.0) == []


def test_what_a_link_holds_is_free_when_it_is_acknowledged_cancelled_whole_or_closed() -> None:
    budget, uplink = memory(), SharedUplink()
    traffic = traffic_of(budget, "a", uplink)
    assert traffic.push(bytes(10_000), TrafficClass.PREFILL, (b"s" * 16,), 0.0)
    assert traffic.push(bytes(20_000), TrafficClass.DECODE, (b"t" * 16,), 0.0)
    assert budget.taken_bytes == 30_000
    assert isinstance(traffic.next_packet(0.0), bytes)
    traffic.on_packet(packets.encode_ack(packets.Ack(1, 0, ())), 0.1)
    assert budget.taken_bytes == 10_000
    uplink.cancel(b"s" * 16, 0.2)
    assert budget.taken_bytes == 0
    traffic.on_packet(chunk(1, 1, 0), 0.3)
    traffic.on_packet(chunk(2, 2, 0), 0.3)
    assert budget.taken_bytes == 2 * (10_000 + PARTIAL_BYTES)
    traffic.on_packet(packets.encode_cancel(2), 0.4)
    for number in range(1, 10):
        traffic.on_packet(chunk(2 + number, 1, 10_000 * number), 0.5)
    assert budget.taken_bytes == 0
    traffic.on_packet(chunk(12, 3, 0), 0.6)
    traffic.close()
    assert budget.taken_bytes == 0
