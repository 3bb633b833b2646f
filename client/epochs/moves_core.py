"""Decision which hops a session leaves, and until when: those that go, and those that others are better in place of.
Pure.

Clients and simulated sessions drive the same `MovesCore`. A hop that leaves has said how long it serves; its place goes
to a standby, or to a peer that is chosen now. A circuit that is better with other peers at the same spans is gone over
to in the same way, hop by hop, and given up if it takes long; one of other spans computes the session anew
(`successor_core.py`). Moves that fail are tried again a few times.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from molink.client.epochs.successor_core import MOST_GIVEN_UP
from molink.routing import Route

ReplacementT = TypeVar("ReplacementT")
"""Who takes a hop's place, as the driver knows it."""

MOST_ATTEMPTS = 8
"""At moves of one session in a row that fail."""
MARGIN_S = 0.5
"""Before a leaving hop goes, its session is to be elsewhere."""
LEAST_NOTICE_S = 2.0
"""A hop that gives less time than a peer does that pauses has not said in time that it leaves."""
GONE_WITHIN_S = 10.0
"""After the time that it has named a peer is gone."""
LOOK_AGAIN_S = 1.0
"""For a standby that a hop can be left for."""
BETTER_WITHIN_S = 20.0
"""A move to better peers that is not made by then is given up."""


@dataclass(slots=True)
class MovesCore(Generic[ReplacementT]):
    """What one session knows of hops that it is to leave."""

    elsewhere: bool = False
    """Whether there is a better circuit of other spans, which is to compute it anew."""
    _leaving: dict[str, float] = field(default_factory=dict)
    """By peer, until when it serves."""
    _may_go: dict[str, float] = field(default_factory=dict)
    """By peer, from when on it goes without having failed."""
    _better: Mapping[str, ReplacementT | None] = field(default_factory=dict)
    """By the peers of hops that are to be left for better ones, which; None: for who is their standby."""
    _better_until_s: float = 0.0
    _given_up: int = 0
    """Circuits of other spans, so far."""
    _failed: int = 0
    """Attempts in a row."""

    @property
    def leaving(self) -> Collection[str]:
        """Who has said that he leaves."""
        return self._leaving.keys()

    @property
    def is_idle(self) -> bool:
        """Whether nobody leaves and nothing better is known, so that something may be looked for."""
        return not (self._leaving or self._better or self.elsewhere)

    @property
    def may_compute_anew(self) -> bool:
        """Whether circuits of other spans have not been given up too often."""
        return self._given_up < MOST_GIVEN_UP

    def note_leaving(self, peer_id: str, now_s: float, within_s: float) -> None:
        """That peer is about to leave. What was better is of the swarm with it."""
        has_come_back = now_s >= self._leaving.get(peer_id, now_s) + GONE_WITHIN_S
        said_s = math.inf if has_come_back else self._may_go.get(peer_id, math.inf)
        self._may_go[peer_id] = min(said_s, now_s + max(within_s, LEAST_NOTICE_S))
        self._leaving[peer_id] = now_s + within_s
        self.elsewhere = False

    def note_better(
        self, replaced: Mapping[str, ReplacementT | None], now_s: float, within_s: float = BETTER_WITHIN_S
    ) -> None:
        """Another circuit is better, with these in the places of those peers."""
        self._better = replaced
        self._better_until_s = now_s + min(within_s, BETTER_WITHIN_S)

    def drop_better(self) -> None:
        """Only who goes is left: a part of a better circuit need not be better."""
        self._better = {}

    def may_go(self, peer_id: str, now_s: float) -> bool:
        """Whether that peer has served for as long as it has said: if it goes now, that is no fault. One that fails
        before has not left, and one that is a hop long after that has come back."""
        until_s = self._leaving.get(peer_id)
        if until_s is None or now_s >= max(until_s, self._may_go[peer_id]) + GONE_WITHIN_S:
            return False
        return now_s >= self._may_go[peer_id] - MARGIN_S

    def wants(self, peer_ids: Collection[str], now_s: float) -> bool:
        """Whether one of these hops is to be left, and there is time to."""
        leaving = (peer_id for peer_id, until_s in self._leaving.items() if now_s < until_s - MARGIN_S)
        is_wanted = self.elsewhere or any(peer_id in peer_ids for peer_id in (*leaving, *self._better))
        return self._failed < MOST_ATTEMPTS and is_wanted

    def to_leave(self, peer_ids: Iterable[str]) -> dict[str, ReplacementT | None]:
        """Those of these hops that are to be left, and for whom; None: for who keeps their copy."""
        left = self._leaving.keys() | self._better.keys()
        return {peer_id: self._better.get(peer_id) for peer_id in peer_ids if peer_id in left}

    def lacks_better(self, ready: Collection[str]) -> bool:
        """Whether one of those peers that are left for better ones is not among the hops that can be left."""
        return not self._better.keys() <= set(ready)

    def deadline_s(self, left: Iterable[str]) -> float:
        """When the session has to have left those that `to_leave` names."""
        return min(self._leaving.get(peer_id, self._better_until_s) for peer_id in left) - MARGIN_S

    def record_failed(self) -> None:
        """The circuit that was wanted cannot be."""
        if self.elsewhere:
            self._given_up += 1
        else:
            self._failed += 1
        self._better, self.elsewhere = {}, False

    def record_moved(self) -> None:
        """The session has gone over."""
        self._failed = 0
        self._better, self.elsewhere = {}, False


def replaced_hops(standing: Route, better: Route) -> dict[str, str] | None:
    """Who takes whose place if a session goes over to a better route of the same spans; None: the spans are others, or
    one of its peers would be another hop, so that it has to be computed anew."""
    if [hop.span for hop in better.hops] != [hop.span for hop in standing.hops]:
        return None
    pairs = zip(standing.peer_ids, better.peer_ids, strict=True)
    replaced = {now: other for now, other in pairs if now != other}
    return None if set(replaced.values()) & set(standing.peer_ids) else replaced
