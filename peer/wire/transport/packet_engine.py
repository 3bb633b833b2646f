"""Packet engine of one link, over all of its connections: messages in, packets out, and back. Pure."""

from collections.abc import Callable

from molink.peer.wire.protocol.packets import (
    Ack,
    Cancel,
    Close,
    Data,
    Ping,
    Pong,
    decode,
    encode_ack,
    encode_ping,
)
from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.values import LinkEstimate
from molink.peer.wire.transport.acknowledgements import DelayedAcks
from molink.peer.wire.transport.keepalive import BUSY_LOST_AFTER_S, KeepAlive, KeepAliveAction, RoundTrips
from molink.peer.wire.transport.message_memory import MemoryAccount, MessageMemory
from molink.peer.wire.transport.packet_sender import PacketSender
from molink.peer.wire.transport.progress_watch import ProgressWatch
from molink.peer.wire.transport.reassembly import Reassembly
from molink.peer.wire.transport.shared_uplink import SharedUplink


class LinkClosed(Exception):
    """The other end has closed the link."""

    def __init__(self, close: Close) -> None:
        super().__init__(close.reason)
        self.code = close.code


class PacketEngine:
    """Packet engine: one end of a link's two directions, without I/O. Times are seconds on one monotonic clock."""

    def __init__(
        self,
        uplink: SharedUplink,
        wake: Callable[[], None],
        measured: Callable[[], None],
        now_s: float,
        holder: MemoryAccount | None = None,
        busy_lost_after_s: float = BUSY_LOST_AFTER_S,
    ) -> None:
        """`wake` is called when `next_packet` may have something sooner than it said, `measured` when the round trip
        was measured FIRST_PINGS times. `holder` is what the link may hold of the process's memory for messages."""
        holder = holder or MessageMemory().open("")
        self.keepalive = KeepAlive(now_s, busy_lost_after_s)
        self.round_trips = RoundTrips(measured)
        self._wake = wake
        self._sender = PacketSender(uplink, wake, now_s, holder)
        self._reassembly = Reassembly(holder=holder)
        self._delayed_acks = DelayedAcks()
        self._progress = ProgressWatch(now_s)

    @property
    def received(self) -> int:
        """The last chunk that has arrived."""
        return self._reassembly.received

    @property
    def acknowledged(self) -> int:
        """The last chunk that the other end has acknowledged."""
        return self._sender.buffer.acknowledged

    @property
    def owes_or_is_owed(self) -> bool:
        """Whether anything waits to be sent, or to be acknowledged."""
        return self._sender.owes_or_is_owed

    @property
    def answer_bytes(self) -> int:
        """Of answers with a payload that the other end has not acknowledged."""
        return self._sender.memory.answer_bytes

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
        taken = self._sender.push(content, traffic_class, sessions, now_s, deadline_s)
        if taken:
            self.keepalive.used(now_s)
        return taken

    def when_room(self, room: Callable[[], None]) -> None:
        """Calls `room` once, when a message has left or was dropped, or the link is closed. It must not push in the
        call."""
        self._sender.when_room(room)

    def tell_room(self) -> None:
        """Calls back who waits for room: there may be some where `push` found none."""
        self._sender.tell_room()

    def expect_decode(self, at_s: float) -> None:
        """When the next decode is predicted to be pushed here."""
        self._sender.expect_decode(at_s)

    def estimate(self) -> LinkEstimate:
        """Returns the estimate of the link's bandwidth, delay and window."""
        return self._sender.estimate()

    def ping(self, now_s: float) -> None:
        """Asks the other end for a sign of life."""
        self._sender.say(encode_ping(self.round_trips.asked(now_s)))

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
        sender = self._sender
        unanswered_s = max(sender.progress_s, sender.buffer.oldest_s)
        return self._progress.stalled(self._reassembly.waits_since_s(), unanswered_s, now_s)

    def next_packet(self, now_s: float) -> bytes | float:
        """Returns the packet that leaves next; or when to ask again, in seconds, if `wake` does not come first."""
        acks = self._delayed_acks
        ack = acks.take_ack(now_s)
        if ack is not None:
            return encode_ack(ack)
        packet = self._sender.next_packet(now_s)
        return packet if isinstance(packet, bytes) else min(packet, acks.due_s)

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
            rtt_s = self._sender.acknowledged(packet, now_s)
            if rtt_s is not None:
                self.round_trips.acknowledged(rtt_s, now_s)
        elif isinstance(packet, Ping):
            self._sender.answer_ping(packet.number)
        elif isinstance(packet, Pong):
            self.round_trips.answered(packet.number, now_s)
        elif isinstance(packet, Cancel):
            self._reassembly.drop_message(packet.message)
        else:
            raise LinkClosed(packet)
        return None

    def forget_unfinished(self) -> None:
        """Drops what has come of messages that are not whole: the link is about to be closed."""
        self._reassembly.clear()

    # -- connections

    def suspend(self, now_s: float) -> None:
        """The connection is gone. What is pushed waits."""
        self._sender.suspend(now_s)
        self.round_trips.forget_pings()

    def resume(self, received: int, now_s: float) -> None:
        """Goes on over another connection; the other end has all chunks up to `received`, and knows `self.received`.

        Raises:
            PacketError: it cannot have that, or has lost what it once acknowledged.
        """
        self._sender.resume(received, now_s)
        self._delayed_acks.reset()
        self.keepalive.excuse(now_s)
        self._wake()

    def close(self) -> None:
        """The link is gone for good."""
        self._sender.close()
        self._reassembly.clear()
        self._sender.memory.close()
        self._sender.tell_room()
