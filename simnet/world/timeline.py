"""Virtual time: what happens when. The only owner of a SimPy environment."""

import math
from collections.abc import Callable

import simpy
from simpy.events import NORMAL, Event


class _Action(Event):
    """A SimPy event that is an action. It skips what a Timeout does for processes, which there are none of."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None], callbacks: list[Callable[[Event], None]]) -> None:
        self.action = action
        self.callbacks = callbacks
        self._ok = True


class Timeline:
    """Calls actions at their times, in order; those of one time in the order in which they were given."""

    __slots__ = ("_callbacks", "_environment", "_schedule", "events", "now_s")

    def __init__(self) -> None:
        self._environment = simpy.Environment()
        self._schedule = self._environment.schedule
        self._callbacks: list[Callable[[Event], None]] = [self._act]
        """Of every action: SimPy only reads it."""
        self.now_s = 0.0
        """Seconds since the world began."""
        self.events = 0
        """Actions called so far, and those that are still to be."""

    @property
    def next_s(self) -> float:
        """When the next action is due; infinite if none is."""
        return self._environment.peek()

    def call(self, delay_s: float, action: Callable[[], None]) -> None:
        """Calls `action` in so many seconds.

        Raises:
            ValueError: that is in the past, or never.
        """
        if not 0 <= delay_s < math.inf:
            raise ValueError(f"an action happens in 0 or more seconds, not in {delay_s}")
        self._schedule(_Action(action, self._callbacks), NORMAL, delay_s)
        self.events += 1

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """The same at a time, which rounding may have put a little before now."""
        delay_s = at_s - self.now_s
        self.call(delay_s if delay_s > 0.0 else 0.0, action)

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing is left to happen, or that time has come."""
        if until_s == math.inf:
            self._environment.run()
        elif until_s > self.now_s:
            self._environment.run(until=until_s)
            self.now_s = until_s

    def step(self) -> None:
        """Calls the next action; one must be due."""
        self._environment.step()

    def _act(self, event: Event) -> None:
        self.now_s = self._environment.now
        event.action()  # type: ignore[attr-defined]


class Alarm:
    """One action that is due at a time that may be brought forward. An earlier call for a later time has no effect."""

    __slots__ = ("_action", "_due_s", "_timeline")

    def __init__(self, timeline: Timeline, action: Callable[[], None]) -> None:
        self._timeline = timeline
        self._action = action
        self._due_s = math.inf

    def set(self, at_s: float) -> None:
        """Rings at that time, unless it rings earlier anyway. Never, if that is infinite."""
        if at_s >= self._due_s:
            return
        self._due_s = at_s = max(at_s, self._timeline.now_s)
        self._timeline.call_at(at_s, lambda: self._ring(at_s))

    def _ring(self, at_s: float) -> None:
        if at_s == self._due_s:
            self._due_s = math.inf
            self._action()
