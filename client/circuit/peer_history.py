"""What a client knows of peers by itself: their history, and its own sessions in flight. Pure.

Peer history is how long it has seen each peer alive, how often it was lost, and how far away it is. In-flight load is
what its own sessions add to the loads that peers have announced: a peer of a small swarm says every few seconds how
many sessions it has, one of ten thousand every ten minutes, and a client of that swarm copies the tables less often
still. What it has asked of peers since then it knows without them: otherwise it puts one session after another on the
circuit that was the best when it last looked.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from molink.dht.records.records import PeerView
from molink.routing.cost.reliability import UNSEEN, PeerObservation

REMEMBERED_LOST = 1000
"""Peers that are remembered although they are gone, because they were lost: the latest."""
REMEMBERED_TRIPS = 256
"""Of a head: beyond, older trips count less."""
MISPREDICTED = 1.5
"""Trips may take so many times as long as predicted, and their number is believed."""


@dataclass(slots=True)
class _Seen:
    observed: PeerObservation
    last_s: float | None
    """When it was last seen alive, in seconds; None if it was gone in the last call of `record_alive`."""


class PeerHistory:
    """Peer history of one client. Times are seconds of one clock of the caller's."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def record_alive(self, alive: Iterable[str], now_s: float) -> None:
        """Records which peers are alive now.

        The uptime of a peer that was alive in the last call too grows by the time since then.
        """
        present = set(alive)
        for peer_id in present:
            seen = self._seen.setdefault(peer_id, _Seen(UNSEEN, now_s))
            if seen.last_s is not None:
                before = seen.observed
                uptime_s = before.uptime_s + max(0.0, now_s - seen.last_s)
                seen.observed = replace(before, uptime_s=uptime_s)
            seen.last_s = now_s
        gone = [peer_id for peer_id in self._seen if peer_id not in present]
        remembered = [peer_id for peer_id in gone if self._seen[peer_id].observed.losses][-REMEMBERED_LOST:]
        for peer_id in gone:
            self._seen[peer_id].last_s = None
        for peer_id in set(gone) - set(remembered):
            del self._seen[peer_id]

    def record_loss(self, peer_id: str) -> None:
        """Records a loss: the peer did not do what its circuit needed, or could not be reached."""
        seen = self._seen.pop(peer_id, None) or _Seen(UNSEEN, None)
        seen.observed = replace(seen.observed, losses=seen.observed.losses + 1)
        self._seen[peer_id] = seen

    def record_trips(self, head: str, trips: int, tokens: float) -> None:
        """Records that so many trips round circuits of that head brought so many tokens."""
        seen = self._seen.setdefault(head, _Seen(UNSEEN, None))
        trips, tokens = seen.observed.trips + trips, seen.observed.trip_tokens + tokens
        if trips > REMEMBERED_TRIPS:
            trips, tokens = REMEMBERED_TRIPS, tokens * REMEMBERED_TRIPS / trips
        seen.observed = replace(seen.observed, trips=trips, trip_tokens=tokens)

    def observations_of(
        self, peer_ids: Iterable[str], rtt_ms: Callable[[str], float | None]
    ) -> Mapping[str, PeerObservation]:
        """Returns what is known of each of the peers; `rtt_ms` gives the round trip to a peer, if it was measured."""
        found: dict[str, PeerObservation] = {}
        for peer_id in peer_ids:
            seen = self._seen.get(peer_id)
            observed = UNSEEN if seen is None else seen.observed
            measured_ms = rtt_ms(peer_id)
            if measured_ms is not None:
                observed = replace(observed, client_rtt_ms=measured_ms)
            found[peer_id] = observed
        return found


def credited_tokens(trips: int, tokens: int, taken_ms: float, trip_ms: float) -> float:
    """Of the tokens that so many trips have brought, by the head's word, those that are borne out by the time that all
    of them took, where one is predicted to take `trip_ms`. A head that makes few trips of many would seem to guess
    well; tokens come no sooner by that."""
    if taken_ms <= 0:
        return tokens
    return max(trips, min(tokens, MISPREDICTED * trips * tokens * trip_ms / taken_ms))


FORGOTTEN_S = 3600.0
"""A session that ended so long ago is forgotten, though its peer has not spoken since."""
SessionKey = tuple[bytes, int]
"""A session, and its epoch."""


@dataclass(slots=True)
class _Stay:
    """One session on one peer. Times are those of the caller's clock."""

    since_s: float
    until_s: float = math.inf


@dataclass(slots=True)
class InFlightLoad:
    """In-flight load of one client: its sessions by peer, which announcements may not count yet."""

    _stays: dict[str, dict[SessionKey, _Stay]] = field(default_factory=dict)
    """By peer id."""

    def begin_session(self, key: SessionKey, peer_ids: Iterable[str], now_s: float) -> None:
        """Begins a session on each of the peers: they are asked for a lease."""
        for peer_id in peer_ids:
            self._stays.setdefault(peer_id, {}).setdefault(key, _Stay(now_s))

    def end_session(self, key: SessionKey, peer_ids: Iterable[str], now_s: float) -> None:
        """Ends a session on the peers: leases are given back, or were not granted. No error if it has ended before."""
        for peer_id in peer_ids:
            stay = self._stays.get(peer_id, {}).get(key)
            if stay is not None:
                stay.until_s = min(stay.until_s, now_s)

    def add_to_views(
        self, views: Sequence[PeerView], now_s: float, leaving: SessionKey | None = None
    ) -> tuple[PeerView, ...]:
        """Returns the views with the sessions that began after they were announced, without those that ended since, nor
        the one that is `leaving`. At least those that are there now count: while they begin, an announcement may leave
        some out."""
        self._forget({view.peer_id: now_s - view.age_s for view in views}, now_s)
        return tuple(
            self._add_to_view(view, now_s, leaving) if view.peer_id in self._stays else view for view in views
        )

    def _add_to_view(self, view: PeerView, now_s: float, leaving: SessionKey | None) -> PeerView:
        announced_s, sessions, present = now_s - view.age_s, view.state.sessions, 0
        for key, stay in self._stays[view.peer_id].items():
            began, ended = stay.since_s > announced_s, stay.until_s < math.inf or key == leaving
            sessions += began - ended
            present += not ended
        sessions = max(present, sessions)
        if sessions == view.state.sessions:
            return view
        return replace(view, state=replace(view.state, sessions=sessions))

    def _forget(self, announced_s: dict[str, float], now_s: float) -> None:
        """Leaves out what ended before its peer spoke last, or long ago."""
        for peer_id in tuple(self._stays):
            spoke_s = announced_s.get(peer_id, now_s - FORGOTTEN_S)
            stays = {key: stay for key, stay in self._stays[peer_id].items() if stay.until_s > spoke_s}
            if stays:
                self._stays[peer_id] = stays
            else:
                del self._stays[peer_id]
