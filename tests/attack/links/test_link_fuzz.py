"""An end that follows the protocol and then lies at one point ends its own link, with the code for that lie, and harms
no other link, whatever went before."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.attackers.lying_end import DEADLINE_S, Loop, LyingEnd, noise

from molink.peer.wire.link.requests import MAX_RELEASES_IN_FLIGHT, MAX_REQUESTS_IN_FLIGHT
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol import packets
from molink.peer.wire.protocol.frames import MAX_FRAME_BYTES, encode
from molink.peer.wire.protocol.packets import Ack, CloseCode
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transport.message_memory import MessageMemory
from molink.peer.wire.transport.reassembly import MAX_PARTIAL_BYTES
from molink.peer.wire.transport.shared_uplink import SharedUplink

RELEASE = pb.Request(release=pb.Release(session=bytes(16), epoch=1))
UINT64 = st.integers(1, 2**64 - 1)
Lie = Callable[[LyingEnd], bytes]


def again(end: LyingEnd) -> bytes:
    end.send(end.whole(encode(RELEASE)))
    return packets.encode_data(TrafficClass.CONTROL, 2**40, 8, 0, end.sequence, bytes(8))


def skipping(end: LyingEnd) -> bytes:
    return packets.encode_data(TrafficClass.CONTROL, 2**40, 8, 0, end.sequence + 2, bytes(8))


def begun_in_the_middle(end: LyingEnd) -> bytes:
    return packets.encode_data(TrafficClass.PREFILL, 2**40, 100, 50, end.sequence + 1, bytes(8))


def changed_class(end: LyingEnd) -> bytes:
    message = end.begin(TrafficClass.PREFILL, 100)
    end.send(end.chunk(message, 10))
    return packets.encode_data(TrafficClass.WEIGHTS, message, 100, 10, end.sequence + 1, bytes(8))


def changed_length(end: LyingEnd) -> bytes:
    message = end.begin(TrafficClass.PREFILL, 100)
    end.send(end.chunk(message, 10))
    return packets.encode_data(TrafficClass.PREFILL, message, 101, 10, end.sequence + 1, bytes(8))


def overlapping(end: LyingEnd) -> bytes:
    message = end.begin(TrafficClass.PREFILL, 100)
    end.send(end.chunk(message, 10))
    return packets.encode_data(TrafficClass.PREFILL, message, 100, 5, end.sequence + 1, bytes(8))


def too_long(end: LyingEnd) -> bytes:
    return packets.encode_data(
        TrafficClass.PREFILL, 2**40, MAX_FRAME_BYTES + 1, 0, end.sequence + 1, bytes(8)
    )


def of_no_class(end: LyingEnd) -> bytes:
    return packets.encode_data(99, 2**40, 8, 0, end.sequence + 1, bytes(8))  # type: ignore[arg-type]


def acknowledging_what_was_never_sent(end: LyingEnd) -> bytes:
    return packets.encode_ack(Ack(end.received + 1000, 0, ()))


def no_frame(end: LyingEnd) -> bytes:
    return end.whole(noise(end.sequence, 40))


def out_of_place(end: LyingEnd) -> bytes:
    return end.whole(encode(pb.Failed(code="lost")))


def damaged(end: LyingEnd) -> bytes:
    packet = bytearray(end.whole(encode(RELEASE)))
    packet[-1] ^= 1
    return bytes(packet)


def no_packet(end: LyingEnd) -> bytes:
    return noise(end.sequence, 100)


def too_short(end: LyingEnd) -> bytes:
    return noise(end.sequence, 10)


LIES: dict[Lie, CloseCode] = {
    again: CloseCode.SEQUENCE,
    skipping: CloseCode.SEQUENCE,
    begun_in_the_middle: CloseCode.OFFSET,
    changed_class: CloseCode.OFFSET,
    changed_length: CloseCode.OFFSET,
    overlapping: CloseCode.OFFSET,
    too_long: CloseCode.TOO_LARGE,
    of_no_class: CloseCode.MALFORMED,
    acknowledging_what_was_never_sent: CloseCode.ACKNOWLEDGEMENT,
    no_frame: CloseCode.MESSAGE,
    out_of_place: CloseCode.MESSAGE,
    damaged: CloseCode.CHECKSUM,
    no_packet: CloseCode.MALFORMED,
    too_short: CloseCode.MALFORMED,
}


class LyingLinks(RuleBasedStateMachine):
    """One link after the other whose other end lies in the end, beside one whose end is honest."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Loop()
        self.memory = MessageMemory()
        self.uplink = SharedUplink()
        self.names = 0
        self.honest = self.loop.run(self._open("honest"))
        self.lying = self.loop.run(self._open("lying"))

    async def _open(self, name: str) -> LyingEnd:
        self.names += 1
        return LyingEnd(f"{name} {self.names}", self.uplink, self.memory)

    def _ended(self, code: CloseCode | None) -> None:
        """The lie has ended the link, and no other; the next link begins."""
        reason = self.loop.run(self.lying.until_closed())
        if code is not None:
            assert self.lying.closed is not None, reason
            assert self.lying.closed.code == code, reason
            assert reason.startswith("protocol error"), reason
        assert self.lying.handler.closed.qsize() == 1
        self.lying = self.loop.run(self._open("lying"))

    # -- what follows the protocol

    @rule()
    def asks(self) -> None:
        async def ask() -> None:
            number = self.lying.ask(RELEASE)
            async with asyncio.timeout(DEADLINE_S):
                while number not in self.lying.answered:
                    await asyncio.sleep(0)
                    self.lying.take()

        self.loop.run(ask())

    @rule(
        traffic_class=st.sampled_from(TrafficClass),
        length=st.integers(2, 10**6),
        size_bytes=st.integers(1, 1000),
    )
    def begins_a_message(self, traffic_class: TrafficClass, length: int, size_bytes: int) -> None:
        message = self.lying.begin(traffic_class, length)
        self.lying.send(self.lying.chunk(message, min(size_bytes, length - 1)))
        self.loop.run(self.lying.settle())

    @precondition(lambda self: self.lying.partials)
    @rule(data=st.data())
    def goes_on_with_a_message_or_cancels_it(self, data: st.DataObject) -> None:
        message = data.draw(st.sampled_from(sorted(self.lying.partials)))
        _, length, offset = self.lying.partials[message]
        if data.draw(st.booleans()) and length - offset > 1:
            self.lying.send(self.lying.chunk(message, data.draw(st.integers(1, length - offset - 1))))
        else:
            del self.lying.partials[message]
            self.lying.send(packets.encode_cancel(message))
        self.loop.run(self.lying.settle())

    @rule(number=UINT64, times=st.integers(1, 200))
    def pings_and_answers_pings_that_nobody_sent(self, number: int, times: int) -> None:
        for _ in range(times):
            self.lying.send(packets.encode_ping(number))
            self.lying.send(packets.encode_pong(number))
        self.loop.run(self.lying.settle())

    @rule(departed_us=st.integers(0, 2**64 - 1), age_us=st.integers(0, 2**32 - 1))
    def acknowledges_at_any_time_of_its_clock(self, departed_us: int, age_us: int) -> None:
        received = self.lying.received
        arrivals = ((received, age_us),) if received else ()
        self.lying.send(packets.encode_ack(Ack(received, departed_us, arrivals)))
        self.loop.run(self.lying.settle())

    @rule(number=UINT64)
    def answers_what_nobody_asked_and_cancels_what_nobody_sent(self, number: int) -> None:
        self.lying.send(self.lying.whole(encode(pb.Response(id=number % 2**32, released=pb.Released()))))
        self.lying.send(packets.encode_cancel(number))
        self.loop.run(self.lying.settle())

    @rule()
    def asks_for_more_at_once_than_is_answered(self) -> None:
        for _ in range(2 * MAX_REQUESTS_IN_FLIGHT):
            self.lying.ask(pb.Request(await_ready=pb.AwaitReady()))
        self.loop.run(self.lying.settle())

    @rule()
    def resumes(self) -> None:
        assert self.loop.run(self.lying.break_and_resume(self.lying.received))
        self.loop.run(self.lying.settle())

    # -- lies

    @rule(lie=st.sampled_from(list(LIES)))
    def lies(self, lie: Lie) -> None:
        self.lying.send(lie(self.lying))
        self._ended(LIES[lie])

    @rule(more=st.integers(1, 2**63))
    def resumes_after_what_was_never_sent(self, more: int) -> None:
        assert self.loop.run(self.lying.break_and_resume(self.lying.received + 10_000 + more))
        self._ended(None)

    @rule(code=st.integers(0, 2**32 - 1), reason=st.text(max_size=100))
    def closes(self, code: int, reason: str) -> None:
        self.lying.send(packets.encode_close(code, reason))
        self._ended(None)

    @rule()
    def leaves_more_unfinished_than_may_be(self) -> None:
        for _ in range(3):
            message = self.lying.begin(TrafficClass.PREFILL, MAX_FRAME_BYTES)
            for _ in range(MAX_PARTIAL_BYTES // packets.MAX_PACKET_BYTES // 2):
                self.lying.send(self.lying.chunk(message, packets.MAX_PACKET_BYTES - packets.HEADER_BYTES))
        self._ended(CloseCode.OVERLOAD)

    @rule()
    def releases_more_at_once_than_there_can_be(self) -> None:
        async def flood() -> None:
            never = asyncio.Event()

            async def hold(*_: object) -> tuple[pb.Response, bytes]:
                await never.wait()
                return pb.Response(), b""

            self.lying.handler.answer = hold
            for _ in range(MAX_REQUESTS_IN_FLIGHT + MAX_RELEASES_IN_FLIGHT + 1):
                self.lying.ask(RELEASE)

        self.loop.run(flood())
        self._ended(CloseCode.MESSAGE)

    # -- what must hold

    @invariant()
    def the_other_link_serves(self) -> None:
        async def ask() -> None:
            number = self.honest.ask(RELEASE)
            async with asyncio.timeout(DEADLINE_S):
                while number not in self.honest.answered:
                    await asyncio.sleep(0)
                    self.honest.take()

        self.loop.run(ask())
        assert self.honest.link.closed_because is None

    @invariant()
    def an_end_that_has_not_lied_keeps_its_link(self) -> None:
        assert self.lying.link.closed_because is None

    @invariant()
    def nothing_went_wrong_unseen(self) -> None:
        assert self.loop.errors == []
        assert 0 <= self.memory.taken_bytes <= MAX_PARTIAL_BYTES + 2**20

    def teardown(self) -> None:
        async def end() -> None:
            await self.honest.end()
            await self.lying.end()

        self.loop.run(end())
        assert self.memory.taken_bytes == 0
        assert self.loop.errors == []
        self.loop.close()


class TestLyingLinks(LyingLinks.TestCase):  # type: ignore[misc, valid-type]
    """The short form, in every run."""

    settings = settings(max_examples=6, stateful_step_count=20, suppress_health_check=list(HealthCheck))


@pytest.mark.fuzz
class TestLyingLinksForLong(LyingLinks.TestCase):  # type: ignore[misc, valid-type]
    """New cases in every run."""

    settings = settings(
        max_examples=300,
        stateful_step_count=40,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
    )
