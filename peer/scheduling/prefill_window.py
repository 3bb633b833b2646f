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

WINDOW_BYTES = 16 * 1024 * 1024
"""Of rows as the engine has them, whatever they travel as: what a line of 1 Gbps carries in 134 ms. The step that fills
it may go beyond it."""
WINDOW_STEPS = 32


class _Window:
    """Holds the steps of one session that have not been credited, in order."""

    __slots__ = ("_most_bytes", "_most_steps", "queued_bytes", "steps")

    def __init__(self, window_bytes: int = WINDOW_BYTES, window_steps: int = WINDOW_STEPS) -> None:
        self._most_bytes, self._most_steps = window_bytes, window_steps
        self.steps: deque[tuple[int, int]] = deque()
        """Their numbers and bytes."""
        self.queued_bytes = 0

    @property
    def is_open(self) -> bool:
        """Whether there is room for another step."""
        return self.queued_bytes < self._most_bytes and len(self.steps) < self._most_steps

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


class SendWindow(_Window):
    """The sender's window of a session: prefill that the next hop has not credited."""

    __slots__ = ()

    def record_sent(self, step: int, size_bytes: int) -> None:
        """A step goes to the next hop; later ones have higher numbers."""
        self.push(step, size_bytes)

    def apply_window_update(self, step: int) -> None:
        """The next hop has stepped all up to `step`."""
        self.pop_up_to(step)


class ReceiveWindow(_Window):
    """The receiver's window of a session: prefill that waits here, and when a window update credits the previous
    hop."""

    __slots__ = ("_unannounced_bytes", "_unannounced_steps")

    def __init__(self, window_bytes: int = WINDOW_BYTES, window_steps: int = WINDOW_STEPS) -> None:
        super().__init__(window_bytes, window_steps)
        self._unannounced_bytes = self._unannounced_steps = 0
        """What was stepped and the previous hop was not told of."""

    def admit(self, step: int, size_bytes: int) -> bool:
        """A step has come. False, and it is not counted, if the window was full: its sender does not keep to it."""
        if not self.is_open:
            return False
        self.push(step, size_bytes)
        return True

    def record_computed(self, step: int) -> bool:
        """All up to `step` were stepped. Whether the previous hop is to be told now."""
        before = len(self.steps)
        self._unannounced_bytes += self.pop_up_to(step)
        self._unannounced_steps += before - len(self.steps)
        tell = (
            2 * self._unannounced_bytes >= self._most_bytes or 2 * self._unannounced_steps >= self._most_steps
        )
        if tell:
            self._unannounced_bytes = self._unannounced_steps = 0
        return tell
