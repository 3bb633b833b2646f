"""Virtual time: what happens when. The only owner of a SimPy environment."""

import math
from collections.abc import Callable

import simpy
from simpy.events import Event


class _Action(Event):
    """A SimPy event that has one callback. It skips what a Timeout does for processes, which there are none of."""

    __slots__ = ()

    def __init__(self, environment: simpy.Environment, delay_s: float, action: Callable[[], None]) -> None:
        self.env = environment
        self.callbacks = [lambda _: action()]
        self._value = None
        self._ok = True
        environment.schedule(self, delay=delay_s)


class Timeline:
    """Calls actions at their times, in order; those of one time in the order in which they were given."""

    __slots__ = ("_environment", "events")

    def __init__(self) -> None:
        self._environment = simpy.Environment()
        self.events = 0
        """Actions called so far, and those that are still to be."""

    @property
    def now_s(self) -> float:
        """Seconds since the world began."""
        now: float = self._environment.now
        return now

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

        _Action(self._environment, delay_s, action)
        self.events += 1

    def call_at(self, at_s: float, action: Callable[[], None]) -> None:
        """The same at a time, which rounding may have put a little before now."""
        self.call(max(0.0, at_s - self.now_s), action)

    def run(self, until_s: float = math.inf) -> None:
        """Until nothing is left to happen, or that time has come."""
        if until_s == math.inf:
            self._environment.run()
        elif until_s > self.now_s:
            self._environment.run(until=until_s)

    def step(self) -> None:
        """Calls the next action; one must be due."""
        self._environment.step()


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
