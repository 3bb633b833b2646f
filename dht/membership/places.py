"""Eviction order of a full directory, and how many newcomers one neighbour may tell of. Pure.

Names cost nothing: whoever makes many of them, and talks, must not push out whom a peer knows. So the newest strangers
go first. Who has been heard itself, over a connection of its own, is no stranger.
"""

MOST_MET = 1_000
"""Remembered as heard themselves; of more, those who were heard longest ago are strangers again."""
NEWCOMERS_AT_ONCE = 512
NEWCOMERS_PER_MINUTE = 300
"""That one neighbour may tell of. A swarm of 10,000 where everybody stays for two hours has 83 in all."""
_MOST_SOURCES = 64


class EvictionOrder:
    """Eviction order: which peer makes room for a newcomer."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: dict[str, None] = {}
        """In order of when they were first heard of."""
        self._met: dict[str, None] = {}
        """Those of them who were heard themselves, in order of when they last were."""
        self._gone: dict[str, None] = {}
        """Those of whom no more than a sequence is remembered, in order of when they went."""

    @property
    def full(self) -> bool:
        return len(self._known) >= self._capacity

    def add_peer(self, peer_id: str) -> None:
        """Adds a peer that was heard of."""
        self._known[peer_id] = None

    def record_contact(self, peer_id: str) -> None:
        """Records that a known peer was heard itself: it is not evicted."""
        self._gone.pop(peer_id, None)
        self._met.pop(peer_id, None)
        self._met[peer_id] = None
        if len(self._met) > MOST_MET:
            del self._met[next(iter(self._met))]

    def was_contacted(self, peer_id: str) -> bool:
        """Whether the peer was heard itself."""
        return peer_id in self._met

    def mark_gone(self, peer_id: str) -> None:
        """Marks a peer of which only the sequence is remembered: it goes first."""
        if peer_id in self._known:
            self._gone.setdefault(peer_id)

    def mark_alive(self, peer_id: str) -> None:
        """Marks a peer that has spoken again."""
        self._gone.pop(peer_id, None)

    def remove_peer(self, peer_id: str) -> None:
        """Removes a peer."""
        for places in (self._known, self._met, self._gone):
            places.pop(peer_id, None)

    def first_to_go(self) -> str | None:
        """Returns who makes room for a newcomer: of the gone, who has been gone longest; else the newest stranger.
        None: nobody does."""
        gone = next((peer_id for peer_id in self._gone if peer_id not in self._met), None)
        return gone or next((peer_id for peer_id in reversed(self._known) if peer_id not in self._met), None)


class NewcomerBudget:
    """Token bucket for each neighbour, of newcomers that it may still tell of."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """By source: how many, and when that was counted."""

    def spend(self, source: str, now: float, known: int) -> bool:
        """Whether this neighbour may tell of one more. `known`: peers that are known; a part of the swarm that was cut
        off and comes back may be as large."""
        most = float(max(NEWCOMERS_AT_ONCE, known))
        left, at = self._left.pop(source, (most, now))
        left = min(most, left + (now - at) * NEWCOMERS_PER_MINUTE / 60)
        self._left[source] = (left - 1.0 if left >= 1.0 else left, now)
        if len(self._left) > _MOST_SOURCES:
            del self._left[next(iter(self._left))]
        return left >= 1.0
