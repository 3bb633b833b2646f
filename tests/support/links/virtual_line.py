"""A line in virtual time: bottlenecks in a row, propagation delay, a receiver that acknowledges by its own clock.

Deterministic: what varies (late timers, jitter) comes from a seed. Every chunk is checked on arrival: in order, once.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from molink.peer.wire.transmission.classes import TrafficClass
from molink.peer.wire.transmission.uplink import Uplink
from molink.peer.wire.transmission.values import AckArrival, Outgoing, Send, Wait

ACK_CHUNKS = 2
ACK_DELAY_S = 0.004
ACK_INTERVAL_S = 0.005
STALL_EVERY = 3.0
"""Bursts of jitter come so many times their longest duration apart, on average."""


class Clock:
    """Runs what is due in the order of time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._ties = itertools.count()

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._due, (max(when_s, self.now_s), next(self._ties), action))

    def run(self, until_s: float) -> None:
        while self._due and self._due[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._due)
            action()
        self.now_s = until_s


class Bottleneck:
    """A FIFO queue without drops before a line of some rate."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.queued_bytes = 0
        self.most_queued_bytes = 0
        self._clock = clock
        self._queue: deque[tuple[int, Callable[[], None]]] = deque()

    def put(self, size_bytes: int, then: Callable[[], None]) -> None:
        self._queue.append((size_bytes, then))
        self.queued_bytes += size_bytes
        self.most_queued_bytes = max(self.most_queued_bytes, self.queued_bytes)
        if len(self._queue) == 1:
            self._serve()

    def _serve(self) -> None:
        size_bytes, then = self._queue[0]

        def served() -> None:
            self._queue.popleft()
            self.queued_bytes -= size_bytes
            then()
            if self._queue:
                self._serve()

        self._clock.at(self._clock.now_s + size_bytes / self.bytes_per_s, served)


class Way:
    """Propagation one way, in order, as a radio link does it: what is held up holds up all that is behind it."""

    def __init__(self, conditions: "Conditions", seed: str) -> None:
        self._conditions = conditions
        self._random = random.Random(seed)
        self._last_s = 0.0
        self._stall_s = self._stalled_until_s = 0.0

    def arrival_s(self, now_s: float) -> float:
        """When what enters now comes out."""
        jitter_s = self._conditions.path_jitter_s
        at_s = now_s + self._conditions.delay_s
        if jitter_s and not self._conditions.bursty:
            at_s += self._random.uniform(0.0, jitter_s)
        elif jitter_s:
            while self._stalled_until_s < at_s:
                self._stall_s = self._stalled_until_s + self._random.expovariate(1 / (STALL_EVERY * jitter_s))
                self._stalled_until_s = self._stall_s + self._random.uniform(0.0, jitter_s)
            if at_s >= self._stall_s:
                at_s = self._stalled_until_s
        self._last_s = max(self._last_s, at_s)
        return self._last_s


@dataclass
class Conditions:
    """What is imperfect."""

    delay_s: float = 0.015
    path_jitter_s: float = 0.0
    """The most by which the way is longer at times, in each direction: for every chunk anew, or `bursty`."""
    bursty: bool = False
    """Nothing comes out for up to so long, and then all of it."""
    ack_jitter_s: float = 0.0
    arrival_jitter_s: float = 0.0
    late_timer_s: float = 0.0
    clock_offset_s: float = 123.0
    clock_skew: float = 0.0
    seed: int = 1


@dataclass
class Delivered:
    traffic_class: TrafficClass
    pushed_s: float
    at_s: float
    size_bytes: int

    @property
    def delay_s(self) -> float:
        return self.at_s - self.pushed_s


@dataclass
class VirtualLink:
    """One link of an uplink: its writer, and the other end."""

    uplink: Uplink
    clock: Clock
    number: int
    way: list[Bottleneck]
    conditions: Conditions
    delivered: list[Delivered] = field(default_factory=list)
    on_delivered: Callable[[Delivered], None] = lambda _: None
    on_acked: Callable[[], None] = lambda: None
    chunks: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.conditions.seed * 1000 + self.number)
        self._messages: dict[int, tuple[Outgoing, float]] = {}
        self._numbers = itertools.count(1)
        self._offsets: dict[int, int] = {}
        self._received = 0
        self._connection = 1
        self._unacknowledged: dict[int, Send] = {}
        self._pending: list[AckArrival] = []
        self._last_stamp_s = 0.0
        self._last_ack_s = 0.0
        self._acknowledged_s = 0.0
        self._there = Way(self.conditions, f"{self.conditions.seed} {self.number} there")
        self._back = Way(self.conditions, f"{self.conditions.seed} {self.number} back")
        self._asks = 0
        self.uplink.open(self.number, self.clock.now_s)

    def push(self, traffic_class: TrafficClass, size_bytes: int, sessions: tuple[bytes, ...] = ()) -> bool:
        outgoing = Outgoing(next(self._numbers), traffic_class, size_bytes, sessions)
        taken = self.uplink.push(self.number, outgoing, self.clock.now_s)
        if taken:
            self._messages[outgoing.number] = (outgoing, self.clock.now_s)
        return taken

    def write(self) -> None:
        """Sends until the scheduler says to wait."""
        self._asks += 1
        decided: Send | Wait | None = None
        while self.is_writable() and isinstance(
            decided := self.uplink.next(self.number, self.clock.now_s), Send
        ):
            self.chunks += 1
            self._unacknowledged[self.chunks] = decided
            self._carry(decided, self.chunks, 0, self._connection)
        if isinstance(decided, Wait) and decided.until_s < float("inf"):
            asked = self._asks
            late_s = self._random.uniform(0, self.conditions.late_timer_s)
            self.clock.at(decided.until_s + late_s, lambda: self.write() if asked == self._asks else None)

    def is_writable(self) -> bool:
        """Whether the transport takes another chunk."""
        return True

    def break_for(self, seconds: float) -> None:
        """The connection breaks, with all that is on its way; after so long there is another."""
        self._connection += 1
        self._pending.clear()
        self.uplink.suspend(self.number, self.clock.now_s)
        self.clock.at(self.clock.now_s + seconds, self._reconnected)

    def _reconnected(self) -> None:
        self._last_ack_s = self.clock.now_s
        self._forget(self._received)
        self.uplink.resume(self.number, self._received, self.clock.now_s)
        for sequence, part in self._unacknowledged.items():
            self._carry(part, sequence, 0, self._connection)
        self.write()

    def _forget(self, acknowledged: int) -> None:
        for sequence in [one for one in self._unacknowledged if one <= acknowledged]:
            del self._unacknowledged[sequence]

    def _carry(self, part: Send, sequence: int, hop: int, connection: int) -> None:
        if hop < len(self.way):
            self.way[hop].put(part.size_bytes, lambda: self._carry(part, sequence, hop + 1, connection))
        else:
            at_s = self._there.arrival_s(self.clock.now_s)
            self.clock.at(at_s, lambda: self._arrive(part, sequence, connection))

    def _arrive(self, part: Send, sequence: int, connection: int) -> None:
        if connection != self._connection:
            return
        assert sequence == self._received + 1
        self._received = sequence
        outgoing, pushed_s = self._messages[part.message]
        assert part.offset == self._offsets.get(part.message, 0)
        self._offsets[part.message] = part.offset + part.size_bytes
        assert part.last == (self._offsets[part.message] == outgoing.size_bytes)
        if part.last:
            done = Delivered(outgoing.traffic_class, pushed_s, self.clock.now_s, outgoing.size_bytes)
            self.delivered.append(done)
            self.on_delivered(done)
        stamp_s = self.clock.now_s * (1 + self.conditions.clock_skew) + self.conditions.clock_offset_s
        stamp_s += self._random.uniform(0, self.conditions.arrival_jitter_s)
        self._last_stamp_s = max(stamp_s, self._last_stamp_s)
        self._pending.append((sequence, self._last_stamp_s))
        if len(self._pending) >= ACK_CHUNKS or self.clock.now_s - self._acknowledged_s >= ACK_INTERVAL_S:
            self._acknowledge(sequence)
        else:
            self.clock.at(self.clock.now_s + ACK_DELAY_S, lambda: self._acknowledge(sequence))

    def _acknowledge(self, sequence: int) -> None:
        if not self._pending or self._pending[0][0] > sequence:
            return
        arrivals, self._pending = self._pending, []
        self._acknowledged_s = self.clock.now_s
        jitter_s = self._random.uniform(0, self.conditions.ack_jitter_s)
        self._last_ack_s = max(self._last_ack_s, self._back.arrival_s(self.clock.now_s) + jitter_s)
        connection = self._connection
        self.clock.at(
            self._last_ack_s, lambda: self._acked(arrivals) if connection == self._connection else None
        )

    def _acked(self, arrivals: list[AckArrival]) -> None:
        self._forget(arrivals[-1][0])
        self.uplink.acked(self.number, arrivals[-1][0], arrivals, self.clock.now_s)
        self.on_acked()


class VirtualUplink:
    """Links of one process that share an uplink."""

    def __init__(self, policy: str, bytes_per_s: float, conditions: Conditions, links: int = 1) -> None:
        self.clock = Clock()
        self.uplink = Uplink(policy)
        self.bottleneck = Bottleneck(self.clock, bytes_per_s)
        self.links = [
            VirtualLink(self.uplink, self.clock, number, [self.bottleneck], conditions)
            for number in range(links)
        ]

    def push(self, link: int, traffic_class: TrafficClass, size_bytes: int, session: bytes = b"") -> bool:
        taken = self.links[link].push(traffic_class, size_bytes, (session,) if session else ())
        self.wake()
        return taken

    def wake(self) -> None:
        for number in self.uplink.wake():
            self.links[number].write()

    def start(self) -> None:
        """Asks each link once, as its writer does when it begins; afterwards acks wake."""
        for link in self.links:
            link.write()
            link.on_acked = self.wake

    def every(
        self, link: int, size_bytes: int, period_s: float, until_s: float, start_s: float = 0.0
    ) -> None:
        """Decodes of one micro-batch leave every `period_s`."""

        def decode() -> None:
            self.push(link, TrafficClass.DECODE, size_bytes, b"decode")
            if self.clock.now_s + period_s < until_s:
                self.clock.at(self.clock.now_s + period_s, decode)

        self.clock.at(start_s, decode)

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        self.clock.at(when_s, action)

    def delays_s(
        self, link: int, traffic_class: TrafficClass, from_s: float = 0.0, to_s: float = 1e9
    ) -> list[float]:
        return sorted(
            done.delay_s
            for done in self.links[link].delivered
            if done.traffic_class is traffic_class and from_s <= done.pushed_s < to_s
        )


def quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
