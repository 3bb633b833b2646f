"""A gateway: what it knows of the swarm, whom it avoids, and the circuits that it chooses."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from molink.client.circuit.blame import BlameLedger, second_choices
from molink.client.circuit.circuit_core import Refusal
from molink.client.circuit.quarantine import Quarantine
from molink.client.circuit.route_selector import criteria
from molink.dht.records.records import PeerFacts
from molink.peer.memory.leases import LeaseKey
from molink.routing import IncumbentRoute, NoCircuit, PartnerChoice, Route, choose_partners, replan
from molink.routing.cost.terms import Demand
from molink.routing.routes.partners import partner_candidates
from molink.routing.routes.shortlist import Shortlist, replan_incumbent_among
from molink.shards.spec import ModelSpec
from molink.simnet.swarm.members.bulletin import Notice
from molink.simnet.swarm.sessions.gateway_view import GatewayView

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
        *,
        guesses: bool = False,
    ) -> None:
        """`guesses`: whether its sessions' tokens are guessed."""
        self.peer_id = peer_id
        self._guesses = guesses
        self.plans = 0
        self._view = GatewayView(model, pull, rtt_ms)
        self._quarantine = Quarantine()
        self._standing: dict[tuple[int, int], IncumbentRoute] = {}
        self._shortlist: Shortlist | None = None

    @property
    def linked(self) -> set[str]:
        """Peers to which it has a link, and so knows the round trip."""
        return self._view.linked

    def refresh(self, now_s: float) -> None:
        """Copies the peers' table."""
        self._view.refresh(now_s)

    def choose(self, demand: Demand, now_s: float, *, first: bool) -> Route:
        """The route for a session; raises NoCircuit if there is none among all that it knows."""
        self._view.look(now_s)
        self._view.record_alive()
        self.plans += 1
        avoided, shunned = self._quarantine.excluded_peers(self._view.views(self._quarantine.entries), now_s)
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
        """Who should keep copies of these hops of a session's circuit, `taken` being the partners that it has."""
        self._view.look(now_s)
        names = None
        if self._shortlist is not None:
            names = partner_candidates(
                self._view.snapshot().peers, frozenset(self._shortlist.posed), route, hops
            )
        avoided, _ = self._quarantine.excluded_peers(self._view.views(self._quarantine.entries), now_s)
        return choose_partners(self._view.snapshot(names), route, demand, avoid=avoided | taken, hops=hops)

    def better(self, route: Route, demand: Demand, key: LeaseKey, now_s: float) -> Route | None:
        """The route that a session is on, or one that is really better for it; None: there is none any more."""
        self._view.look(now_s)
        names = None if self._shortlist is None else {*self._shortlist.posed, *route.peer_ids}
        avoided, _ = self._quarantine.excluded_peers(self._view.views(self._quarantine.entries), now_s)
        try:
            return replan(
                route,
                self._view.snapshot(names, key),
                demand.tokens,
                prompt_tokens=demand.prompt_tokens,
                leased=frozenset(route.peer_ids),
                criteria=replace(criteria(avoided, first=False), guesses=self._guesses),
            )
        except NoCircuit:
            return None

    def asks(self, key: LeaseKey, peer_ids: Sequence[str], now_s: float) -> None:
        """The hops of a circuit are asked for leases."""
        self._view.own.begin_session(key, peer_ids, now_s)

    def gives_back(self, key: LeaseKey, peer_ids: Sequence[str], now_s: float) -> None:
        """A session has left that circuit."""
        self._view.own.end_session(key, peer_ids, now_s)

    def served(self, head: str, trips: float, tokens: float) -> None:
        """A session has ended over one circuit, whose trips have brought so many tokens."""
        if self._guesses and trips >= 1:
            self._view.history.record_trips(head, round(trips), tokens)

    def lost(self, facts: PeerFacts, now_s: float) -> None:
        """A peer went away from under a session."""
        self.refused(facts, now_s, Refusal("lost"), "")

    def refused(self, facts: PeerFacts, now_s: float, refusal: Refusal, detail: str) -> None:
        """A peer has refused, or could not be reached."""
        if refusal.is_gone:
            self._view.linked.discard(facts.peer_id)
        if refusal.code == "lost":
            self._view.history.record_loss(facts.peer_id)
        seconds = refusal.left_out_s(self._view.count)
        if seconds:
            self._quarantine.quarantine_peer(facts, now_s, seconds, detail, certain=refusal.code != "slow")

    def _keep_up(self, demand: Demand, avoid: frozenset[str], *, first: bool) -> Route:
        key = (demand.tokens.bit_length(), demand.prompt_tokens.bit_length())
        standing, self._shortlist = replan_incumbent_among(
            self._standing.get(key),
            self._shortlist,
            self._view,
            demand.tokens,
            prompt_tokens=demand.prompt_tokens,
            now_s=self._view.now_s,
            criteria=replace(criteria(avoid, first=first), guesses=self._guesses),
        )
        self._standing[key] = standing
        return standing.route
