"""Packet sender of one link, over all of its connections: messages become packets, kept until acknowledged. Pure."""

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from molink.peer.wire.protocol.packets import Ack, CloseCode, PacketError, encode_cancel, encode_pong
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.values import LinkEstimate, Outgoing, Send
from molink.peer.wire.transport.message_memory import MemoryAccount
from molink.peer.wire.transport.retransmit_buffer import RetransmitBuffer, SentChunk
from molink.peer.wire.transport.sent_memory import SentMemory
from molink.peer.wire.transport.shared_uplink import SharedUplink

PONGS_WAITING = 16
"""Whoever asks for signs of life faster than they can leave gets fewer."""


@dataclass(slots=True)
class _Waiting:
    """A message of which not everything was sent."""

    traffic_class: TrafficClass
    content: memoryview
    begun: bool = False


class PacketSender:
    """Packet sender: a link's outgoing direction, and what it says of itself."""

    def __init__(
        self, uplink: SharedUplink, wake: Callable[[], None], now_s: float, holder: MemoryAccount
    ) -> None:
        """`wake` is called when `next_packet` may have something sooner than it said."""
        self.wake = wake
        self.buffer = RetransmitBuffer()
        self.memory = SentMemory(holder)
        self.progress_s = now_s
        """When the other end last acknowledged anything, or was asked to go on over another connection."""
        self._uplink = uplink
        self._number = uplink.open(self, now_s)
        self._messages = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._cancels: deque[tuple[int, int]] = deque()
        """Message, and the last sequence number sent before its CANCEL, until a later one is acknowledged."""
        self._control: deque[bytes] = deque()
        self._pongs: deque[int] = deque(maxlen=PONGS_WAITING)
        self._await_room: list[Callable[[], None]] = []

    @property
    def owes_or_is_owed(self) -> bool:
        """Whether anything waits to be sent, or to be acknowledged."""
        return bool(self._waiting) or len(self.buffer) > 0

    def push(
        self,
        content: bytes,
        traffic_class: TrafficClass,
        sessions: tuple[bytes, ...],
        now_s: float,
        deadline_s: float,
    ) -> bool:
        """As `PacketEngine.push`."""
        size_bytes = len(content)
        if not self.memory.take(size_bytes, traffic_class):
            return False
        number = next(self._messages)
        self._waiting[number] = _Waiting(traffic_class, memoryview(content))
        outgoing = Outgoing(number, traffic_class, size_bytes, sessions, deadline_s)
        if not self._uplink.push(self._number, outgoing, now_s):
            del self._waiting[number]
            self.memory.give(size_bytes, traffic_class)
            return False
        return True

    def when_room(self, room: Callable[[], None]) -> None:
        """As `PacketEngine.when_room`."""
        self._await_room.append(room)

    def tell_room(self) -> None:
        """Calls back who waits for room: there may be some where `push` found none."""
        if self._await_room:
            told, self._await_room = self._await_room, []
            for room in told:
                room()

    def expect_decode(self, at_s: float) -> None:
        """When the next decode is predicted to be pushed here."""
        self._uplink.expect_decode(self._number, at_s)

    def estimate(self) -> LinkEstimate:
        """Returns the estimate of the link's bandwidth, delay and window."""
        return self._uplink.estimate(self._number)

    def cancelled(self, message: int) -> None:
        """The uplink has dropped what was left of a message."""
        self.tell_room()
        waiting = self._waiting.pop(message)
        self._keep(waiting)
        self._let_go()
        if waiting.begun:
            self._cancels.append((message, self.buffer.sent))
            self.say(encode_cancel(message))

    def say(self, packet: bytes) -> None:
        """Sends a packet of control over this connection: it is lost with it."""
        self._control.append(packet)
        self.wake()

    def answer_ping(self, number: int) -> None:
        """Sends a sign of life."""
        self._pongs.append(number)
        self.wake()

    def next_packet(self, now_s: float) -> bytes | float:
        """Returns the packet that leaves next; or when to ask again, in seconds, if `wake` does not come first."""
        buffer = self.buffer
        if buffer.resends:
            return buffer.resends.popleft().packet()
        if self._control:
            return self._control.popleft()
        if self._pongs:
            return encode_pong(self._pongs.popleft())
        if buffer.is_full:
            return math.inf
        decided = self._uplink.next(self._number, now_s)
        return self._send(decided, now_s) if isinstance(decided, Send) else decided.until_s

    def _send(self, send: Send, now_s: float) -> bytes:
        waiting = self._waiting[send.message]
        waiting.begun = True
        content = waiting.content
        chunk = SentChunk(
            self.buffer.sent + 1,
            waiting.traffic_class,
            send.message,
            len(content),
            send.offset,
            content[send.offset : send.offset + send.size_bytes],
            now_s,
        )
        self.buffer.add_chunk(chunk)
        if send.last:
            del self._waiting[send.message]
            self._keep(waiting)
            if self._await_room:
                self.tell_room()
        return chunk.packet()

    def _keep(self, waiting: _Waiting) -> None:
        self.memory.keep(len(waiting.content), waiting.traffic_class, self.buffer.sent)

    def _let_go(self) -> None:
        if self.memory.let_go(self.buffer.acknowledged):
            self.tell_room()

    def acknowledged(self, ack: Ack, now_s: float) -> float | None:
        """Chunks have arrived. Returns the round trip, in seconds, if the acknowledgement measures it; None if not.

        Raises:
            PacketError: of a chunk that was never sent.
        """
        was_full = self.buffer.is_full
        last = self.buffer.acknowledge(ack.sequence)
        if last is None:
            return None
        self.progress_s = now_s
        self._let_go()
        departed_s = ack.departed_us / 1e6
        arrivals = [(sequence, departed_s - age_us / 1e6) for sequence, age_us in ack.arrivals]
        self._uplink.acked(self._number, ack.sequence, arrivals, now_s)
        while self._cancels and self._cancels[0][1] < ack.sequence:
            self._cancels.popleft()
        if was_full:
            self.wake()
        if ack.arrivals and ack.arrivals[-1][0] == ack.sequence > self.buffer.resent:
            held_s = ack.arrivals[-1][1] / 1e6
            return max(0.0, now_s - last.sent_s - held_s)
        return None

    def suspend(self, now_s: float) -> None:
        """The connection is gone. What is pushed waits."""
        self._uplink.suspend(self._number, now_s)
        self._control.clear()
        self._pongs.clear()
        self.buffer.resends.clear()

    def resume(self, received: int, now_s: float) -> None:
        """Goes on over another connection; the other end has all chunks up to `received`.

        Raises:
            PacketError: it cannot have that, or has lost what it once acknowledged.
        """
        if received < self.buffer.acknowledged:
            raise PacketError(
                CloseCode.ACKNOWLEDGEMENT, f"chunk {received} is said to be the last after a later one"
            )
        self.buffer.acknowledge(received)
        self.progress_s = now_s
        self._let_go()
        self._uplink.resume(self._number, received, now_s)
        self.buffer.resend()
        self._control.extend(encode_cancel(message) for message, _ in self._cancels)

    def close(self) -> None:
        """The link is gone for good."""
        self._uplink.close(self._number)
        self._waiting.clear()
        self.buffer.resends.clear()
