"""One peer's links to others: the product's scheduler decides what its uplink carries, in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import AckArrival, Outgoing, Send
from molink.peer.wire.transport.acknowledgements import DelayedAcks
from molink.peer.wire.transport.reassembly import MAX_PARTIAL_BYTES, MAX_PARTIAL_MESSAGES
from molink.simnet.core.frames import ACK_BYTES, CHUNK_BYTES, Deliver, SimulatedFrame
from molink.simnet.core.timeline import Alarm, Timeline
from molink.simnet.core.wire import Wire


@dataclass(slots=True)
class _Channel:
    """The way to one peer."""

    number: int
    delay_s: float
    back_s: float
    back_wire: Wire
    deliver: Deliver
    alarm: Alarm = field(init=False)
    acknowledgement: Alarm = field(init=False)
    acknowledging: DelayedAcks = field(default_factory=DelayedAcks)
    sequence: int = 0
    message: int = 0
    frames: dict[int, SimulatedFrame] = field(default_factory=dict)
    """By message, those of which the last chunk has not arrived."""
    sending: bool = False


class Channels:
    """Owner of a peer's uplink scheduler and of what is on its way from it."""

    def __init__(self, timeline: Timeline, wire: Wire, policy: str) -> None:
        """Raises ValueError if there is no such policy."""
        self._timeline = timeline
        self.wire = wire
        self._uplink = Uplink(policy, limit_bytes=MAX_PARTIAL_BYTES, limit_messages=MAX_PARTIAL_MESSAGES)
        self._channels: list[_Channel] = []
        self._has_room: list[Callable[[], None]] = []
        self.decode_ways_s: list[float] = []
        """Of each decode frame: from when it was given to when it was there."""
        self._given_s: dict[tuple[int, int], float] = {}
        self.on_sent: Callable[[SimulatedFrame, int, float], None] | None = None
        """Told of each chunk: of which frame it is, its bytes, and when the last of them has left."""

    @property
    def heeds_due(self) -> bool:
        """Whether prompts go as they are due."""
        return self._uplink.uses_deadlines

    @property
    def uses_forecasts(self) -> bool:
        """Whether it matters when the next decode is expected."""
        return self._uplink.uses_forecasts

    def check(self, now_s: float) -> None:
        """Raises AssertionError where bytes were lost or made, or the wire carried more than it can."""
        self.wire.account.check()
        if self.wire.busy_s(now_s) > now_s * (1 + 1e-9):
            raise AssertionError(f"a wire was busy for {self.wire.busy_s(now_s)} s of {now_s} s")

    def open(self, delay_s: float, back_s: float, back_wire: Wire, deliver: Deliver) -> int:
        """A link to a peer whose messages take `delay_s` beside transmission, and `back_s` back over the peer's own
        uplink, where acknowledgements wait for what else it sends. Its number."""
        number = len(self._channels)
        channel = _Channel(
            number,
            delay_s,
            back_s,
            back_wire,
            deliver,
        )
        channel.alarm = Alarm(self._timeline, partial(self._pump, channel))
        channel.acknowledgement = Alarm(self._timeline, partial(self._acknowledge, channel))
        self._channels.append(channel)
        self._uplink.open(number, self._timeline.now_s)
        self._pump(channel)
        return number

    def post(self, number: int, frame: SimulatedFrame) -> bool:
        """Queues a frame for that link. False, and nothing queued, when there is no room."""
        channel, now_s = self._channels[number], self._timeline.now_s
        message = channel.message + 1
        outgoing = Outgoing(message, frame.traffic_class, frame.size_bytes, frame.sessions, frame.due_s)
        if not self._uplink.push(number, outgoing, now_s):
            return False
        channel.message = message
        channel.frames[message] = frame
        if frame.traffic_class is TrafficClass.DECODE:
            self._given_s[number, message] = now_s
        self._wake()
        return True

    def when_room(self, action: Callable[[], None]) -> None:
        """Calls back once, when something has left."""
        self._has_room.append(action)

    def expect_decode(self, number: int, at_s: float) -> None:
        """When the next decode frame is predicted to be posted there."""
        self._uplink.expect_decode(number, at_s)
        self._wake()

    def _wake(self) -> None:
        wake, channels = self._uplink.wake, self._channels
        while woken := wake():
            for number in woken:
                self._pump(channels[number])

    def _pump(self, channel: _Channel) -> None:
        """Sends what may be sent now."""
        if channel.sending:
            return
        channel.sending = True
        decide, number, now_s = self._uplink.next, channel.number, self._timeline.now_s
        while isinstance(decided := decide(number, now_s), Send):
            self._send(channel, decided)
        channel.sending = False
        channel.alarm.move(decided.until_s)

    def _send(self, channel: _Channel, part: Send) -> None:
        channel.sequence = sequence = channel.sequence + 1
        timeline, size_bytes = self._timeline, part.size_bytes + CHUNK_BYTES
        arrives_s = self.wire.send(size_bytes, channel.delay_s, timeline.now_s)
        timeline.call_at(arrives_s, partial(self._arrive, channel, sequence, part, size_bytes))
        if part.last and self._has_room:
            waiting, self._has_room = self._has_room, []
            for action in waiting:
                self._timeline.call(0.0, action)
        if self.on_sent is not None:
            self.on_sent(channel.frames[part.message], size_bytes, arrives_s - channel.delay_s)

    def _arrive(self, channel: _Channel, sequence: int, part: Send, size_bytes: int) -> None:
        """At the other end."""
        now_s = self._timeline.now_s
        self.wire.received(size_bytes)
        frame, acknowledging = channel.frames[part.message], channel.acknowledging
        acknowledging.record_arrival(sequence, frame.traffic_class, now_s)
        if acknowledging.due_s < channel.acknowledgement.due_s:
            channel.acknowledgement.set(acknowledging.due_s)
        if part.last:
            del channel.frames[part.message]
            if frame.traffic_class is TrafficClass.DECODE:
                given_s = self._given_s.pop((channel.number, part.message))
                self.decode_ways_s.append(now_s - given_s)
            channel.deliver(frame.content)

    def _acknowledge(self, channel: _Channel) -> None:
        """The other end sends what is due; it takes that end's uplink and the way back."""
        sent_s = self._timeline.now_s
        ack = channel.acknowledging.take_ack(sent_s)
        if ack is None:
            channel.acknowledgement.set(channel.acknowledging.due_s)
            return
        arrivals = [(sequence, sent_s - age_us / 1e6) for sequence, age_us in ack.arrivals]
        arrives_s = channel.back_wire.send(ACK_BYTES, channel.back_s, sent_s)
        self._timeline.call_at(arrives_s, partial(self._acked, channel, ack.sequence, arrivals))

    def _acked(self, channel: _Channel, sequence: int, arrivals: list[AckArrival]) -> None:
        channel.back_wire.received(ACK_BYTES)
        self._uplink.acked(channel.number, sequence, arrivals, self._timeline.now_s)
        self._wake()
