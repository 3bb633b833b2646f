"""Relayed links: which pairs of peers only a relay can join, and what that takes. Pure.

Two peers have a direct link if either can be dialled, or if the NATs of both are cones, so that they can punch a hole
(Ford, Srisuresh and Kegel: Peer-to-peer communication across network address translators, 2005). Of any others, the
sender asks for the receiver at a relay where that one stays. A relay gives away a part of its uplink, of which each
pair that it joins has an equal share. It keeps to that by token buckets (`peer/reach/relay_limits.py`), so that what is
as short as a decode step's activation passes at the rate of its line, and what is long, as a prompt, at the share.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from molink.dht.records.records import Coordinate, PeerFacts, PeerView, RelayAt
from molink.routing.arrays import BoolArray, FloatArray, IntArray
from molink.routing.cost.cost import CostModel
from molink.routing.latency.latency_matrix import is_round_trip, latency_matrix_ms

MOST_RELAYED_MBPS = 20.0
RELAYED_PART = 10
"""Unless its owner says otherwise, a peer relays with one in so many of what its line carries away."""
BURST_S = 0.25
"""So much of a share passes at once, if as much was left before: a chunk beside a few decode rows."""
_NAME_LENGTH = 8


@dataclass(frozen=True, slots=True)
class RelayOffer:
    """What one more link over a relay would have."""

    peer_id: str
    """Of the peer that relays."""
    name: str
    coordinate: Coordinate | None
    mbps: float
    """Share of one link among those that the relay is expected to join."""
    line_mbps: float
    """What the relay's whole line carries away."""

    def through_ms(self, size_bytes: int) -> float:
        """Milliseconds that so many bytes take through the relay, if it carried no more than the share before."""
        return float(through_relay_ms(size_bytes, np.array(self.mbps), np.array(self.line_mbps)))


@dataclass(frozen=True, slots=True, eq=False)
class PeerLinks:
    """One-way latencies between peers, and the relays that some of their links need."""

    latency_ms: FloatArray
    """[peers, peers], row = from; the diagonal is 0."""
    offers: tuple[RelayOffer, ...] = ()
    chosen: IntArray | None = None
    """[peers, peers]: which of the offers a link goes over; -1: none. None: no link needs any."""

    def relay(self, source: int, target: int) -> RelayOffer | None:
        """The relay over which one peer sends to another."""
        at = -1 if self.chosen is None else int(self.chosen[source, target])
        return self.offers[at] if at >= 0 else None

    def relay_ms(self, size_bytes: int, uplinks_mbps: FloatArray) -> "RelayTimes | None":
        """What so many bytes take longer at the relay than on the sender's own line; None: no link needs a relay.
        `uplinks_mbps` has one for each peer."""
        if self.chosen is None:
            return None
        shares = np.array([*(offer.mbps for offer in self.offers), np.inf])[self.chosen]
        lines = np.array([*(offer.line_mbps for offer in self.offers), np.inf])[self.chosen]
        own_ms = size_bytes * 8 / 1000 / uplinks_mbps[:, None]
        alone_ms = np.maximum(0.0, through_relay_ms(size_bytes, shares, lines) - own_ms)
        among_ms = np.maximum(0.0, size_bytes * 8 / 1000 / shares - own_ms)
        needed = self.chosen >= 0
        return RelayTimes(np.where(needed, alone_ms, 0.0), np.where(needed, among_ms, 0.0))


@dataclass(frozen=True, slots=True, eq=False)
class RelayTimes:
    """Milliseconds that the same bytes take longer over relays; both arrays are [peers, peers], row = from."""

    alone_ms: FloatArray
    """By themselves, as a decode step's activation: none comes before the share has let them pass."""
    among_ms: FloatArray
    """Among many more, as those of a prompt."""


def through_relay_ms(size_bytes: int, share_mbps: FloatArray, line_mbps: FloatArray) -> FloatArray:
    """Milliseconds that so many bytes take through a relay whose bucket is full: what the bucket holds at the rate of
    the relay's line, the rest at the share. The buckets are full where steps take longer than BURST_S, or than the
    share takes for what they send. Three arrays of one shape."""
    kilobits = size_bytes * 8 / 1000
    at_once = np.minimum(kilobits, 1000 * BURST_S * share_mbps)
    return np.asarray(at_once / line_mbps + (kilobits - at_once) / share_mbps)


def relayed_mbps(uplink_mbps: float | None) -> float:
    """What a peer with such an uplink relays with, all pairs together, unless its owner says otherwise; None: nobody
    has measured the uplink."""
    if uplink_mbps is None:
        return MOST_RELAYED_MBPS / 4
    return min(MOST_RELAYED_MBPS, uplink_mbps / RELAYED_PART)


def relay_line_mbps(uplink_mbps: float | None) -> float:
    """What the line of a relay with such an uplink carries away; where nobody has measured it, as much as goes with
    what it then relays with."""
    return relayed_mbps(None) * RELAYED_PART if uplink_mbps is None else uplink_mbps


def needs_relay(one: PeerFacts, other: PeerFacts) -> bool:
    """Whether nothing but a relay joins two peers, by what they announce."""
    return is_undialable(one) and is_undialable(other) and not (one.cone and other.cone)


def is_undialable(facts: PeerFacts) -> bool:
    """Whether a peer announces relays in place of addresses."""
    return bool(facts.relays) and not facts.grpc_addresses


def preferred_relays(links: PeerLinks, source: int, target: PeerFacts, at: int) -> tuple[RelayAt, ...]:
    """The relays of `target`, whose row is `at`: that first over which `links` predicts what `source` sends, the others
    as they are announced."""
    best = links.relay(source, at)
    first = None if best is None else best.peer_id
    return tuple(sorted(target.relays, key=lambda relay: relay.peer_id != first))


def relay_offers(views: Iterable[PeerView]) -> dict[str, RelayOffer]:
    """What the relays at which these peers stay offer to one more link, by peer id.

    A peer that stays at a relay and has sessions now is expected to have one link over each of its relays with equal
    probability. Of a relay that is not among the peers nothing but its id is known.
    """
    known = {}
    pairs: dict[str, float] = {}
    for view in views:
        if view.facts.relay_address:
            known[view.peer_id] = view.facts
        if is_undialable(view.facts):
            part = 1 / len(view.facts.relays) if view.state.sessions > 0 else 0.0
            for relay in view.facts.relays:
                pairs[relay.peer_id] = pairs.get(relay.peer_id, 0.0) + part
    return {peer_id: _offer(peer_id, known.get(peer_id), count) for peer_id, count in pairs.items()}


def peer_links(
    views: Sequence[PeerView],
    rtt_ms: Mapping[tuple[str, str], float],
    offers: Mapping[str, RelayOffer],
    size_bytes: int,
    cost: CostModel,
) -> PeerLinks:
    """Links between peers: measured first, else as `latency_matrix_ms` predicts them, over a relay if they need one.

    The relay is that of the receiver's over which `size_bytes` arrive first: both legs, each as `latency_matrix_ms` has
    it, and the bytes as `through_relay_ms` has them. `offers` as `relay_offers` has them, of these peers at least.
    """
    names = [view.peer_id for view in views]
    coordinates = [view.facts.coordinate for view in views]
    needs = _needing(views, rtt_ms)
    if not needs.any():
        return PeerLinks(latency_matrix_ms(names, rtt_ms, coordinates, cost))
    asked = dict.fromkeys(
        relay.peer_id
        for target in np.flatnonzero(needs.any(axis=0)).tolist()
        for relay in views[target].facts.relays
    )
    used = tuple(offers.get(peer_id) or _offer(peer_id, None, 0.0) for peer_id in asked)
    places = {offer.peer_id: at for at, offer in enumerate(used)}
    listed = set(names)
    absent = [offer for offer in used if offer.peer_id not in listed]
    every = [*names, *(offer.peer_id for offer in absent)]
    known = [*coordinates, *(offer.coordinate for offer in absent)]
    legs_ms = latency_matrix_ms(every, rtt_ms, known, cost)
    rows = {peer_id: row for row, peer_id in enumerate(every)}
    latency_ms = legs_ms[: len(names), : len(names)].copy()
    chosen = np.full(needs.shape, -1, dtype=np.int64)
    for target in np.flatnonzero(needs.any(axis=0)).tolist():
        stays = [places[relay.peer_id] for relay in views[target].facts.relays]
        at = np.array([rows[used[place].peer_id] for place in stays])
        sources = np.flatnonzero(needs[:, target])
        # the relay itself reads no frame, so that there is one hop's overhead and not two
        ways_ms = legs_ms[np.ix_(sources, at)] + legs_ms[at, target] - cost.hop_overhead_ms
        sent_ms = np.array([used[place].through_ms(size_bytes) for place in stays])
        best = (ways_ms + sent_ms).argmin(axis=1)
        latency_ms[sources, target] = np.maximum(0.0, ways_ms[np.arange(len(sources)), best])
        chosen[sources, target] = np.array(stays)[best]
    return PeerLinks(latency_ms, used, chosen)


def _needing(views: Sequence[PeerView], rtt_ms: Mapping[tuple[str, str], float]) -> BoolArray:
    """[peers, peers]: pairs that nobody measured and that `needs_relay`."""
    hidden = np.array([is_undialable(view.facts) for view in views], dtype=np.bool_)
    cone = np.array([view.facts.cone for view in views], dtype=np.bool_)
    needs = (hidden[:, None] & hidden[None, :]) & ~(cone[:, None] & cone[None, :])
    np.fill_diagonal(needs, False)
    if needs.any():
        row = {view.peer_id: at for at, view in enumerate(views)}
        for (source, target), measured_ms in rtt_ms.items():
            if source in row and target in row and is_round_trip(measured_ms):
                needs[row[source], row[target]] = needs[row[target], row[source]] = False
    return np.asarray(needs, dtype=np.bool_)


def _offer(peer_id: str, facts: PeerFacts | None, pairs: float) -> RelayOffer:
    """Of a relay that joins so many pairs by now."""
    name, uplink_mbps = "", None
    if facts is not None:
        name, uplink_mbps = facts.name, facts.uplink_mbps
    return RelayOffer(
        peer_id,
        name or peer_id[-_NAME_LENGTH:],
        None if facts is None else facts.coordinate,
        relayed_mbps(uplink_mbps) / (1 + pairs),
        relay_line_mbps(uplink_mbps),
    )
