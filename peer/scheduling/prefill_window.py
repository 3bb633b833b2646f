"""Flow control of prefill between two hops by windows, with window updates that go back (as in HTTP/2). Pure.

An engine computes prefill faster than a line carries it, and a later hop may be slower than an earlier one. So every
session has a window between each two hops that follow each other: the sender steps no more of its prompt while a
window's worth has not been stepped at the receiver, which says so when half a window has been. What waits at a hop is
thereby bounded by its sessions. A hop that waits for the next one stops saying, and the one before it waits as well, at
last the head, where a prompt is token ids.

Nothing waits in a ring: a session's steps wait for its own at the next hop alone, its tail's for nobody. Decode has no
window: a session has one step of it on its way, whose token the next one needs.
"""

from collections import deque

from molink.peer.memory.leases import LeaseKey

WINDOW_BYTES = 16 * 1024 * 1024
"""Of rows as the engine has them, whatever they travel as: what a line of 1 Gbps carries in 134 ms. The step that fills
it may go beyond it."""
WINDOW_STEPS = 32


class _UncreditedSteps:
    """Holds the steps of one session that have not been credited, in order."""

    __slots__ = ("queued_bytes", "steps")

    def __init__(self) -> None:
        self.steps: deque[tuple[int, int]] = deque()
        self.queued_bytes = 0

    def push(self, step: int, size_bytes: int) -> None:
        self.steps.append((step, size_bytes))
        self.queued_bytes += size_bytes

    def pop_up_to(self, step: int) -> int:
        """Takes out all up to `step`; their bytes."""
        freed_bytes = 0
        while self.steps and self.steps[0][0] <= step:
            freed_bytes += self.steps.popleft()[1]
        self.queued_bytes -= freed_bytes
        return freed_bytes


class SendWindow:
    """The sender's window: prefill that next hops have not credited."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, window_steps: int = WINDOW_STEPS) -> None:
        self._window = window_bytes, window_steps
        self._sessions: dict[LeaseKey, _UncreditedSteps] = {}

    def is_open(self, key: LeaseKey) -> bool:
        """Whether another step may be sent."""
        sent = self._sessions.get(key)
        return sent is None or _is_open(sent, *self._window)

    def record_sent(self, key: LeaseKey, step: int, size_bytes: int) -> None:
        """A step goes to the next hop; later ones have higher numbers."""
        self._sessions.setdefault(key, _UncreditedSteps()).push(step, size_bytes)

    def apply_window_update(self, key: LeaseKey, step: int) -> None:
        """The next hop has stepped all up to `step`. What it says of others is no matter."""
        sent = self._sessions.get(key)
        if sent is not None:
            sent.pop_up_to(step)

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._sessions.pop(key, None)


class ReceiveWindow:
    """The receiver's window: prefill that waits here, and when a window update credits the previous hop."""

    def __init__(self, window_bytes: int = WINDOW_BYTES, window_steps: int = WINDOW_STEPS) -> None:
        self._window = window_bytes, window_steps
        self._sessions: dict[LeaseKey, _UncreditedSteps] = {}
        self._unannounced: dict[LeaseKey, tuple[int, int]] = {}
        """Bytes and steps that were stepped and that the previous hop was not told of."""

    def admit(self, key: LeaseKey, step: int, size_bytes: int) -> bool:
        """A step has come. False, and it is not counted, if the window was full: its sender does not keep to it."""
        waiting = self._sessions.setdefault(key, _UncreditedSteps())
        if not _is_open(waiting, *self._window):
            return False
        waiting.push(step, size_bytes)
        return True

    def record_computed(self, key: LeaseKey, step: int) -> bool:
        """All up to `step` were stepped. Whether the previous hop is to be told now."""
        waiting = self._sessions.get(key)
        if waiting is None:
            return False
        before = len(waiting.steps)
        unannounced_bytes, unannounced_steps = self._unannounced.get(key, (0, 0))
        unannounced_bytes += waiting.pop_up_to(step)
        unannounced_steps += before - len(waiting.steps)
        window_bytes, window_steps = self._window
        tell = 2 * unannounced_bytes >= window_bytes or 2 * unannounced_steps >= window_steps
        self._unannounced[key] = (0, 0) if tell else (unannounced_bytes, unannounced_steps)
        return tell

    def forget_session(self, key: LeaseKey) -> None:
        """The session has ended."""
        self._sessions.pop(key, None)
        self._unannounced.pop(key, None)


def _is_open(steps: _UncreditedSteps, window_bytes: int, window_steps: int) -> bool:
    return steps.queued_bytes < window_bytes and len(steps.steps) < window_steps
