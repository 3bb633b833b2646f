"""Keep-alive of a link: when to ping the other end, when to give it up, and how far away it is. Pure."""

from collections import deque
from collections.abc import Callable
from enum import Enum
from hashlib import blake2b

TICK_S = 0.5
"""How often `KeepAlive.tick` is to be called."""
BUSY_LOST_AFTER_S = 2.5
"""On a busy link, silence for so long is noticed within 3 s."""
BUSY_PING_AFTER_S = 0.5
IDLE_LOST_AFTER_S = 14.0
SILENT_S = 1.0
"""After so long the connection may be gone without a word, and the link is dialled a second way."""
LATE_S = 0.2
"""An answer to a ping is late by so much after two round trips."""
IDLE_PING_INTERVAL_S = 4.0
BUSY_FOR_S = 15.0
"""A link is busy while it owes or is owed something, and for so long after it was last used: a peer that computes
says nothing meanwhile, and somebody waits for it."""
FIRST_PINGS = 3
FIRST_PING_INTERVAL_S = 0.05
"""A new link is measured a few times at once."""
PINGS_REMEMBERED = 8
PINGS_KEPT = 8
"""Of so many answers the least counts: half a minute's."""
RTT_SPANS = 8
RTT_SPAN_S = 1.0


class RoundTrips:
    """Round trip estimator of a link: the least of its recent measurements.

    What is above the least was waiting, which routers count elsewhere. Measurements of one second count as one: their
    least.

    Pings measure it: their numbers cannot be guessed, so no answer comes before the question has. Acknowledgements
    measure it more often, less the time that the other end says to have held them; they count for no less than the
    least ping. So the other end can seem further away than it is, never nearer.
    """

    def __init__(self, measured: Callable[[], None]) -> None:
        """`measured` is called at the FIRST_PINGS-th ping that is answered."""
        self.secret = b""
        """What ping numbers are made of; whoever has the link sets it to random bytes, at most 64."""
        self.measured_s = float("-inf")
        """When a ping was last answered."""
        self._measured = measured
        self._asked = 0
        self._answered = 0
        self._pings: dict[int, float] = {}
        self._least_pings_s: deque[float] = deque(maxlen=PINGS_KEPT)
        self._spans: deque[tuple[float, float]] = deque(maxlen=RTT_SPANS)

    @property
    def least_s(self) -> float | None:
        return min((rtt_s for _, rtt_s in self._spans), default=None)

    def asked(self, now_s: float) -> int:
        """Begins a ping. Returns its number."""
        self._asked += 1
        digest = blake2b(self._asked.to_bytes(8), digest_size=8, key=self.secret).digest()
        number = int.from_bytes(digest)
        self._pings[number] = now_s
        if len(self._pings) > PINGS_REMEMBERED:
            del self._pings[next(iter(self._pings))]
        return number

    def answered(self, number: int, now_s: float) -> None:
        """Records a pong. A number that no ping had is ignored."""
        asked_s = self._pings.pop(number, None)
        if asked_s is None:
            return
        self.measured_s = now_s
        self._least_pings_s.append(now_s - asked_s)
        self._add(now_s - asked_s, now_s)
        self._answered += 1
        if self._answered == FIRST_PINGS:
            self._measured()

    def acknowledged(self, rtt_s: float, now_s: float) -> None:
        """By what an acknowledgement says the round trip took `rtt_s` seconds."""
        if self._least_pings_s:
            self._add(max(rtt_s, min(self._least_pings_s)), now_s)

    def forget_pings(self) -> None:
        """Forgets the pings under way: they are lost."""
        self._pings.clear()

    def _add(self, rtt_s: float, now_s: float) -> None:
        if self._spans and now_s - self._spans[-1][0] < RTT_SPAN_S:
            begun_s, least_s = self._spans[-1]
            self._spans[-1] = (begun_s, min(least_s, rtt_s))
        else:
            self._spans.append((now_s, rtt_s))


class KeepAliveAction(Enum):
    """Keep-alive action: what a link is to do now."""

    NOTHING = 0
    PING = 1
    LOST = 2


class KeepAlive:
    """Keep-alive of one link: when anything was last heard or used. Times are seconds of one monotonic clock."""

    def __init__(self, now_s: float, busy_lost_after_s: float = BUSY_LOST_AFTER_S) -> None:
        self._busy_lost_after_s = busy_lost_after_s
        self.heard_s = now_s
        """When anything last arrived."""
        self.used_s = now_s
        """When anything but signs of life was last sent or received."""
        self._patient_from_s = now_s
        """Silence before this says nothing of the other end."""
        self._ticked_s = now_s
        self._pinged_s = float("-inf")
        self._asked_s = float("-inf")
        """When the first ping since anything arrived was sent."""

    def silent_s(self, now_s: float) -> float:
        """How long the other end has been silent, as far as it is to blame."""
        return now_s - max(self.heard_s, self._patient_from_s)

    def seems_dead_s(self, now_s: float, rtt_s: float) -> float:
        """When the connection will seem dead if nothing comes: nothing did for SILENT_S, and a ping should have been
        answered. Until a ping is under way, the time at which to ask again, before which it cannot seem so."""
        silent_s = max(self.heard_s, self._patient_from_s) + SILENT_S
        if self._asked_s <= self.heard_s:
            return max(silent_s, now_s + TICK_S)
        return max(silent_s, max(self._asked_s, self._patient_from_s) + LATE_S + 2 * rtt_s)

    def excuse(self, now_s: float) -> None:
        """Excuses the silence so far: it is not the other end's fault."""
        self._patient_from_s = self._ticked_s = now_s

    def used(self, now_s: float) -> None:
        """Records that something but a sign of life travels."""
        if now_s - self.used_s > BUSY_FOR_S:
            self._patient_from_s = max(
                self._patient_from_s, now_s
            )  # it was told to be heard seldom until now
        self.used_s = now_s

    def tick(self, now_s: float, *, owed: bool, measured_s: float) -> KeepAliveAction:
        """To be asked every TICK_S. `owed`: an acknowledgement or an answer is awaited; `measured_s`: when a ping
        was last answered."""
        if now_s - self._ticked_s > 2 * TICK_S:
            self.excuse(now_s)  # this end slept, and has not had its chance to read
        self._ticked_s = now_s
        busy = owed or now_s - self.used_s < BUSY_FOR_S
        if self.silent_s(now_s) > (self._busy_lost_after_s if busy else IDLE_LOST_AFTER_S):
            return KeepAliveAction.LOST
        since_ping_s = now_s - self._pinged_s
        asks = busy and now_s - self.heard_s >= BUSY_PING_AFTER_S and since_ping_s >= BUSY_PING_AFTER_S
        if asks or min(since_ping_s, now_s - measured_s) >= IDLE_PING_INTERVAL_S:
            self._pinged_s = now_s
            if self._asked_s <= self.heard_s:
                self._asked_s = now_s
            return KeepAliveAction.PING
        return KeepAliveAction.NOTHING
