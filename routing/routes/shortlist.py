"""Shortlist: the peers of a large swarm among which a circuit is looked for. Pure.

`Snapshot.pose` works out a matrix of all its peers, 800 MB for 10,000, and the searches of `plan_circuit` look at a
pool of a few hundred machines anyway. So pools (`pool`, over network coordinates) are drawn before a problem is posed:
from all peers a large one, every few minutes, and from that one, as loads are now, the few of which it is posed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from molink.dht.records.records import PeerView
from molink.routing.cost.cost import CostModel
from molink.routing.cost.guesses import guessing_head, trip_shares
from molink.routing.cost.terms import Demand, PeerCosts, peer_costs, recovery_ms
from molink.routing.latency.coordinates import CoordinateTable
from molink.routing.placement.coverage import layer_table
from molink.routing.problem.circuit import NoCircuit
from molink.routing.problem.problem import CircuitProblem
from molink.routing.routes.planner import Criteria
from molink.routing.routes.replanning import IncumbentRoute, replan_incumbent
from molink.routing.search.pool import pool
from molink.routing.snapshot import Snapshot
from molink.shards.spec import ModelSpec, Span

MOST_DRAWN = 512
"""Peers of the first pool."""
MOST_POSED = 256
"""Peers of which a problem is posed. In a swarm of no more, of all."""
REDRAW_S = 120.0
"""Between draws of the first pool, unless there is no circuit among the peers of the second."""
REPOSE_S = 10.0
"""Between draws of the second from the first."""
_TYPICAL = 64
"""Peers that are looked at for what losing one would cost."""


class Known(Protocol):
    """The peers that a router knows."""

    @property
    def count(self) -> int:
        """Number of peers."""

    def snapshot(self, peer_ids: Collection[str] | None = None) -> Snapshot:
        """Those of them that are named; None: all."""


@dataclass(frozen=True, slots=True)
class SnapshotPeers:
    """Peers of a snapshot."""

    whole: Snapshot

    @property
    def count(self) -> int:
        return len(self.whole.peers)

    def snapshot(self, peer_ids: Collection[str] | None = None) -> Snapshot:
        if peer_ids is None:
            return self.whole
        named = frozenset(peer_ids)
        chosen = tuple(view for view in self.whole.peers if view.peer_id in named)
        return replace(self.whole, peers=chosen, relays=self.whole.relay_offers())


@dataclass(frozen=True, slots=True)
class Shortlist:
    """Both pools, and when they were drawn, in seconds of a clock of the caller's."""

    drawn: tuple[str, ...]
    posed: tuple[str, ...]
    drawn_s: float
    posed_s: float

    @classmethod
    def draw(cls, known: Known, demand: Demand, now_s: float, criteria: Criteria) -> "Shortlist":
        """From all peers but those to avoid."""
        drawn = candidates(known.snapshot(), demand, MOST_DRAWN, criteria)
        posed = candidates(known.snapshot(drawn), demand, MOST_POSED, criteria)
        return cls(drawn, posed, now_s, now_s)

    def kept_up(self, known: Known, demand: Demand, now_s: float, criteria: Criteria) -> "Shortlist":
        """As it should be now: the pools that are too old drawn again. They are all sessions': nobody is avoided."""
        criteria = Criteria(cost=criteria.cost, guesses=criteria.guesses)
        if now_s >= self.drawn_s + REDRAW_S:
            return self.draw(known, demand, now_s, criteria)
        if now_s < self.posed_s + REPOSE_S:
            return self
        posed = candidates(known.snapshot(self.drawn), demand, MOST_POSED, criteria)
        return replace(self, posed=posed, posed_s=now_s)


def replan_incumbent_among(
    standing: IncumbentRoute | None,
    shortlist: Shortlist | None,
    known: Known,
    tokens: int,
    *,
    prompt_tokens: int,
    now_s: float,
    criteria: Criteria = Criteria(),  # noqa: B008 (an immutable value)
) -> tuple[IncumbentRoute, Shortlist | None]:
    """As `replan_incumbent`, in a swarm of any size; and the shortlist to be called with the next time, None at first.

    The circuit that stands is looked at wherever its peers are. Where none is found among the shortlist, that is drawn
    again, without the peers to avoid.

    Raises:
        NoCircuit: there is none among these either.
    """

    def chosen(names: Collection[str] | None) -> IncumbentRoute:
        snapshot = known.snapshot(names)
        return replan_incumbent(standing, snapshot, tokens, prompt_tokens=prompt_tokens, criteria=criteria)

    if known.count <= MOST_POSED:
        return chosen(None), None
    demand = Demand.of(tokens, prompt_tokens)
    if shortlist is not None:
        shortlist = shortlist.kept_up(known, demand, now_s, criteria)
        own = () if standing is None else standing.route.peer_ids
        try:
            return chosen({*shortlist.posed, *own}), shortlist
        except NoCircuit:
            if shortlist.drawn_s == now_s and not criteria.avoid:
                raise
    shortlist = Shortlist.draw(known, demand, now_s, criteria)
    return chosen(shortlist.posed), shortlist


def narrowed(snapshot: Snapshot, demand: Demand) -> Snapshot:
    """The snapshot itself, or in a large swarm that of the peers among which one circuit is looked for."""
    if len(snapshot.peers) <= MOST_POSED:
        return snapshot
    return SnapshotPeers(snapshot).snapshot(candidates(snapshot, demand, MOST_POSED))


def candidates(
    snapshot: Snapshot,
    demand: Demand,
    most: int,
    criteria: Criteria = Criteria(),  # noqa: B008 (an immutable value)
) -> tuple[str, ...]:
    """The ids of about `most` peers among which a circuit is looked for; all of them if they are fewer.

    Peers without a coordinate have come within the last minutes. They are among them only where those with one are too
    few, or do not hold some layer.
    """
    views = snapshot.usable(criteria.avoid)
    if len(views) <= most:
        return tuple(view.peer_id for view in views)
    placed = tuple(view for view in views if view.facts.coordinate is not None)
    if len(placed) <= most:
        views = (*placed, *(view for view in views if view.facts.coordinate is None))[:most]
        return tuple(view.peer_id for view in views)
    cost, model = criteria.cost, snapshot.model
    recovery = recovery_ms(placed[:: max(1, len(placed) // _TYPICAL)], model, demand, cost)
    costs = tuple(peer_costs(view, snapshot.seen(view), model, demand, recovery, cost) for view in placed)
    shares = None
    if criteria.guesses:
        shares = trip_shares([guessing_head(view.facts, snapshot.seen(view), cost) for view in placed], 0.0)
    problem = _problem(placed, costs, model, demand, cost)
    chosen = [placed[machine] for machine in pool(problem, most, shares).tolist()]
    lacking = ~layer_table(model.layers, [span for view in chosen for span in view.state.spans])
    if len(placed) < len(views) and lacking.any():
        chosen += [
            view
            for view in views
            if view.facts.coordinate is None and (layer_table(model.layers, view.state.spans) & lacking).any()
        ][:most]
    return tuple(view.peer_id for view in chosen)


def _problem(
    views: Sequence[PeerView], costs: Sequence[PeerCosts], model: ModelSpec, demand: Demand, cost: CostModel
) -> CircuitProblem:
    """As `Snapshot.pose`, with coordinates in place of a matrix; loading is left out: the search counts it."""
    table = CoordinateTable.of([view.facts.coordinate for view in views if view.facts.coordinate is not None])
    resident = np.array([layer_table(model.layers, view.state.spans) for view in views])
    return CircuitProblem.from_coordinates(
        layer_ms=np.array([each.batched_layer_ms for each in costs]),
        positions=table.positions / 2,
        heights_ms=table.heights_ms / 2 + cost.hop_overhead_ms / 2,
        free_bytes=np.array([max(0, view.state.free_weight_bytes) for view in views], dtype=np.int64),
        layer_bytes=np.array(model.layer_bytes, dtype=np.int64),
        embed_ms=np.array([each.start_ms for each in costs]),
        head_ms=np.array([each.head_ms for each in costs]),
        resident=resident,
        embed_bytes=model.embed_bytes,
        head_bytes=model.head_bytes,
        embed_resident=resident[:, 0],
        head_resident=resident[:, -1],
        kv_bytes=np.array(
            [model.kv_bytes(Span(at, at + 1), demand.tokens) for at in range(model.layers)], dtype=np.int64
        ),
        free_kv_bytes=np.array([max(0, view.state.free_kv_bytes) for view in views], dtype=np.int64),
        hop_penalty_ms=np.array([each.hop_ms for each in costs]),
    )
