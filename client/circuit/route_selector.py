"""Route selector: a generation gets the route that such generations had last, unless another is really better."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.peer_history import InFlightLoad, PeerHistory, credited_tokens
from molink.client.circuit.quarantine import Quarantine
from molink.client.circuit.session_request import Speculation, needed_ability
from molink.client.epochs.kept_leases import PlannedRoute
from molink.client.epochs.moves_core import replaced_hops
from molink.client.epochs.patience import SignOfLife, queued_times
from molink.client.epochs.session_log import SessionLog
from molink.dht.records.records import PeerView
from molink.peer.wire.link.link import Link
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing import (
    Criteria,
    IncumbentRoute,
    NoCircuit,
    PartnerChoice,
    Route,
    Snapshot,
    choose_partners,
    replan,
)
from molink.routing.cost.terms import Demand
from molink.routing.routes.able_tails import lacking_ability, with_able_tails
from molink.routing.routes.copy_forms import CopyForm, copy_costs
from molink.routing.routes.partners import partner_candidates
from molink.routing.routes.shortlist import Shortlist, SnapshotPeers, replan_incumbent_among
from molink.shards.spec import ModelSpec

THOROUGH, QUICK = "refined", "augmented"
"""How a first circuit is searched for, and how one that must stand soon, after a loss or a refusal."""
THOROUGH_S = 0.05


class RouteSelector:
    """Route selector for one model over one connection; remembers its choices and what it saw of peers."""

    def __init__(self, connection: SwarmConnection, spec: ModelSpec) -> None:
        self._connection = connection
        self._spec = spec
        self._peer_history = PeerHistory()
        self._in_flight_load = InFlightLoad()
        self._standing: dict[tuple[str, bool, int, int], IncumbentRoute] = {}
        """By what the tail has to be able to do, whether tokens may be guessed, and the lengths of session and prompt,
        as powers of two."""
        self._shortlist: Shortlist | None = None

    def record_loss(self, peer_id: str) -> None:
        """Records the failure of a peer: it counts as less reliable from now on."""
        self._peer_history.record_loss(peer_id)

    def record_trips(self, template: pb.SessionDescriptor, log: SessionLog, asked: Speculation) -> None:
        """Records what a generation's trips have brought, if it has come to its end over one circuit and may have been
        guessed: what is measured of that circuit's head. What a prediction brought is not the head's."""
        route, trips, tokens = log.route, log.trips.trips - 1, len(log.arrived_s) - 1
        if route is None or log.epochs != 1 or log.moves or trips < 1:
            return
        if asked.prediction or not template.speculates:
            return
        taken_ms = 1000 * (log.arrived_s[-1] - log.arrived_s[0])
        credited = credited_tokens(trips, tokens, taken_ms, route.trip_ms)
        self._peer_history.record_trips(route.hops[0].peer_id, trips, credited)

    def begin_session(self, descriptor: pb.SessionDescriptor) -> None:
        """Counts a session on each hop of a circuit that is asked for leases."""
        self._in_flight_load.begin_session(*_stay(descriptor), asyncio.get_running_loop().time())

    def end_session(self, descriptor: pb.SessionDescriptor) -> None:
        """Counts the session no more on that circuit. No error if it has left before."""
        self._in_flight_load.end_session(*_stay(descriptor), asyncio.get_running_loop().time())

    def queued_times(self, peer_ids: Sequence[str], signs: Sequence[SignOfLife]) -> int:
        """Returns how many times as long as otherwise a token of a circuit of these peers may take, by their load: as
        announced, and this client's own."""
        views = [
            view for view in self._connection.snapshot(self._spec.model_hash) if view.peer_id in peer_ids
        ]
        now = self._in_flight_load.add_to_views(views, asyncio.get_running_loop().time())
        return queued_times(signs, max((view.state.sessions for view in now), default=0))

    async def choose(
        self, views: Sequence[PeerView], template: pb.SessionDescriptor, avoid: frozenset[str]
    ) -> Route:
        """The route for the session that `template` describes, thoroughly searched for if it is its first.

        A search runs on a thread of its own: the tokens of other generations do not wait for it.

        Raises:
            molink.routing.NoCircuit: there is none without the peers to avoid.
        """
        peer_ids = [view.peer_id for view in views]
        now_s = asyncio.get_running_loop().time()
        self._peer_history.record_alive(peer_ids, now_s)
        ability = needed_ability(template.sampling)
        views = with_able_tails(views, ability)
        snapshot = Snapshot(
            self._in_flight_load.add_to_views(views, now_s),
            self._spec,
            self._connection.measured_rtt_ms(),
            self._peer_history.observations_of(peer_ids, self._rtt_ms),
        )
        tokens = template.capacity_tokens
        prompt_tokens = min(template.prompt_tokens, tokens)
        guesses = template.speculates
        key = (ability, guesses, tokens.bit_length(), prompt_tokens.bit_length())
        try:
            standing, self._shortlist = await asyncio.to_thread(
                replan_incumbent_among,
                self._standing.get(key),
                self._shortlist,
                SnapshotPeers(snapshot),
                tokens,
                prompt_tokens=prompt_tokens,
                now_s=now_s,
                criteria=replace(
                    criteria(avoid, first=template.epoch == 0),
                    activation_codec=template.activation_codec,
                    guesses=guesses,
                ),
            )
        except NoCircuit as cause:
            raise lacking_ability(cause, views, ability) from cause
        self._standing[key] = standing
        return standing.route

    async def better(
        self,
        views: Sequence[PeerView],
        route: Route,
        descriptor: pb.SessionDescriptor,
        avoid: frozenset[str],
    ) -> Route:
        """The route that a session is on, or one that is really better for it (`replan`'s hysteresis).

        What the session itself takes of its peers counts for none of them. On a thread of its own, as `choose`.

        Raises:
            molink.routing.NoCircuit: that route holds no more, and there is none without the peers to avoid.
        """
        views = with_able_tails(views, needed_ability(descriptor.sampling))
        names = None if self._shortlist is None else {*self._shortlist.posed, *route.peer_ids}
        listed = [view for view in views if names is None or view.peer_id in names]
        peer_ids = [view.peer_id for view in listed]
        now_s = asyncio.get_running_loop().time()
        snapshot = Snapshot(
            self._in_flight_load.add_to_views(listed, now_s, _stay(descriptor)[0]),
            self._spec,
            self._connection.measured_rtt_ms(),
            self._peer_history.observations_of(peer_ids, self._rtt_ms),
        )
        return await asyncio.to_thread(
            partial(
                replan,
                route,
                snapshot,
                descriptor.capacity_tokens,
                prompt_tokens=min(descriptor.prompt_tokens, descriptor.capacity_tokens),
                leased=frozenset(route.peer_ids),
                criteria=replace(
                    criteria(avoid, first=False),
                    activation_codec=descriptor.activation_codec,
                    guesses=descriptor.speculates,
                ),
            )
        )

    async def partners(
        self,
        views: Sequence[PeerView],
        route: Route,
        descriptor: pb.SessionDescriptor,
        hops: Sequence[int],
        avoid: frozenset[str],
        without_time: frozenset[str],
    ) -> tuple[PartnerChoice, ...]:
        """Who should keep copies of these hops of a session's circuit. On a thread of its own, as `choose`."""
        views = with_able_tails(views, needed_ability(descriptor.sampling))
        names = None
        if self._shortlist is not None:
            names = partner_candidates(views, frozenset(self._shortlist.posed), route, hops)
        listed = [view for view in views if names is None or view.peer_id in names]
        peer_ids = [view.peer_id for view in listed]
        now_s = asyncio.get_running_loop().time()
        snapshot = Snapshot(
            self._in_flight_load.add_to_views(listed, now_s),
            self._spec,
            self._connection.measured_rtt_ms(),
            self._peer_history.observations_of(peer_ids, self._rtt_ms),
        )
        demand = Demand.of(descriptor.capacity_tokens, descriptor.prompt_tokens)
        codec = descriptor.activation_codec
        return await asyncio.to_thread(
            partial(
                choose_partners,
                snapshot,
                route,
                demand,
                avoid=avoid,
                hops=hops,
                activation_codec=codec,
                without_time=without_time,
            )
        )

    def _rtt_ms(self, peer_id: str) -> float | None:
        link = self._connection.links.find(peer_id)
        return None if link is None else link.rtt_ms


def _stay(descriptor: pb.SessionDescriptor) -> tuple[tuple[bytes, int], tuple[str, ...]]:
    """Which session, in which epoch, is on which peers."""
    return (descriptor.session, descriptor.epoch), tuple(hop.peer_id for hop in descriptor.hops)


def criteria(avoid: frozenset[str], *, first: bool) -> Criteria:
    """How a circuit without these peers is searched for; thoroughly if it is a session's first."""
    if first:
        return Criteria(avoid=avoid, algorithm=THOROUGH, time_limit_s=THOROUGH_S)
    return Criteria(avoid=avoid, algorithm=QUICK)


def _share_work(peers: Mapping[str, PeerView], one: str, other: str) -> bool:
    """Whether these two holders of a span share its work by roles: which of them decodes a session they know better,
    who know what either computes now."""
    known = (peers.get(one), peers.get(other))
    return all(view is not None and view.facts.pairs for view in known)


@dataclass(frozen=True, slots=True)
class BetterCircuit:
    """A circuit that a session is to go over to."""

    planned: PlannedRoute
    replaced: Mapping[str, tuple[PeerView, CopyForm]]
    """By the peers of the hops that are to be left, who takes their places at the same spans, and in which form each
    gets its copy, that of the fewest bytes; empty: its spans are others."""


class StandbyChoice:
    """Choice of the peers that keep copies of a circuit's hops, and the links to them."""

    def __init__(
        self, connection: SwarmConnection, spec: ModelSpec, quarantine: Quarantine, selector: RouteSelector
    ) -> None:
        self._connection = connection
        self._spec = spec
        self._quarantine = quarantine
        self._selector = selector

    async def partners(
        self,
        route: Route,
        descriptor: pb.SessionDescriptor,
        hops: Sequence[int],
        taken: frozenset[str],
        without_time: frozenset[str],
    ) -> Mapping[int, tuple[PeerView, CopyForm]]:
        """Returns who should keep copies of these hops of a circuit that stands, and in which form, by hop, without
        those `taken`; keys and values alone go to those `without_time`."""
        views = self._connection.snapshot(self._spec.model_hash)
        avoided, _ = self._quarantine.excluded_peers(views, asyncio.get_running_loop().time())
        choices = await self._selector.partners(views, route, descriptor, hops, avoided | taken, without_time)
        peers = {view.peer_id: view for view in views}
        return {
            at: (peers[choice.peer_id], choice.cost.form)
            for at, choice in zip(hops, choices, strict=True)
            if choice.peer_id is not None and choice.cost is not None
        }

    async def better(self, route: Route, descriptor: pb.SessionDescriptor) -> "BetterCircuit | None":
        """Returns the circuit that a session is to go over to because it is really better; None: there is none, or it
        has layers to load."""
        views = self._connection.snapshot(self._spec.model_hash)
        avoided, _ = self._quarantine.excluded_peers(views, asyncio.get_running_loop().time())
        try:
            found = await self._selector.better(views, route, descriptor, avoided)
        except NoCircuit:
            return None
        if found.peer_ids == route.peer_ids or any(hop.cold_spans for hop in found.hops):
            return None
        planned = PlannedRoute(found, {view.peer_id: view for view in views})
        if any(_share_work(planned.peers, *pair) for pair in (replaced_hops(route, found) or {}).items()):
            return None
        spans = {hop.peer_id: hop.span for hop in route.hops}
        replaced = {
            peer_id: (planned.peers[other], copy_costs(self._spec, spans[peer_id], self._spec.dtype)[0].form)
            for peer_id, other in (replaced_hops(route, found) or {}).items()
        }
        return BetterCircuit(planned, replaced)

    async def link_to(self, view: PeerView) -> Link:
        """Returns the link to a peer.

        Raises:
            LinkError: there is none, and none could be made.
        """
        return await self._connection.links.to(view.facts)

    def refresh_now(self) -> None:
        """Has the peers' tables pulled, while the caller does something else."""
        self._connection.refresh_now()
