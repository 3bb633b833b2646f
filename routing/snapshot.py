"""The verified announcements of one model's peers, and the circuit problem that they pose."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from molink.dht.records.records import PROTOCOL_VERSION, PeerFacts, PeerView, RelayAt
from molink.routing.arrays import BoolArray
from molink.routing.cost.cost import CostModel
from molink.routing.cost.reliability import UNSEEN, PeerObservation
from molink.routing.cost.terms import Demand, PeerCosts, peer_costs, recovery_ms
from molink.routing.latency.latency_matrix import is_round_trip
from molink.routing.latency.relayed_links import (
    PeerLinks,
    RelayOffer,
    RelayTimes,
    peer_links,
    preferred_relays,
    relay_offers,
)
from molink.routing.problem.problem import CircuitProblem
from molink.shards.spec import ModelSpec, Span


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Snapshot: what a router knows at one moment. Peers must be verified: nothing is checked here but plausibility."""

    peers: tuple[PeerView, ...]
    model: ModelSpec
    measured_rtt_ms: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The router's own measurements between two peers (from, to), in milliseconds; they go before announced
    ones."""
    observed: Mapping[str, PeerObservation] = field(default_factory=dict)
    """What the router has seen of peers, by peer id. Nothing, of peers that are not in it."""
    relays: Mapping[str, RelayOffer] | None = None
    """What relays offer, by peer id, where `peers` are only some of those that are known; None: as these peers
    announce."""

    def usable(
        self, avoid: frozenset[str] = frozenset(), serving: frozenset[str] = frozenset()
    ) -> tuple[PeerView, ...]:
        """The peers that may join a new circuit, and those that are on one already, in order of peer id.

        Left out: peers to avoid, peers that drain but for those `serving`, peers that have left, of another protocol
        version or of another model, and peers whose measurements make no sense.
        """
        chosen = {
            view.peer_id: view
            for view in self.peers
            if view.peer_id not in avoid
            and view.facts.model.model_hash == self.model.model_hash
            and (view.peer_id in serving or not view.state.draining)
            and _available(view)
        }
        return tuple(chosen[peer_id] for peer_id in sorted(chosen))

    def problem(
        self,
        tokens: int,
        *,
        prompt_tokens: int | None = None,
        avoid: frozenset[str] = frozenset(),
        warm_only: bool = False,
        cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
    ) -> tuple[CircuitProblem, tuple[str, ...]]:
        """The problem of a circuit for one session, as `pose`, and whose each machine is."""
        posed = self.pose(Demand.of(tokens, prompt_tokens), avoid=avoid, warm_only=warm_only, cost=cost)
        return posed.problem, posed.peer_ids

    def pose(
        self,
        demand: Demand,
        *,
        avoid: frozenset[str] = frozenset(),
        warm_only: bool = False,
        cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
    ) -> "PosedProblem":
        """The problem of a circuit for one session, with the costs that it was made of.

        A layer's time is the announced one at the batch size that this session would make of those that the
        peer has; everything else that a peer costs is as `PeerCosts` says. With `warm_only` no layer needs
        loading.
        """
        views = self.usable(avoid)
        recovery = recovery_ms(views, self.model, demand, cost)
        costs = tuple(peer_costs(view, self.seen(view), self.model, demand, recovery, cost) for view in views)
        resident = _table(self.model.layers, [view.state.spans for view in views])
        load_ms = np.zeros((len(views), self.model.layers))
        for row, view in enumerate(views):
            if view.facts.load_bytes_per_s > 0:
                load_ms[row] = np.array(self.model.layer_bytes) * 1000.0 / view.facts.load_bytes_per_s
        links = self.links(views, cost)
        uplinks = [self.seen(view).uplink_mbps or cost.unknown_bandwidth_mbps for view in views]
        relay_ms = links.relay_ms(self.model.activation_bytes, np.array(uplinks))
        latency_ms = links.latency_ms
        if relay_ms is not None:
            latency_ms = latency_ms + relay_ms.alone_ms + relay_ms.among_ms * demand.prompt_part
        problem = CircuitProblem(
            layer_ms=np.array([each.batched_layer_ms for each in costs]),
            latency_ms=latency_ms,
            free_bytes=np.array(
                [0 if warm_only else _loadable_bytes(view) for view in views], dtype=np.int64
            ),
            layer_bytes=np.array(self.model.layer_bytes, dtype=np.int64),
            embed_ms=np.array([each.start_ms for each in costs], dtype=np.float64),
            head_ms=np.array([each.head_ms for each in costs], dtype=np.float64),
            resident=resident,
            allowed=resident if warm_only else resident | self._willing(views),
            embed_bytes=self.model.embed_bytes,
            head_bytes=self.model.head_bytes,
            shared_bytes=self.model.shared_bytes,
            embed_resident=resident[:, 0],
            head_resident=resident[:, -1],
            kv_bytes=np.array(
                [self.model.kv_bytes(Span(at, at + 1), demand.tokens) for at in range(self.model.layers)],
                dtype=np.int64,
            ),
            free_kv_bytes=np.array([max(0, view.state.free_kv_bytes) for view in views], dtype=np.int64),
            load_ms=load_ms + cost.load_layer_overhead_ms,
            load_weight=1.0 / cost.load_amortisation_tokens,
            hop_penalty_ms=np.array([each.hop_ms for each in costs], dtype=np.float64),
        )
        return PosedProblem(problem, views, costs, demand, links, relay_ms)

    def links(self, views: Sequence[PeerView], cost: CostModel) -> PeerLinks:
        """Links between peers, as `peer_links` finds them; what is guessed, from these peers' measurements."""
        return peer_links(views, self._rtt_ms(views), self.relay_offers(), self.model.activation_bytes, cost)

    def preferred_relays(
        self,
        source: str,
        target: PeerFacts,
        cost: CostModel = CostModel(),  # noqa: B008 (an immutable value)
    ) -> tuple[RelayAt, ...]:
        """The relays of a peer, that first over which a circuit's link from `source` is predicted to go; as they are
        announced, where none is."""
        known = {view.peer_id: view for view in self.peers}
        wanted = (source, target.peer_id, *(relay.peer_id for relay in target.relays))
        if source not in known or target.peer_id not in known:
            return target.relays
        views = [known[peer_id] for peer_id in dict.fromkeys(wanted) if peer_id in known]
        return preferred_relays(self.links(views, cost), 0, target, 1)

    def relay_offers(self) -> Mapping[str, RelayOffer]:
        """What relays offer to one more link, by peer id."""
        return relay_offers(self.peers) if self.relays is None else self.relays

    def seen(self, view: PeerView) -> PeerObservation:
        """Returns what the router has seen of a peer; of its uplink, where that is nothing, what the peer itself
        measured."""
        seen = self.observed.get(view.peer_id, UNSEEN)
        announced = view.facts.uplink_mbps
        if (
            seen.uplink_mbps is not None
            or announced is None
            or not (math.isfinite(announced) and announced > 0)
        ):
            return seen
        return replace(seen, uplink_mbps=announced)

    def measured(self, one: PeerView, other: PeerView) -> bool:
        """Whether anybody has measured the round trip between two peers."""
        return any(
            is_round_trip(rtt_ms)
            for source, target in ((one, other), (other, one))
            for rtt_ms in (
                self.measured_rtt_ms.get((source.peer_id, target.peer_id), math.nan),
                *(link.rtt_ms for link in source.facts.links if link.peer_id == target.peer_id),
            )
        )

    def _willing(self, views: Sequence[PeerView]) -> BoolArray:
        whole = self.model.whole
        return _table(self.model.layers, [(view.facts.span_limit or whole,) for view in views])

    def _rtt_ms(self, views: Sequence[PeerView]) -> dict[tuple[str, str], float]:
        announced = {(view.peer_id, link.peer_id): link.rtt_ms for view in views for link in view.facts.links}
        return {**announced, **self.measured_rtt_ms}


@dataclass(frozen=True, slots=True, eq=False)
class PosedProblem:
    """Posed problem: a circuit problem, and the peers that its machines are."""

    problem: CircuitProblem
    views: tuple[PeerView, ...]
    """One for each machine."""
    costs: tuple[PeerCosts, ...]
    """Of which the problem's times were made, one for each machine."""
    demand: Demand
    links: PeerLinks
    relay_ms: RelayTimes | None
    """That an activation takes longer at links' relays than on the senders' lines; None: no link needs a relay. In the
    problem's latencies: alone for a step, and among others for the prompt's part (`Demand.prompt_part`)."""

    @property
    def peer_ids(self) -> tuple[str, ...]:
        """One for each machine, in alphabetical order."""
        return tuple(view.peer_id for view in self.views)

    def of_decode_steps(self) -> CircuitProblem:
        """The problem whose objective is computation and links of a decode step alone, whoever the client is."""
        embed_ms = np.array([each.embed_ms for each in self.costs], dtype=np.float64)
        latency_ms = self.links.latency_ms
        if self.relay_ms is not None:
            latency_ms = latency_ms + self.relay_ms.alone_ms
        return replace(
            self.problem, latency_ms=latency_ms, embed_ms=embed_ms, hop_penalty_ms=None, load_weight=0.0
        )

    def relay_of(self, source: int, target: int) -> tuple[float, float]:
        """Milliseconds that an activation takes longer at the relay of a link, if it has one: alone, and among those of
        a prompt."""
        times = self.relay_ms
        if times is None:
            return 0.0, 0.0
        return float(times.alone_ms[source, target]), float(times.among_ms[source, target])


def _available(view: PeerView) -> bool:
    facts, state = view.facts, view.state
    if state.ttl_s == 0 or facts.ttl_s == 0 or facts.protocol_version != PROTOCOL_VERSION:
        return False
    latencies, most = facts.layer_latencies, math.inf
    return (
        len(latencies) > 0
        and 0.0 <= facts.embed_ms < most
        and 0.0 <= facts.head_ms < most
        and 0.0 <= facts.step_ms < most
        and 0.0 <= facts.load_bytes_per_s < most
        and all(0.0 <= each.layer_ms < most for each in latencies)
    )


def _loadable_bytes(view: PeerView) -> int:
    return max(0, view.state.free_weight_bytes) if view.facts.load_bytes_per_s > 0 else 0


def _table(layers: int, spans: Sequence[Sequence[Span]]) -> BoolArray:
    """[peers, layers]: whether a layer is in one of the peer's spans."""
    table = np.zeros((len(spans), layers), dtype=np.bool_)
    for row, held in enumerate(spans):
        for span in held:
            table[row, span.start : span.stop] = True
    return table
