"""Virtual time: what happens when."""

import math
from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Timeline:
    """A discrete-event loop: calls actions at their times, in order; those of one time in the order in which they were
    given. Decision 0029 says why it is not SimPy's."""

    def __init__(self) -> None:
        self._queue: list[tuple[float, int, Action]] = []
        self.now_s = 0.0
        """Seconds since the world began."""
        self.events = 0
        """Actions called so far, and those that are still to be."""

    @property
    def next_s(self) -> float:
        """When the next action is due; infinite if none is."""
        return self._queue[0][0] if self._queue else math.inf

    def call(self, delay_s: float, action: Action) -> None:
        """Calls `action` in so many seconds.

        Raises:
            ValueError: that is in the past, or never.
        """
        if not 0.0 <= delay_s < math.inf:
            raise ValueError(f"an action happens in 0 or more seconds, not in {delay_s}")
        self.events = number = self.events + 1
        heappush(self._queue, (self.now_s + delay_s, number, action))

    def call_at(self, at_s: float, action: Action) -> None:
        """The same at a time, which rounding may have put a little before now."""
        if not self.now_s <= at_s < math.inf:
            self.call(0.0 if at_s < self.now_s else at_s, action)
            return
        self.events = number = self.events + 1
        heappush(self._queue, (at_s, number, action))

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing is left to happen, or that time has come: what is due then has not happened yet."""
        if until_s <= self.now_s:
            return
        queue = self._queue
        while queue and queue[0][0] < until_s:
            self.now_s, _, action = heappop(queue)
            action()
        if until_s < math.inf:
            self.now_s = until_s

    def step(self) -> None:
        """Calls the next action; one must be due."""
        self.now_s, _, action = heappop(self._queue)
        action()


class Alarm:
    """One action that is due at a time that may change."""

    __slots__ = ("_action", "_looks_s", "_timeline", "due_s")

    def __init__(self, timeline: Timeline, action: Action) -> None:
        self._timeline = timeline
        self._action = action
        self.due_s = math.inf
        """When it rings."""
        self._looks_s = math.inf
        """When it is looked at whether it is due: no later."""

    def set(self, at_s: float) -> None:
        """Rings at that time, unless it rings earlier anyway. Never, if that is infinite."""
        if at_s < self.due_s:
            self.move(at_s)

    def move(self, at_s: float) -> None:
        """Rings at that time, whenever it would have rung. Never, if that is infinite."""
        timeline = self._timeline
        if at_s < timeline.now_s:
            at_s = timeline.now_s
        self.due_s = at_s
        if at_s < self._looks_s:
            self._looks_s = at_s
            timeline.call_at(at_s, self._look)

    def _look(self) -> None:
        now_s = self._timeline.now_s
        if now_s != self._looks_s:
            return
        self._looks_s = math.inf
        due_s = self.due_s
        if due_s > now_s:
            self.move(due_s)
        else:
            self.due_s = math.inf
            self._action()
