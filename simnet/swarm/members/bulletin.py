"""What the swarm knows of its peers: announcements as they were last made, until they expire.

Flooding takes seconds and announcements minutes: here a record is everywhere at once. Gateways see it when they
pull.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from molink.dht.records.records import PeerFacts, PeerState, PeerView
from molink.routing.arrays import FloatArray, IntArray
from molink.shards.spec import Span


@dataclass(frozen=True, slots=True, eq=False)
class Notice:
    """The latest that a peer said."""

    facts: PeerFacts
    state: PeerState
    at_s: float

    @property
    def expires_s(self) -> float:
        return self.at_s + self.state.ttl_s

    def view(self, now_s: float) -> PeerView:
        """As a directory hands it to a router."""
        return PeerView(self.facts, self.state, max(0.0, now_s - self.at_s))


class Bulletin:
    """All notices that have not expired."""

    def __init__(self) -> None:
        self.holdings = 0
        """How often what peers hold or load has changed."""
        self.heard: Callable[[], None] = lambda: None
        """Called when it has."""
        self._notices: dict[str, Notice] = {}
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []
        self._coordinates = np.zeros((1024, 5))

    def __len__(self) -> int:
        return len(self._notices)

    def put(self, notice: Notice) -> None:
        """Takes the place of what the peer said before; a time to live of 0 takes it back."""
        peer_id = notice.facts.peer_id
        before = self._notices.get(peer_id)
        had = None if before is None else _holdings(before)
        has = None if notice.state.ttl_s == 0 else _holdings(notice)
        if notice.state.ttl_s == 0:
            self._notices.pop(peer_id, None)
        else:
            self._notices[peer_id] = notice
            if peer_id not in self._rows:
                self._place(peer_id, notice.facts)
        if has != had:
            self._changed()

    def expire(self, now_s: float) -> None:
        """Forgets what is too old."""
        expired = [one for one, notice in self._notices.items() if notice.expires_s <= now_s]
        for peer_id in expired:
            del self._notices[peer_id]
        if expired:
            self._changed()

    def notices(self) -> Iterator[Notice]:
        """All of them, in the order in which peers came."""
        return iter(self._notices.values())

    def copy(self) -> dict[str, Notice]:
        """By peer id, what a pull brings."""
        return dict(self._notices)

    def near(self, facts: PeerFacts, count: int) -> tuple[Notice, ...]:
        """So many peers whose coordinates predict the shortest round trips, the peer itself left out; all of them if
        it has none."""
        living = [one for one in self._notices if one != facts.peer_id]
        if facts.coordinate is None or len(living) <= count:
            return tuple(self._notices[one] for one in living)
        rows: IntArray = np.array([self._rows[one] for one in living], dtype=np.int64)
        there = self._coordinates[rows]
        here = np.array(facts.coordinate.position)
        apart: FloatArray = np.linalg.norm(there[:, :-1] - here, axis=1) + there[:, -1]
        nearest = np.argsort(apart, kind="stable")[:count]
        return tuple(self._notices[living[place]] for place in nearest.tolist())

    def _changed(self) -> None:
        self.holdings += 1
        self.heard()

    def _place(self, peer_id: str, facts: PeerFacts) -> None:
        row = self._rows[peer_id] = len(self._ids)
        self._ids.append(peer_id)
        if row == len(self._coordinates):
            self._coordinates = np.concatenate((self._coordinates, np.zeros_like(self._coordinates)))
        if facts.coordinate is not None:
            self._coordinates[row] = (*facts.coordinate.position, facts.coordinate.height_ms)


def _holdings(notice: Notice) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    return notice.state.spans, notice.state.loading
