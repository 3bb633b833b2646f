"""Fair share guard: an equal share of the uplink for every link with bulk, whatever another takes. Pure.

Who heeds queues gives way to who does not: a receiver whose stamps deny the queue that its own bytes make, or that has
had more for long, leaves the others nothing. All of them are sent by this process, so it can count. A link that has had
less than its part of the uplink and sees a queue that stays may complain, and those that have had more than theirs wait
until they have not. The part is that of the links on which bulk waits, all equal, and no complaint pushes anybody below
it: whoever complains without reason gains nothing and costs an honest link no more than an honest rival would.
"""

import math

WINDOW_S = 0.5
"""What a link has sent of late is what it sent in the last one to two such windows."""
COMPLAINT_S = 0.015
"""A queue that stays for longer than our own policy would leave one."""
HEEDED_S = 0.25
"""A complaint holds for so long, some round trips: whoever goes on seeing the queue goes on complaining."""
LEAST_WAIT_S = 0.001
LONGEST_WAIT_S = 0.050


class LinkShare:
    """Counter of the bulk that one link has sent lately, in bytes, over two windows of WINDOW_S seconds."""

    __slots__ = ("_before_bytes", "_before_s", "_bytes", "_since_s")

    def __init__(self) -> None:
        self._since_s = 0.0
        self._bytes = 0
        self._before_s = WINDOW_S
        self._before_bytes = 0

    def record_sent(self, size_bytes: int, now_s: float) -> None:
        """A chunk of bulk leaves now."""
        age_s = now_s - self._since_s
        if age_s > WINDOW_S:
            late = age_s > 2 * WINDOW_S
            self._before_s, self._before_bytes = (WINDOW_S, 0) if late else (age_s, self._bytes)
            self._since_s = now_s
            self._bytes = 0
        self._bytes += size_bytes

    def recent(self, now_s: float) -> tuple[float, float]:
        """Bytes, and in how many seconds they were sent."""
        age_s = now_s - self._since_s
        return self._before_bytes + self._bytes, self._before_s + age_s


class FairShareGuard:
    """Fair share guard over the links of one uplink: links above their share pause while one below it complains."""

    __slots__ = ("_complained_s", "_complaining")

    def __init__(self) -> None:
        self._complaining: LinkShare | None = None
        self._complained_s = -math.inf

    def report_queue(self, part: LinkShare, standing_s: float, fair_bytes_per_s: float, now_s: float) -> None:
        """A link with bulk sees a queue of `standing_s`; `fair_bytes_per_s` is its part of the uplink."""
        if standing_s > COMPLAINT_S:
            sent_bytes, seconds = part.recent(now_s)
            if sent_bytes < seconds * fair_bytes_per_s:
                self._complaining, self._complained_s = part, now_s

    def wait_s(self, part: LinkShare, fair_bytes_per_s: float, now_s: float) -> float:
        """How long a link should send no bulk, since another has had too little; 0 for not at all."""
        complaining = self._complaining
        if complaining is None or complaining is part or now_s - self._complained_s >= HEEDED_S:
            return 0.0
        sent_bytes, seconds = part.recent(now_s)
        ahead_s = sent_bytes / fair_bytes_per_s - seconds
        return min(max(ahead_s, LEAST_WAIT_S), LONGEST_WAIT_S) if ahead_s > 0.0 else 0.0
