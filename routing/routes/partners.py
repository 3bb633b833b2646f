"""Partner choice: who keeps a second copy of each hop's KV cache, and takes its place when it is lost. Pure.

The copy is AcceLLM's redundant KV cache (section 4.1.2: what is computed on one instance is sent to another as it is
computed). There instances are paired for good, and copies balance load; here a partner is chosen for each hop of a
circuit, among peers that hold the layers anyway, and what counts is how the circuit goes on without the hop's peer.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from molink.dht.records.records import PeerFacts, PeerView
from molink.routing.arrays import FloatArray
from molink.routing.cost.cost import CostModel
from molink.routing.cost.encodings import encodings_of_circuit
from molink.routing.cost.terms import Demand, PeerCosts, peer_costs
from molink.routing.placement.coverage import layer_table
from molink.routing.routes.assignment import assign
from molink.routing.routes.copy_forms import CopyCost, CopyForm, can_compute, computing_ms, copy_costs, pays
from molink.routing.routes.route import Route, RouteHop
from molink.routing.snapshot import Snapshot
from molink.shards.backoff import Backoff
from molink.shards.spec import merge_spans

COPY_SHARE = 0.5
"""Of what decode leaves of an uplink, the part that copies may count on. Copies go after everything but weights, and
are guaranteed a twentieth only: the other half is for what goes before them and comes in bursts, prompts above all."""
MOST_SOUGHT = 16
"""Holders of a hop's layers beyond the shortlist: enough that one of them has room, few enough to be compared."""
SEEK_AGAIN = Backoff(first_s=1.0, longest_s=30.0)
"""After how long partners are sought again for hops that have none, although nothing was lost: peers load layers,
come, and have room again."""
_MBPS_BYTES = 125_000
_SAME_HOME_MS = 1e6
"""Worse than any predicted TPOT that is told from another."""
_NOBODY_MS = 1e9
"""Worse than a partner in the same home for every hop of a circuit."""


class NoPartner(StrEnum):
    """Reason why a hop gets no partner."""

    UNKNOWN = "unknown"
    """A peer of the circuit is not in the snapshot, or has left: nobody can tell how it would go on."""
    DECLINED = "declined"
    """The hop's peer wants no copies, or wants them where there can be none."""
    UPLINK = "uplink"
    """The hop's peer could not send its copy as fast as that grows, in whatever form."""
    WORK = "work"
    """It could send only what a partner computes from, and none of those with room has the time."""
    SPAN = "span"
    """No other peer holds all layers of the hop."""
    MEMORY = "memory"
    """None of those that do has room for the session."""
    SHORT = "short"
    """The copy would be far more work than what may still be generated."""
    TAKEN = "taken"
    """All that could are the partners of other hops: a peer has one lease of a session."""


@dataclass(frozen=True, slots=True)
class PartnerChoice:
    """The partner of one hop, or why there is none."""

    peer_id: str | None
    tpot_ms: float | None
    """Of the circuit with the partner in the hop's place, as predicted."""
    reason: NoPartner | None
    cost: CopyCost | None = None
    """In which form the copy goes there, and what that takes; None without a partner."""

    @classmethod
    def none(cls, reason: NoPartner) -> "PartnerChoice":
        return cls(None, None, reason)


def choose_partners(
    snapshot: Snapshot,
    route: Route,
    demand: Demand,
    *,
    avoid: frozenset[str] = frozenset(),
    hops: Sequence[int] | None = None,
    activation_codec: str = "",
    without_time: frozenset[str] = frozenset(),
) -> tuple[PartnerChoice, ...]:
    """A partner for each hop of the route, or for those of the numbers `hops`, in their order.

    A partner holds the whole span, has room for the KV cache of `demand`, is not on the circuit nor in `avoid`, does
    not drain, and is the partner of one hop only; a hop whose peer drains gets one as any other does. As many hops as
    possible get one; as few as possible of these one at the address of the hop's own peer, since what takes a home
    from the network takes both; and of all such choices it is the one after whose switches, each by itself, the
    circuits' TPOTs are least in sum, by the router's own terms. Costs are those of the snapshot, which may have counted
    the session on its own circuit already: that adds the same to all. Links that nobody measured are guessed from what
    these peers measured.

    Peers that keep no copies for others have none kept of theirs; one whose owner has named a partner has it there or
    nowhere. A copy goes in the form of the fewest bytes that the partner can compute from as fast as tokens come, by
    the latencies that it announces, in half of its idle time; keys and values need no computing, and are all that goes
    to those `without_time`, who were seen not to keep up. A hop whose peer cannot send its copy as fast as that grows
    gets none: half of what decode leaves of its uplink, divided among its sessions, has to carry it at the route's
    TPOT. Of a peer that shares work with its partner the copy goes as keys and values, if all that decode leaves can
    carry these, or is not known. `activation_codec` is what the session asks for. Equal snapshots give equal choices,
    in whatever order their peers are listed. Takes milliseconds for some hundred peers: of a large swarm give it a
    shortlist.

    Raises:
        ValueError: the route has no such hop.
    """
    cost = CostModel()
    wanted = tuple(range(len(route.hops)) if hops is None else hops)
    if any(not 0 <= at < len(route.hops) for at in wanted):
        raise ValueError(f"the route's hops are 0 to {len(route.hops) - 1}, not {list(wanted)}")
    own = frozenset(route.peer_ids)
    views = snapshot.usable(avoid - own, own)
    places = {view.peer_id: place for place, view in enumerate(views)}
    if not own <= places.keys():
        return (PartnerChoice.none(NoPartner.UNKNOWN),) * len(wanted)
    free = np.array([view.peer_id not in own for view in views])
    held = np.array([layer_table(snapshot.model.layers, view.state.spans) for view in views])
    chosen: dict[int, PartnerChoice] = {}
    encodings = _encodings(
        snapshot.model.dtype, activation_codec, [views[places[one]] for one in route.peer_ids]
    )
    able: dict[int, list[_Able]] = {}
    for at in sorted(set(wanted)):
        hop = route.hops[at]
        holding = np.flatnonzero(free & held[:, hop.span.start : hop.span.stop].all(axis=1))
        holders = [views[place] for place in holding.tolist()]
        copied = _Copied(hop, views[places[hop.peer_id]], encodings[at - 1], route.tpot_ms, without_time)
        found = _able(snapshot, copied, holders, demand, cost)
        if isinstance(found, NoPartner):
            chosen[at] = PartnerChoice.none(found)
        else:
            able[at] = found
    if able:
        names = {one.view.peer_id for others in able.values() for one in others} | own
        ways = _Ways.among([view for view in views if view.peer_id in names], snapshot, route, demand, cost)
        chosen |= _assigned(ways, able)
    return tuple(chosen[at] for at in wanted)


def partner_candidates(
    views: Collection[PeerView], shortlist: frozenset[str], route: Route, hops: Sequence[int]
) -> frozenset[str]:
    """Returns among whom of a large swarm partners of these hops are sought: the shortlist on which the circuit was
    planned, the circuit itself, and where few on that list hold a hop's layers, those of all others who do and have the
    fewest sessions."""
    chosen = shortlist | frozenset(route.peer_ids)
    held = [(view, merge_spans(view.state.spans)) for view in views if not view.state.draining]
    for at in hops:
        span = route.hops[at].span
        holders = [view for view, spans in held if any(one.covers(span) for one in spans)]
        others = [view for view in holders if view.peer_id not in chosen]
        others.sort(key=lambda view: (view.state.sessions, view.peer_id))
        wanted = MOST_SOUGHT - (len(holders) - len(others))
        chosen |= {view.peer_id for view in others[: max(0, wanted)]}
    return chosen


def copy_bytes_per_s(uplink_mbps: float, decode_bytes_per_s: float, copies: int) -> float:
    """Returns what an uplink on which decode sends so much leaves for each of so many copies, by COPY_SHARE."""
    return COPY_SHARE * max(0.0, uplink_mbps * _MBPS_BYTES - decode_bytes_per_s) / max(1, copies)


@dataclass(frozen=True, slots=True)
class _Copied:
    """A hop that is to be copied."""

    hop: RouteHop
    view: PeerView
    encoding: str
    """Of the rows that come to it."""
    tpot_ms: float
    without_time: frozenset[str]

    @property
    def tokens_per_s(self) -> float:
        return 1000 / self.tpot_ms if self.tpot_ms > 0 else math.inf


@dataclass(frozen=True, slots=True)
class _Able:
    """A peer that could be a hop's partner, and what the copy would take."""

    view: PeerView
    cost: CopyCost


def _encodings(dtype: str, activation_codec: str, views: Sequence[PeerView]) -> tuple[str, ...]:
    """That of the rows out of each hop of a circuit over these peers."""
    return encodings_of_circuit(activation_codec, dtype, [view.facts.activation_codecs for view in views])


def _able(
    snapshot: Snapshot, copied: _Copied, holders: list[PeerView], demand: Demand, cost: CostModel
) -> list[_Able] | NoPartner:
    """Those of the other peers with the hop's layers that could be its partner, at least one, or why there is none."""
    model, view, span = snapshot.model, copied.view, copied.hop.span
    if not view.facts.keeps_copies:
        return NoPartner.DECLINED
    wanted = view.facts.partner_peer_id
    keeping = [other for other in holders if other.facts.keeps_copies and wanted in ("", other.peer_id)]
    if holders and not keeping:
        return NoPartner.DECLINED
    left_bytes_per_s = _left_bytes_per_s(snapshot, copied, cost)
    carried = [
        one
        for one in copy_costs(model, span, copied.encoding)
        if one.token_bytes * copied.tokens_per_s <= left_bytes_per_s
    ]
    if view.facts.pairs:  # a partner that computes the same prompts could not decode meanwhile
        carried = _lines(snapshot, copied, left_bytes_per_s / COPY_SHARE) or carried
    if not carried:
        return NoPartner.UPLINK
    needed_bytes = model.kv_bytes(span, demand.tokens)
    roomy = [other for other in keeping if other.state.free_kv_bytes >= needed_bytes]
    if not roomy:
        return NoPartner.MEMORY if holders else NoPartner.SPAN
    # sessions of who leaves, or shares its work, go over to their copies without a loss
    if not view.facts.pairs and not view.state.draining:
        left_ms = demand.new_tokens * copied.hop.compute_ms
        roomy = [other for other in roomy if pays(other, span, demand.prompt_tokens, left_ms, cost)]
    if not roomy:
        return NoPartner.SHORT
    able = [
        _Able(other, found)
        for other in roomy
        if (found := _cheapest(other, copied, carried, cost)) is not None
    ]
    return able or NoPartner.WORK


def _lines(snapshot: Snapshot, copied: _Copied, left_bytes_per_s: float) -> list[CopyCost]:
    """The hop's copy as keys and values, unless its line is known to be too thin for what is decoded: then that copy
    would stay behind, and be of no use."""
    is_known = snapshot.seen(copied.view).uplink_mbps is not None
    return [
        one
        for one in copy_costs(snapshot.model, copied.hop.span, copied.encoding)
        if one.form is CopyForm.KEYS_AND_VALUES
        and (not is_known or one.token_bytes * copied.tokens_per_s <= left_bytes_per_s)
    ]


def _left_bytes_per_s(snapshot: Snapshot, copied: _Copied, cost: CostModel) -> float:
    """What of the hop's uplink its copy may count on."""
    sessions = max(1, copied.view.state.sessions)
    uplink_mbps = snapshot.seen(copied.view).uplink_mbps or cost.unknown_bandwidth_mbps
    decode_bytes_per_s = sessions * snapshot.model.activation_bytes * copied.tokens_per_s
    return copy_bytes_per_s(uplink_mbps, decode_bytes_per_s, sessions)


def _cheapest(
    other: PeerView, copied: _Copied, carried: Sequence[CopyCost], cost: CostModel
) -> CopyCost | None:
    """Of the forms that the hop's line carries, that of the fewest bytes for which that peer has the time."""
    for one in carried:
        if one.form is CopyForm.KEYS_AND_VALUES:
            return one
        if other.peer_id in copied.without_time:
            continue
        token_ms = computing_ms(other, copied.hop.span, copied.tokens_per_s, cost)
        if can_compute(other, token_ms, copied.tpot_ms):
            return replace(one, token_ms=token_ms)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """Costs of the circuit through any of some peers, its own among them."""

    views: Sequence[PeerView]
    costs: Sequence[PeerCosts]
    latency_ms: FloatArray
    """[views, views]"""
    hops: Sequence[RouteHop]
    own: Sequence[int]
    """Of each hop, the place of its peer among the views."""
    last_layer: int

    @classmethod
    def among(
        cls, views: Sequence[PeerView], snapshot: Snapshot, route: Route, demand: Demand, cost: CostModel
    ) -> "_Ways":
        # what the loss of a peer would cost is no part of a TPOT
        costs = [peer_costs(view, snapshot.seen(view), snapshot.model, demand, 0.0, cost) for view in views]
        places = {view.peer_id: place for place, view in enumerate(views)}
        own = [places[peer_id] for peer_id in route.peer_ids]
        return cls(
            views, costs, snapshot.links(views, cost).latency_ms, route.hops, own, snapshot.model.layers
        )

    def step_ms(self, at: int, place: int) -> float:
        """Of hop `at`, computed there."""
        span = self.hops[at].span
        return self.costs[place].step_ms(len(span), first=span.start == 0, last=span.stop == self.last_layer)

    def after_ms(self, at: int, places: Sequence[int]) -> FloatArray:
        """[places]: the circuit's TPOT with each of them in place of hop `at`'s peer."""
        count, own = len(self.hops), self.own
        rest_ms = sum(self.step_ms(hop, own[hop]) for hop in range(count) if hop != at)
        steps_ms: FloatArray = np.array([self.step_ms(at, place) for place in places])
        if count == 1:
            return steps_ms
        onwards = [hop for hop in range(count) if hop not in (at, (at - 1) % count)]
        rest_ms += sum(float(self.latency_ms[own[hop], own[(hop + 1) % count]]) for hop in onwards)
        before, after = own[(at - 1) % count], own[(at + 1) % count]
        there_ms: FloatArray = self.latency_ms[before, places] + self.latency_ms[places, after]
        total_ms: FloatArray = rest_ms + steps_ms + there_ms
        return total_ms


def _assigned(ways: _Ways, able: Mapping[int, Sequence[_Able]]) -> dict[int, PartnerChoice]:
    """Of hops with peers that could be their partners: which becomes which one's."""
    places = {view.peer_id: place for place, view in enumerate(ways.views)}
    hosts = [_hosts(view.facts) for view in ways.views]
    # a column for nobody for each hop: one goes without only if others need all its partners
    costs = np.full((len(able), len(places) + len(able)), _NOBODY_MS)
    after_ms = np.full_like(costs, np.inf)
    for row, (at, others) in enumerate(able.items()):
        columns = [places[other.view.peer_id] for other in others]
        home = hosts[ways.own[at]]
        shared = np.array([not home.isdisjoint(hosts[column]) for column in columns])
        after_ms[row, columns] = ways.after_ms(at, columns)
        costs[row, columns] = np.minimum(after_ms[row, columns], _SAME_HOME_MS) + _SAME_HOME_MS * shared
    copies = {(at, places[one.view.peer_id]): one.cost for at, others in able.items() for one in others}
    choices = {}
    for row, (at, column) in enumerate(zip(able, assign(costs), strict=True)):
        if costs[row, column] < _NOBODY_MS:
            after = float(after_ms[row, column])
            choices[at] = PartnerChoice(ways.views[column].peer_id, after, None, copies[at, column])
        else:
            choices[at] = PartnerChoice.none(NoPartner.TAKEN)
    return choices


def _hosts(facts: PeerFacts) -> frozenset[str]:
    """Returns the hosts where a peer can be dialled directly, without ports."""
    hosts = {address.rpartition(":")[0] for address in facts.grpc_addresses}
    direct = (address.split("/") for address in facts.addresses if "/p2p-circuit" not in address)
    return frozenset(hosts | {parts[2] for parts in direct if len(parts) > 2})
