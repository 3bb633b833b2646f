"""Transit over emulated lines: which chunks of flows are on which line, and when each arrives. Without a clock."""

import heapq
import itertools
import math
from typing import Protocol

from molink.simnet.lines.line import Line

ROOMY = 0.96
"""A line that was full is read into again when so much of its queue is taken: not for every chunk that leaves."""


class Flow(Protocol):
    """One direction of a connection, as the lines see it."""

    path: "tuple[Line[Chunk], ...]"
    delay_s: float
    """Of its own, on top of the lines'."""
    due_s: float
    """When its last chunk leaves its first leg: a later one is never earlier."""

    def deliver(self, data: bytes) -> None:
        """The bytes are there. None: the end of the stream."""

    def update(self) -> None:
        """There may be room in its lines again."""


class Chunk:
    """Some bytes of a flow on their way; `stage` lines are behind them."""

    __slots__ = ("data", "flow", "stage")

    def __init__(self, flow: Flow, data: bytes) -> None:
        self.flow = flow
        self.data = data
        self.stage = 0


class Transit:
    """Transit: chunks that wait for a line, fly on from one, and flows that wait for room on one."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._flying: list[tuple[float, int, Chunk]] = []
        self._busy: dict[Line[Chunk], None] = {}
        self._full: dict[Line[Chunk], dict[Flow, None]] = {}

    def offer(self, flow: Flow, data: bytes, now_s: float) -> None:
        """Bytes come to the first line of their flow."""
        self._place(Chunk(flow, data), now_s)

    def wait_for_room(self, flow: Flow) -> bool:
        """True if a line of the flow is full: then the flow's `update` is called when there is room.

        A line that was full is so for everybody until then, or whoever asks most often would take all the room.
        """
        for line in flow.path:
            if line.full or line in self._full:
                self._full.setdefault(line, {})[flow] = None
                return True
        return False

    def next_s(self) -> float:
        """When something arrives, or a full line has room."""
        times = [self._flying[0][0]] if self._flying else []
        times += [line.next_s + line.delay.fixed_s + line.first.flow.delay_s for line in self._busy]
        times += [line.roomy_s(ROOMY) for line in self._full]
        return min(times, default=math.inf)

    def advance(self, now_s: float) -> None:
        """All that happened on the lines until now, in order."""
        self._depart(now_s)
        while self._flying and self._flying[0][0] <= now_s:
            due_s, _, chunk = heapq.heappop(self._flying)
            if chunk.stage < len(chunk.flow.path):
                self._place(chunk, due_s)
                self._depart(now_s)
            else:
                chunk.flow.deliver(chunk.data)

    def update_roomy(self) -> None:
        """Flows that waited for lines that have room again."""
        roomy = [line for line in self._full if line.waiting_bytes <= ROOMY * line.limit_bytes]
        for flow in [flow for line in roomy for flow in self._full.pop(line)]:
            flow.update()

    def _place(self, chunk: Chunk, at_s: float) -> None:
        line = chunk.flow.path[chunk.stage]
        line.offer(chunk, len(chunk.data), at_s)
        self._busy[line] = None

    def _depart(self, now_s: float) -> None:
        """What has left its line flies to the next one, or to the socket. The flow's own delay is in its first leg."""
        for line in tuple(self._busy):
            for chunk, due_s in line.depart(now_s):
                flow = chunk.flow
                if chunk.stage == 0:
                    flow.due_s = max(flow.due_s, due_s + flow.delay_s)
                chunk.stage += 1
                heapq.heappush(
                    self._flying, (flow.due_s if chunk.stage == 1 else due_s, next(self._numbers), chunk)
                )
            if line.next_s == math.inf:
                del self._busy[line]
