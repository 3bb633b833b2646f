"""Packet engine of one link, over all of its connections: messages in, packets out, and back. Pure."""

import itertools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from molink.peer.wire.protocol.packets import (
    Ack,
    Cancel,
    Close,
    CloseCode,
    Data,
    PacketError,
    Ping,
    Pong,
    decode,
    encode_ack,
    encode_cancel,
    encode_ping,
    encode_pong,
)
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.values import LinkEstimate, Outgoing, Send
from molink.peer.wire.transport.acknowledgements import DelayedAcks
from molink.peer.wire.transport.keepalive import TICK_S, KeepAlive, KeepAliveAction, RoundTrips
from molink.peer.wire.transport.message_memory import MemoryAccount, MessageMemory
from molink.peer.wire.transport.reassembly import PROGRESS_S, Reassembly
from molink.peer.wire.transport.retransmit_buffer import RetransmitBuffer, SentChunk
from molink.peer.wire.transport.shared_uplink import SharedUplink

PONGS_WAITING = 16
"""Whoever asks for signs of life faster than they can leave gets fewer."""
UNCOUNTED_BYTES = 4096
"""Messages no longer than this, such as tokens, are bounded by their number alone."""
_SMALL = frozenset((TrafficClass.DECODE, TrafficClass.CONTROL))
"""What has bounds of its own, and never waits for memory."""


class LinkClosed(Exception):
    """The other end has closed the link."""

    def __init__(self, close: Close) -> None:
        super().__init__(close.reason)
        self.code = close.code


@dataclass(slots=True)
class _Waiting:
    """A message of which not everything was sent."""

    traffic_class: TrafficClass
    content: memoryview
    begun: bool = False


class PacketEngine:
    """Packet engine: one end of a link's two directions, without I/O. Times are seconds on one monotonic clock."""

    def __init__(
        self,
        uplink: SharedUplink,
        wake: Callable[[], None],
        measured: Callable[[], None],
        now_s: float,
        holder: MemoryAccount | None = None,
    ) -> None:
        """`wake` is called when `next_packet` may have something sooner than it said, `measured` when the round trip
        was measured FIRST_PINGS times. `holder` is what the link may hold of the process's memory for messages."""
        self.wake = wake
        self.keepalive = KeepAlive(now_s)
        self.round_trips = RoundTrips(measured)
        self._uplink = uplink
        self._number = uplink.open(self, now_s)
        self._messages = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        self._retransmit_buffer = RetransmitBuffer()
        self._again: deque[SentChunk] = deque()
        """To be sent once more, before anything new."""
        self._again_until = 0
        """The last of them: their times say nothing of the round trip."""
        self._cancels: deque[tuple[int, int]] = deque()
        """Message, and the last sequence number sent before its CANCEL, until a later one is acknowledged."""
        self._control: deque[bytes] = deque()
        self._pongs: deque[int] = deque(maxlen=PONGS_WAITING)
        self._holder = holder or MessageMemory().open("")
        self._kept: deque[tuple[int, int, bool]] = deque()
        """Of messages that were sent to their end, or cancelled: the last chunk, the bytes, and whether it was an
        answer; until that chunk is acknowledged."""
        self._progress_s = now_s
        """When the other end last acknowledged anything."""
        self._looked_s = self._awake_s = now_s
        self.answer_bytes = 0
        """Of answers with a payload that the other end has not acknowledged."""
        self._reassembly = Reassembly(holder=self._holder)
        self._delayed_acks = DelayedAcks()
        self._await_room: list[Callable[[], None]] = []

    @property
    def received(self) -> int:
        """The last chunk that has arrived."""
        return self._reassembly.received

    @property
    def acknowledged(self) -> int:
        """The last chunk that the other end has acknowledged."""
        return self._retransmit_buffer.acknowledged

    @property
    def owes_or_is_owed(self) -> bool:
        """Whether anything waits to be sent, or to be acknowledged."""
        return bool(self._waiting) or len(self._retransmit_buffer) > 0

    # -- out

    def push(
        self,
        content: bytes,
        traffic_class: TrafficClass,
        sessions: tuple[bytes, ...],
        now_s: float,
        deadline_s: float = 0.0,
    ) -> bool:
        """Queues a message. False, and nothing queued, when there is no room for it.

        `deadline_s`: as in `transmission.values.Outgoing`.
        """
        size_bytes = len(content)
        counted = size_bytes > UNCOUNTED_BYTES
        if counted and not self._holder.take_out(size_bytes, always=traffic_class in _SMALL):
            return False
        number = next(self._messages)
        self._waiting[number] = _Waiting(traffic_class, memoryview(content))
        outgoing = Outgoing(number, traffic_class, size_bytes, sessions, deadline_s)
        if not self._uplink.push(self._number, outgoing, now_s):
            del self._waiting[number]
            if counted:
                self._holder.give_out(size_bytes)
            return False
        if counted and traffic_class is TrafficClass.WEIGHTS:
            self.answer_bytes += size_bytes
        self.keepalive.used(now_s)
        return True

    def when_room(self, room: Callable[[], None]) -> None:
        """Calls `room` once, when a message has left or was dropped, or the link is closed. It must not push in the
        call."""
        self._await_room.append(room)

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
        if len(waiting.content) > UNCOUNTED_BYTES:
            self._keep(waiting)
            self._let_go()
        if waiting.begun:
            self._cancels.append((message, self._retransmit_buffer.sent))
            self._control.append(encode_cancel(message))
            self.wake()

    def ping(self, now_s: float) -> None:
        """Asks the other end for a sign of life."""
        self._control.append(encode_ping(self.round_trips.asked(now_s)))
        self.wake()

    def tick(self, now_s: float, *, awaits: bool) -> bool:
        """Pings if need be; False if the other end is to be given up. `awaits`: an answer is awaited."""
        verdict = self.keepalive.tick(
            now_s, owed=awaits or self.owes_or_is_owed, measured_s=self.round_trips.measured_s
        )
        if verdict is KeepAliveAction.PING:
            self.ping(now_s)
        return verdict is not KeepAliveAction.LOST

    def stalled(self, now_s: float) -> str | None:
        """To be asked every TICK_S. Why the link is to be ended though the other end lives: it leaves something of this
        end's memory taken, and does nothing about it for PROGRESS_S. None: there is no reason."""
        if now_s - self._looked_s > 2 * TICK_S:
            self._awake_s = now_s  # this end slept, and the other one with it for all it knows
        self._looked_s = now_s
        if now_s - self._awake_s < PROGRESS_S:
            return None
        begun_s = self._reassembly.waits_since_s()
        if begun_s is not None and now_s - begun_s > PROGRESS_S:
            return f"nothing more has come of a message for {PROGRESS_S:g} s"
        if now_s - max(self._progress_s, self._retransmit_buffer.oldest_s) > PROGRESS_S:
            return f"nothing was acknowledged for {PROGRESS_S:g} s"
        return None

    def next_packet(self, now_s: float) -> bytes | float:
        """Returns the packet that leaves next; or when to ask again, in seconds, if `wake` does not come first."""
        ack = self._delayed_acks.take_ack(now_s)
        if ack is not None:
            return encode_ack(ack)
        if self._again:
            return self._again.popleft().packet()
        if self._control:
            return self._control.popleft()
        if self._pongs:
            return encode_pong(self._pongs.popleft())
        wait_s = math.inf
        if not self._retransmit_buffer.is_full:
            decided = self._uplink.next(self._number, now_s)
            if isinstance(decided, Send):
                return self._send(decided, now_s)
            wait_s = decided.until_s
        return min(wait_s, self._delayed_acks.due_s)

    def _send(self, send: Send, now_s: float) -> bytes:
        waiting = self._waiting[send.message]
        waiting.begun = True
        content = waiting.content
        chunk = SentChunk(
            self._retransmit_buffer.sent + 1,
            waiting.traffic_class,
            send.message,
            len(content),
            send.offset,
            content[send.offset : send.offset + send.size_bytes],
            now_s,
        )
        self._retransmit_buffer.add_chunk(chunk)
        if send.last:
            del self._waiting[send.message]
            if len(waiting.content) > UNCOUNTED_BYTES:
                self._keep(waiting)
            if self._await_room:
                self.tell_room()
        return chunk.packet()

    def _keep(self, waiting: _Waiting) -> None:
        """Nothing more of a counted message will be sent: its memory is free when what was sent is acknowledged."""
        is_answer = waiting.traffic_class is TrafficClass.WEIGHTS
        self._kept.append((self._retransmit_buffer.sent, len(waiting.content), is_answer))

    def _let_go(self) -> None:
        """Of messages that are acknowledged."""
        kept, acknowledged, answered = self._kept, self._retransmit_buffer.acknowledged, False
        while kept and kept[0][0] <= acknowledged:
            _, size_bytes, is_answer = kept.popleft()
            self._holder.give_out(size_bytes)
            if is_answer:
                self.answer_bytes -= size_bytes
                answered = True
        if answered:
            self.tell_room()

    def tell_room(self) -> None:
        """Calls back who waits for room: there may be some where `push` found none."""
        if self._await_room:
            told, self._await_room = self._await_room, []
            for room in told:
                room()

    # -- in

    def on_packet(self, data: bytes, now_s: float) -> memoryview | None:
        """Takes in a packet. Returns the message that it makes whole, if it does.

        Raises:
            PacketError: the protocol does not allow it.
            LinkClosed: the other end closes the link.
        """
        packet = decode(data)
        self.keepalive.heard_s = now_s
        if isinstance(packet, Data):
            message = self._reassembly.add_chunk(packet, now_s)
            self._delayed_acks.record_arrival(packet.sequence, packet.traffic_class, now_s)
            self.keepalive.used(now_s)
            return message
        if isinstance(packet, Ack):
            self._acknowledged(packet, now_s)
        elif isinstance(packet, Ping):
            self._pongs.append(packet.number)
            self.wake()
        elif isinstance(packet, Pong):
            self.round_trips.answered(packet.number, now_s)
        elif isinstance(packet, Cancel):
            self._reassembly.drop_message(packet.message)
        else:
            raise LinkClosed(packet)
        return None

    def _acknowledged(self, ack: Ack, now_s: float) -> None:
        was_full = self._retransmit_buffer.is_full
        last = self._retransmit_buffer.acknowledge(ack.sequence)
        if last is None:
            return
        self._progress_s = now_s
        if self._kept:
            self._let_go()
        departed_s = ack.departed_us / 1e6
        arrivals = [(sequence, departed_s - age_us / 1e6) for sequence, age_us in ack.arrivals]
        self._uplink.acked(self._number, ack.sequence, arrivals, now_s)
        while self._cancels and self._cancels[0][1] < ack.sequence:
            self._cancels.popleft()
        if ack.arrivals and ack.arrivals[-1][0] == ack.sequence > self._again_until:
            held_s = ack.arrivals[-1][1] / 1e6
            self.round_trips.acknowledged(max(0.0, now_s - last.sent_s - held_s), now_s)
        if was_full:
            self.wake()

    def forget_unfinished(self) -> None:
        """Drops what has come of messages that are not whole: the link is about to be closed."""
        self._reassembly.clear()

    # -- connections

    def suspend(self, now_s: float) -> None:
        """The connection is gone. What is pushed waits."""
        self._uplink.suspend(self._number, now_s)
        self._control.clear()
        self._pongs.clear()
        self.round_trips.forget_pings()
        self._again.clear()

    def resume(self, received: int, now_s: float) -> None:
        """Goes on over another connection; the other end has all chunks up to `received`, and knows `self.received`.

        Raises:
            PacketError: it cannot have that, or has lost what it once acknowledged.
        """
        if received < self._retransmit_buffer.acknowledged:
            raise PacketError(
                CloseCode.ACKNOWLEDGEMENT, f"chunk {received} is said to be the last after a later one"
            )
        self._retransmit_buffer.acknowledge(received)
        self._progress_s = now_s
        self._let_go()
        self._uplink.resume(self._number, received, now_s)
        self._delayed_acks.reset()
        self._again.extend(self._retransmit_buffer.chunks_in_flight())
        self._again_until = self._retransmit_buffer.sent
        self._control.extend(encode_cancel(message) for message, _ in self._cancels)
        self.keepalive.excuse(now_s)
        self.wake()

    def close(self) -> None:
        """The link is gone for good."""
        self._uplink.close(self._number)
        self._waiting.clear()
        self._again.clear()
        self._reassembly.clear()
        self._holder.close()
        self.tell_room()
