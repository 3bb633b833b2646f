"""Virtual time: what happens when. The only module that knows SimPy."""

import math
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush

import simpy
from simpy.events import NORMAL, Event


class _Action(Event):
    """A SimPy event that is an action. It skips what a Timeout does for processes, which there are none of."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action


class Timeline(simpy.Environment):
    """Calls actions at their times, in order; those of one time in the order in which they were given.

    SimPy's clock and its queue of events. As all of them are actions, they are called without what SimPy does for
    processes that wait for an event.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        """Seconds since the world began."""
        self.events = 0
        """Actions called so far, and those that are still to be."""

    @property
    def next_s(self) -> float:
        """When the next action is due; infinite if none is."""
        return self.peek()

    def call(self, delay_s: float, action: Callable[[], None]) -> None:
        """Calls `action` in so many seconds.

        Raises:
            ValueError: that is in the past, or never.
        """
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"an action happens in 0 or more seconds, not in {delay_s}")
        heappush(self._queue, (self._now + delay_s, NORMAL, next(self._eid), _Action(action)))
        self.events += 1

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """The same at a time, which rounding may have put a little before now."""
        delay_s = at_s - self.now_s
        if delay_s < 0.0:
            delay_s = 0.0
        elif not delay_s < math.inf:
            raise ValueError(f"an action happens in 0 or more seconds, not in {delay_s}")
        heappush(self._queue, (self._now + delay_s, NORMAL, next(self._eid), _Action(action)))
        self.events += 1

    def run(self, until_s: float = math.inf) -> None:  # type: ignore[override]
        """Until nothing is left to happen, or that time has come: what is due then has not happened yet."""
        if until_s <= self.now_s:
            return
        queue, stop_s = self._queue, self._now + (until_s - self._now)
        while queue and queue[0][0] < stop_s:
            self._now, _, _, event = heappop(queue)
            self.now_s = self._now
            event.action()  # type: ignore[attr-defined]
        if until_s < math.inf:
            self._now, self.now_s = stop_s, until_s

    def step(self) -> None:
        """Calls the next action; one must be due."""
        self._now, _, _, event = heappop(self._queue)
        self.now_s = self._now
        event.action()  # type: ignore[attr-defined]


class Alarm:
    """One action that is due at a time that may be brought forward. An earlier call for a later time has no effect."""

    __slots__ = ("_action", "_timeline", "due_s")

    def __init__(self, timeline: Timeline, action: Callable[[], None]) -> None:
        self._timeline = timeline
        self._action = action
        self.due_s = math.inf
        """When it rings."""

    def set(self, at_s: float) -> None:
        """Rings at that time, unless it rings earlier anyway. Never, if that is infinite."""
        if at_s >= self.due_s:
            return
        timeline = self._timeline
        if at_s < timeline.now_s:
            at_s = timeline.now_s
        self.due_s = at_s
        timeline.call_at(at_s, partial(self._ring, at_s))

    def _ring(self, at_s: float) -> None:
        if at_s == self.due_s:
            self.due_s = math.inf
            self._action()
