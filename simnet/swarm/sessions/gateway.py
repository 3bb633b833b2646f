"""A gateway: what it knows of the swarm, whom it avoids, and the circuits that it chooses."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from molink.client.circuit.blame import BlameLedger, second_choices
from molink.client.circuit.circuit_core import Refusal
from molink.client.circuit.in_flight_load import InFlightLoad
from molink.client.circuit.peer_history import PeerHistory
from molink.client.circuit.quarantine import Quarantine
from molink.client.circuit.route_selector import criteria
from molink.dht.membership.timing import DiscoveryTiming, anti_entropy_interval_s
from molink.dht.records.records import PeerFacts, PeerView
from molink.peer.memory.leases import LeaseKey
from molink.routing import IncumbentRoute, NoCircuit, PartnerChoice, Route, Snapshot, choose_partners
from molink.routing.cost.terms import Demand
from molink.routing.routes.shortlist import REDRAW_S, Shortlist, replan_incumbent_among
from molink.shards.spec import ModelSpec
from molink.simnet.swarm.members.bulletin import Notice

_TIMING = DiscoveryTiming()
_NOBODY_ACCUSES = BlameLedger()
"""Hops of simulated circuits do not blame one another."""


class SimulatedGateway:
    """Chooses as `molink.client.circuit.route_selector.RouteSelector` does: the circuit that such sessions had last,
    unless another is really better; searched for thoroughly for a session's first circuit, and quickly after a loss or
    a refusal."""

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
        self._looked_s = -math.inf
        self._now_s = 0.0
        self._quarantine = Quarantine()
        self._observations = PeerHistory()
        self._own = InFlightLoad()
        self._standing: dict[tuple[int, int], IncumbentRoute] = {}
        self._shortlist: Shortlist | None = None

    @property
    def count(self) -> int:
        """Peers that it knows."""
        return len(self._notices)

    def snapshot(self, peer_ids: Collection[str] | None = None) -> Snapshot:
        """What it knows of these peers at the moment for which it chooses, or of all, its own sessions included."""
        views = self._views(self._notices if peer_ids is None else sorted(peer_ids))
        seen = self._observations.observations_of([view.peer_id for view in views], self._known_rtt_ms)
        return Snapshot(views, self._model, observed=seen)

    def refresh(self, now_s: float) -> None:
        """Copies the peers' table."""
        self._notices = self._pull(self._pulled_s)
        self._pulled_s = now_s
        self._pull_due_s = now_s + anti_entropy_interval_s(len(self._notices), _TIMING.refresh_interval_s)

    def choose(self, demand: Demand, now_s: float, *, first: bool) -> Route:
        """The route for a session; raises NoCircuit if there is none among all that it knows."""
        if now_s >= self._pull_due_s:
            self.refresh(now_s)
        self._now_s = now_s
        if now_s >= self._looked_s + REDRAW_S:
            self._looked_s = now_s
            living = (one for one, notice in self._notices.items() if notice.expires_s > now_s)
            self._observations.record_alive(living, now_s)
        self.plans += 1
        avoided, shunned = self._quarantine.excluded_peers(self._views(self._quarantine.entries), now_s)
        try:
            return self._keep_up(demand, avoided, first=first)
        except NoCircuit as error:
            nothing = error
        for avoid in second_choices(avoided, shunned, _NOBODY_ACCUSES, self._quarantine):
            try:
                return self._keep_up(demand, avoid, first=first)
            except NoCircuit:
                continue
        raise nothing

    def partners(
        self, route: Route, demand: Demand, hops: Sequence[int], taken: frozenset[str], now_s: float
    ) -> tuple[PartnerChoice, ...]:
        """Who should keep copies of these hops of a session's circuit, `taken` being the partners that it has; from
        among its shortlist."""
        if now_s >= self._pull_due_s:
            self.refresh(now_s)
        self._now_s = now_s
        names = None if self._shortlist is None else {*self._shortlist.posed, *route.peer_ids}
        avoided, _ = self._quarantine.excluded_peers(self._views(self._quarantine.entries), now_s)
        return choose_partners(self.snapshot(names), route, demand, avoid=avoided | taken, hops=hops)

    def asks(self, key: LeaseKey, peer_ids: Sequence[str], now_s: float) -> None:
        """The hops of a circuit are asked for leases."""
        self._own.begin_session(key, peer_ids, now_s)

    def gives_back(self, key: LeaseKey, peer_ids: Sequence[str], now_s: float) -> None:
        """A session has left that circuit."""
        self._own.end_session(key, peer_ids, now_s)

    def lost(self, facts: PeerFacts, now_s: float) -> None:
        """A peer went away from under a session."""
        self.refused(facts, now_s, Refusal("lost"), "")

    def refused(self, facts: PeerFacts, now_s: float, refusal: Refusal, detail: str) -> None:
        """A peer has refused, or could not be reached."""
        if refusal.code in ("lost", "slow"):
            self.linked.discard(facts.peer_id)
        if refusal.code == "lost":
            self._observations.record_loss(facts.peer_id)
        seconds = refusal.left_out_s(len(self._notices))
        if seconds:
            self._quarantine.quarantine_peer(facts, now_s, seconds, detail, certain=refusal.code != "slow")

    def _views(self, peer_ids: Iterable[str]) -> tuple[PeerView, ...]:
        """What is known of these peers, the gateway's own sessions on them included."""
        now_s = self._now_s
        notices = map(self._notices.get, peer_ids)
        views = [notice.view(now_s) for notice in notices if notice is not None and notice.expires_s > now_s]
        return self._own.add_to_views(views, now_s)

    def _known_rtt_ms(self, peer_id: str) -> float | None:
        return self._rtt_ms(peer_id) if peer_id in self.linked else None

    def _keep_up(self, demand: Demand, avoid: frozenset[str], *, first: bool) -> Route:
        key = (demand.tokens.bit_length(), demand.prompt_tokens.bit_length())
        standing, self._shortlist = replan_incumbent_among(
            self._standing.get(key),
            self._shortlist,
            self,
            demand.tokens,
            prompt_tokens=demand.prompt_tokens,
            now_s=self._now_s,
            criteria=criteria(avoid, first=first),
        )
        self._standing[key] = standing
        return standing.route
