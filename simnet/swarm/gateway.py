"""A gateway: what it knows of the swarm, whom it avoids, and the circuits that it chooses."""

import math
from collections.abc import Callable, Iterable, Sequence

from molink.client.avoidance import AVOID_S, Avoidance
from molink.client.choosing import QUICK, THOROUGH, THOROUGH_S
from molink.client.observations import Observations
from molink.client.own_sessions import OwnSessions
from molink.dht.records import PeerFacts, PeerView
from molink.dht.timing import DiscoveryTiming, repair_interval_s
from molink.peer.leases import LeaseKey
from molink.routing import Criteria, NoCircuit, Route, Snapshot, Standing, keep_up
from molink.routing.terms import Demand
from molink.shards.spec import ModelSpec
from molink.simnet.swarm.bulletin import Notice
from molink.simnet.swarm.candidates import MOST_DRAWN, MOST_POSED, candidates

_TIMING = DiscoveryTiming()
REDRAW_S = 120.0
"""Between draws of the first pool from all that a gateway knows, unless it finds no circuit among them."""
REPOSE_S = 10.0
"""Between draws of the candidates from that pool."""


class Gateway:
    """Chooses as `molink.client.choosing.Chooser` does: the circuit that such sessions had last, unless another is
    really better; searched for thoroughly for a session's first circuit, and quickly after a loss or a refusal."""

    def __init__(
        self,
        peer_id: str,
        model: ModelSpec,
        pull: Callable[[float], dict[str, Notice]],
        rtt_ms: Callable[[str], float],
    ) -> None:
        self.peer_id = peer_id
        self.linked: set[str] = set()
        """Peers to which it has a link, and so knows the round trip."""
        self.plans = 0
        self._model = model
        self._pull = pull
        self._rtt_ms = rtt_ms
        self._notices: dict[str, Notice] = {}
        self._pulled_s = -math.inf
        self._pull_due_s = 0.0
        self._drawn: tuple[str, ...] = ()
        self._redraw_due_s = 0.0
        self._candidates: tuple[str, ...] = ()
        self._repose_due_s = 0.0
        self._avoidance = Avoidance()
        self._observations = Observations()
        self._own = OwnSessions()
        self._standing: dict[tuple[int, int], Standing] = {}

    def refresh(self, now_s: float) -> None:
        """Copies the peers' table."""
        self._notices = self._pull(self._pulled_s)
        self._pulled_s = now_s
        self._pull_due_s = now_s + repair_interval_s(len(self._notices), _TIMING.refresh_interval_s)

    def choose(self, demand: Demand, now_s: float, *, first: bool) -> Route:
        """The route for a session; raises NoCircuit if there is none among all that it knows."""
        if now_s >= self._pull_due_s:
            self.refresh(now_s)
        if now_s >= self._redraw_due_s:
            self._redraw(demand, now_s, frozenset())
        elif now_s >= self._repose_due_s:
            self._repose(demand, now_s, frozenset())
        self.plans += 1
        views = self._views(self._candidates, now_s)
        avoided, shunned = self._avoidance.at(views, now_s)
        try:
            return self._keep_up(views, demand, avoided, first=first)
        except NoCircuit:
            self._redraw(demand, now_s, avoided)
        views = self._views(self._candidates, now_s)
        try:
            return self._keep_up(views, demand, avoided, first=first)
        except NoCircuit:
            return self._keep_up(views, demand, shunned, first=first)

    def asks(self, key: LeaseKey, peer_ids: Sequence[str], now_s: float) -> None:
        """The hops of a circuit are asked for leases."""
        self._own.begin(key, peer_ids, now_s)

    def gives_back(self, key: LeaseKey, peer_ids: Sequence[str], now_s: float) -> None:
        """A session has left that circuit."""
        self._own.end(key, peer_ids, now_s)

    def lost(self, facts: PeerFacts, now_s: float) -> None:
        """A peer could not be reached, or went away from under a session."""
        self.linked.discard(facts.peer_id)
        self._observations.lost(facts.peer_id)
        self._avoidance.add(facts, now_s, AVOID_S)

    def refused(self, facts: PeerFacts, now_s: float, seconds: float, reason: str) -> None:
        """A peer has no room now."""
        self._avoidance.add(facts, now_s, seconds, reason)

    def _views(self, peer_ids: Iterable[str], now_s: float) -> tuple[PeerView, ...]:
        """What is known of these peers, the gateway's own sessions on them included."""
        notices = map(self._notices.get, peer_ids)
        views = [notice.view(now_s) for notice in notices if notice is not None and notice.expires_s > now_s]
        return self._own.added(views, now_s)

    def _redraw(self, demand: Demand, now_s: float, avoid: frozenset[str]) -> None:
        living = {one: notice for one, notice in self._notices.items() if notice.expires_s > now_s}
        self._observations.look(living, now_s)
        views = self._views((one for one in living if one not in avoid), now_s)
        self._drawn = candidates(self._snapshot(views), demand, MOST_DRAWN)
        self._redraw_due_s = now_s + REDRAW_S
        self._repose(demand, now_s, avoid)

    def _repose(self, demand: Demand, now_s: float, avoid: frozenset[str]) -> None:
        views = self._views((one for one in self._drawn if one not in avoid), now_s)
        self._candidates = candidates(self._snapshot(views), demand, MOST_POSED)
        self._repose_due_s = now_s + REPOSE_S

    def _snapshot(self, views: tuple[PeerView, ...]) -> Snapshot:
        seen = self._observations.of([view.peer_id for view in views], self._known_rtt_ms)
        return Snapshot(views, self._model, observed=seen)

    def _known_rtt_ms(self, peer_id: str) -> float | None:
        return self._rtt_ms(peer_id) if peer_id in self.linked else None

    def _keep_up(
        self, views: tuple[PeerView, ...], demand: Demand, avoid: frozenset[str], *, first: bool
    ) -> Route:
        criteria = Criteria(avoid=avoid, algorithm=QUICK)
        if first:
            criteria = Criteria(avoid=avoid, algorithm=THOROUGH, time_limit_s=THOROUGH_S)
        key = (demand.tokens.bit_length(), demand.prompt_tokens.bit_length())
        self._standing[key] = standing = keep_up(
            self._standing.get(key),
            self._snapshot(views),
            demand.tokens,
            prompt_tokens=demand.prompt_tokens,
            criteria=criteria,
        )
        return standing.route
