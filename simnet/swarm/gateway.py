"""A gateway: what it knows of the swarm, whom it avoids, and the circuits that it chooses."""

import math
from collections.abc import Callable

from molink.client.avoidance import AVOID_S, Avoidance
from molink.client.choosing import QUICK, THOROUGH, THOROUGH_S
from molink.client.observations import Observations
from molink.dht.records import PeerFacts, PeerView
from molink.dht.timing import DiscoveryTiming, repair_interval_s
from molink.routing import Criteria, NoCircuit, Route, Snapshot, Standing, keep_up
from molink.routing.terms import Demand
from molink.shards.spec import ModelSpec
from molink.simnet.swarm.bulletin import Notice
from molink.simnet.swarm.candidates import candidates

_TIMING = DiscoveryTiming()
REDRAW_S = 120.0
"""Between draws of the candidates from what a gateway knows, unless it finds no circuit among them."""


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
        self._candidates: tuple[str, ...] = ()
        self._redraw_due_s = 0.0
        self._avoidance = Avoidance()
        self._observations = Observations()
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
        drawn = now_s >= self._redraw_due_s
        if drawn:
            self._redraw(demand, now_s, frozenset())
        self.plans += 1
        views = self._views(now_s)
        avoided, shunned = self._avoidance.at(views, now_s)
        try:
            return self._keep_up(views, demand, avoided, first=first)
        except NoCircuit:
            self._redraw(demand, now_s, avoided)
        views = self._views(now_s)
        try:
            return self._keep_up(views, demand, avoided, first=first)
        except NoCircuit:
            return self._keep_up(views, demand, shunned, first=first)

    def lost(self, facts: PeerFacts, now_s: float) -> None:
        """A peer could not be reached, or went away from under a session."""
        self.linked.discard(facts.peer_id)
        self._observations.lost(facts.peer_id)
        self._avoidance.add(facts, now_s, AVOID_S)

    def refused(self, facts: PeerFacts, now_s: float, seconds: float, reason: str) -> None:
        """A peer has no room now."""
        self._avoidance.add(facts, now_s, seconds, reason)

    def _views(self, now_s: float) -> tuple[PeerView, ...]:
        notices = (self._notices.get(peer_id) for peer_id in self._candidates)
        return tuple(
            notice.view(now_s) for notice in notices if notice is not None and notice.expires_s > now_s
        )

    def _redraw(self, demand: Demand, now_s: float, avoid: frozenset[str]) -> None:
        living = {one: notice for one, notice in self._notices.items() if notice.expires_s > now_s}
        self._observations.look(living, now_s)
        views = tuple(notice.view(now_s) for one, notice in living.items() if one not in avoid)
        self._candidates = candidates(self._snapshot(views), demand)
        self._redraw_due_s = now_s + REDRAW_S

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
