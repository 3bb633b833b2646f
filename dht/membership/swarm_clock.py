"""Swarm clock: the median of peers' clocks, which says how old a record must be at least, whatever is claimed. Pure.

A sequence is the author's clock in milliseconds when it spoke, or more. Home clocks are wrong, this machine's maybe,
so sequences are held against those of peers that are heard themselves, over connections that prove who they are: such
words are new. Their median, this machine's own clock among them, is the swarm's clock. Where they are few, who judges
others takes the earlier of two, and forgives more; who speaks takes the later, and is believed by more. So whoever
repeats old records needs half of those that a newcomer meets on its side.
"""

from bisect import bisect_left, insort

TOLERANCE_S = 900.0
"""By which a clock may be behind the swarm's, and nobody minds."""
MOST_AHEAD_S = 365 * 86_400.0
"""How far beyond its own clock a peer follows others: who would take it to the last of all numbers leaves it none."""
SET_ASIDE_S = 300.0
"""By how much a peer's sequences are ahead of its clock at most when it was started again, and nothing is wrong."""
_MOST = 32
"""Peers whose clocks are kept."""


class SwarmClock:
    """Swarm clock from the clocks of peers that this one has heard themselves."""

    def __init__(self) -> None:
        self._ahead_s: dict[int, float] = {}
        """By the author's tag, its clock less this machine's monotonic one. In order of when it was heard."""
        self._sorted_s: list[float] = []
        """The same, in order of size."""

    def record_sequence(self, tag: int, sequence: int, now: float, age_s: float = 0.0) -> None:
        """Records that the peer of that tag has itself said something of that sequence `age_s` seconds ago."""
        if tag in self._ahead_s:
            self._forget(tag)
        elif len(self._ahead_s) == _MOST:
            self._forget(next(iter(self._ahead_s)))
        self._ahead_s[tag] = ahead_s = sequence / 1000 + age_s - now
        insort(self._sorted_s, ahead_s)

    def ahead_to_judge_s(self, now: float, wall_s: float) -> float:
        """By how much the swarm's clock is ahead of this machine's `wall_s`, at least."""
        return self._ranked(len(self._sorted_s) // 2, wall_s - now)

    def ahead_to_speak_s(self, now: float, wall_s: float) -> float:
        """By how much a peer's own words should be ahead of its clock so that others find them new; not below 0."""
        return min(MOST_AHEAD_S, max(0.0, self._ranked((len(self._sorted_s) + 1) // 2, wall_s - now)))

    def behind_s(self, now: float, wall_s: float) -> float:
        """By how much this machine's clock is behind the others'; below 0: it is ahead. Where one other clock is known,
        nobody can say which of the two is wrong."""
        behind_s = self._ranked((len(self._sorted_s) + 1) // 2, wall_s - now)
        ahead_s = self._ranked(len(self._sorted_s) // 2, wall_s - now)
        return behind_s if behind_s > -ahead_s else ahead_s

    def least_age_s(self, sequence: int, now: float, wall_s: float) -> float:
        """Returns the least age of what was said with that sequence, in seconds; below 0: it may be new."""
        return self.forgiving_s(now, wall_s) - sequence / 1000

    def forgiving_s(self, now: float, wall_s: float) -> float:
        """The swarm's time in seconds since 1970, as early as it may be: of clocks that are behind."""
        return wall_s + self.ahead_to_judge_s(now, wall_s) - TOLERANCE_S

    def _forget(self, tag: int) -> None:
        del self._sorted_s[bisect_left(self._sorted_s, self._ahead_s.pop(tag))]

    def _ranked(self, rank: int, own_s: float) -> float:
        """Returns what has that rank, from 0, among all clocks and this machine's own, which is 0: `own_s` less the
        same."""
        own_rank = bisect_left(self._sorted_s, own_s)
        return 0.0 if rank == own_rank else self._sorted_s[rank - (rank > own_rank)] - own_s
