"""One direction of an emulated line: when bytes leave it, as a pure function of when they came.

Bytes leave in the order in which they came, at the line's rate, whatever connection they belong to: two connections of
one home share its uplink. Times are seconds on the caller's clock. A caller that looks late gets the departures at the
times at which they happened, so being late never changes the mean rate.
"""

import collections
import math
import random
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

LEAST_QUEUE_BYTES = 16 * 1024
MOST_QUEUE_BYTES = 8 * 1024 * 1024
"""Of a line of unlimited rate, too."""
QUANTUM_S = 0.65e-3
"""What one connection puts on a line at once lasts about so long: 8 KB at 100 Mbps."""
LEAST_QUANTUM_BYTES = 1448
MOST_QUANTUM_BYTES = 32 * 1024
JITTER_PERIODS = 4
"""The delay wanders to a value newly drawn in so many times the jitter: slowly enough that order is kept."""


@dataclass(frozen=True, slots=True)
class LineCounters:
    """What a line has done since it was made."""

    sent_bytes: int
    busy_s: float
    """Time in which bytes were leaving. Over the time that passed it is the utilisation, never above 1."""
    chunks: int
    queueing_s: float
    """Sum over chunks of the wait before their first byte left."""
    waiting_bytes: int


class PropagationDelay:
    """Propagation delay of a line, with jitter: value noise, linear between values drawn at even distances."""

    __slots__ = ("_drawn", "_seed", "fixed_s", "jitter_s")

    def __init__(self, fixed_s: float, jitter_s: float, seed: int) -> None:
        self.fixed_s, self.jitter_s = fixed_s, jitter_s
        self._seed = seed
        self._drawn = (-1.0, 0.0, 0.0)
        """The period of the jitter that was last asked for, and what was drawn at its begin and end."""

    def extra_s(self, at_s: float) -> float:
        """On top of what is fixed, for what leaves at that time."""
        if not self.jitter_s:
            return 0.0
        step, part = divmod(at_s / (JITTER_PERIODS * self.jitter_s), 1.0)
        if step != self._drawn[0]:
            before, after = (random.Random(f"{self._seed} {step + i:.0f}").random() for i in (0, 1))
            self._drawn = step, before, after
        _, before, after = self._drawn
        return self.jitter_s * (before + (after - before) * part)


class Line(Generic[Item]):
    """A queue without drops behind a rate, then a delay. The items are the caller's; it offers and takes them.

    `rate_mbps` in 1e6 bits of payload a second, above 0, may be infinite. `delay_ms` one way. `jitter_ms`: the delay
    wanders between `delay_ms` and `delay_ms + jitter_ms`, the same way for the same seed. `queue_ms`: the line is
    full while what waits would take it so long; whoever fills it stops reading then. ValueError if out of range.
    """

    def __init__(
        self,
        rate_mbps: float = math.inf,
        delay_ms: float = 0.0,
        jitter_ms: float = 0.0,
        queue_ms: float = 100.0,
        seed: int = 0,
    ) -> None:
        if not rate_mbps > 0:
            raise ValueError(f"the rate of a line must be above 0 Mbps, not {rate_mbps}")
        if not (0 <= delay_ms < math.inf and 0 <= jitter_ms < math.inf and 0 <= queue_ms < math.inf):
            raise ValueError("delay, jitter and queue of a line are finite and at least 0 ms")
        self.delay = PropagationDelay(delay_ms / 1000, jitter_ms / 1000, seed)
        self.waiting_bytes = 0
        self._rate = rate_mbps * 125_000
        self._queue_s = queue_ms / 1000
        self._waiting: collections.deque[tuple[Item, int, float]] = collections.deque()
        self._free_s = -math.inf
        self._left_bytes = 0.0
        self._sent_bytes = self._chunks = 0
        self._busy_s = self._queueing_s = 0.0

    @property
    def rate_mbps(self) -> float:
        return self._rate / 125_000

    @property
    def quantum_bytes(self) -> int:
        """The most that one connection should offer at once."""
        return int(min(max(self._rate * QUANTUM_S, LEAST_QUANTUM_BYTES), MOST_QUANTUM_BYTES))

    @property
    def limit_bytes(self) -> float:
        """The queue at which the line is full."""
        return min(max(self._rate * self._queue_s, LEAST_QUEUE_BYTES), MOST_QUEUE_BYTES)

    @property
    def full(self) -> bool:
        return self.waiting_bytes >= self.limit_bytes

    @property
    def next_s(self) -> float:
        """When the next item leaves; infinite while none waits."""
        return self._free_s + self._left_bytes / self._rate if self._waiting else math.inf

    @property
    def free_s(self) -> float:
        """When what leaves now, or left last, has left."""
        return self._free_s

    @property
    def first(self) -> Item:
        """What leaves next. IndexError if nothing waits."""
        return self._waiting[0][0]

    def roomy_s(self, part: float) -> float:
        """When no more than that part of the limit will wait, if nothing comes."""
        return self._free_s + max(0.0, self.waiting_bytes - part * self.limit_bytes) / self._rate

    def offer(self, item: Item, size_bytes: int, at_s: float) -> None:
        """The item comes to the line. `at_s` must not go back. A full line takes it all the same: nothing is lost."""
        self._waiting.append((item, size_bytes, at_s))
        self.waiting_bytes += size_bytes
        if len(self._waiting) == 1:
            self._begin()

    def depart(self, now_s: float) -> list[tuple[Item, float]]:
        """Everything that has left by `now_s`, in order, each with the time at which it reaches the other end."""
        departed = []
        while self._waiting and (left_s := self.next_s) <= now_s:
            item, size_bytes, _ = self._waiting.popleft()
            self._busy_s += left_s - self._free_s
            self._free_s = left_s
            self.waiting_bytes -= size_bytes
            self._sent_bytes += size_bytes
            self._chunks += 1
            departed.append((item, left_s + self.delay.fixed_s + self.delay.extra_s(left_s)))
            if self._waiting:
                self._begin()
        return departed

    def carry(self, size_bytes: int, at_s: float) -> float:
        """An item comes to a line that is asked for nothing else, and leaves it: `offer` and `depart` at once. When it
        reaches the other end. IndexError if something waits."""
        if self._waiting:
            raise IndexError("something waits for the line")
        free_s = self._free_s
        if free_s > at_s:
            queueing_s = free_s - at_s
            self._queueing_s += queueing_s
        else:
            free_s = at_s
        self._free_s = left_s = free_s + size_bytes / self._rate
        self._busy_s += left_s - free_s
        self._sent_bytes += size_bytes
        self._chunks += 1
        delay = self.delay
        return left_s + delay.fixed_s + (delay.extra_s(left_s) if delay.jitter_s else 0.0)

    def set_rate(self, rate_mbps: float, now_s: float) -> None:
        """Another rate from now on, also for what already waits. `depart(now_s)` first. ValueError if not above 0."""
        if not rate_mbps > 0:
            raise ValueError(f"the rate of a line must be above 0 Mbps, not {rate_mbps}")
        if self._waiting and now_s > self._free_s:
            self._busy_s += now_s - self._free_s
            self._left_bytes = max(0.0, self._left_bytes - (now_s - self._free_s) * self._rate)
            self._free_s = now_s
        self._rate = rate_mbps * 125_000

    def counters(self) -> LineCounters:
        return LineCounters(
            self._sent_bytes,
            self._busy_s,
            self._chunks,
            self._queueing_s,
            self.waiting_bytes,
        )

    def _begin(self) -> None:
        """The first in the queue begins to leave when it is there and the line is free."""
        _, size_bytes, came_s = self._waiting[0]
        queueing_s = max(0.0, self._free_s - came_s)
        self._queueing_s += queueing_s
        self._free_s = max(self._free_s, came_s)
        self._left_bytes = size_bytes
