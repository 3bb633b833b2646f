"""Which peers of a large swarm a gateway poses its problem for: the product's `pool`, over network coordinates.

`Snapshot.pose` works out a matrix of all its peers, 800 MB for 10,000. The searches of `plan_circuit` look at a pool
of 256 or 320 machines anyway; here pools are drawn before, and the matrix is of those in the second: from all peers a
large one, every few minutes, and from that one, as loads are now, the few of which the problem is posed.
"""

from collections.abc import Sequence

import numpy as np

from molink.dht.records import PeerView
from molink.routing.coordinates import CoordinateTable
from molink.routing.pool import pool
from molink.routing.problem import CircuitProblem
from molink.routing.snapshot import Snapshot
from molink.routing.terms import Demand, PeerCosts, peer_costs, recovery_ms
from molink.shards.spec import ModelSpec, Span
from molink.simnet.swarm.step_cost import COST

MOST_DRAWN = 512
"""Peers of the first pool."""
MOST_POSED = 256
"""Peers of which a snapshot is posed."""
_TYPICAL = 64
"""Peers that are looked at for what losing one would cost."""


def candidates(snapshot: Snapshot, demand: Demand, most: int) -> tuple[str, ...]:
    """The ids of about `most` peers among which a circuit is looked for; all of them if they are fewer."""
    views = snapshot.usable()
    if len(views) <= most or any(view.facts.coordinate is None for view in views):
        return tuple(view.peer_id for view in views)
    recovery = recovery_ms(views[:: max(1, len(views) // _TYPICAL)], snapshot.model, demand, COST)
    costs = tuple(
        peer_costs(view, snapshot.seen(view), snapshot.model, demand, recovery, COST) for view in views
    )
    chosen = pool(_problem(views, costs, snapshot.model, demand), most)
    return tuple(views[machine].peer_id for machine in chosen.tolist())


def _problem(
    views: Sequence[PeerView], costs: Sequence[PeerCosts], model: ModelSpec, demand: Demand
) -> CircuitProblem:
    """As `Snapshot.pose`, with coordinates in place of a matrix; loading is left out: the search counts it."""
    table = CoordinateTable.of([view.facts.coordinate for view in views if view.facts.coordinate is not None])
    resident = np.zeros((len(views), model.layers), dtype=np.bool_)
    for row, view in enumerate(views):
        for span in view.state.spans:
            resident[row, span.start : span.stop] = True
    return CircuitProblem.from_coordinates(
        layer_ms=np.array([each.batched_layer_ms for each in costs]),
        positions=table.positions / 2,
        heights_ms=table.heights_ms / 2 + COST.hop_overhead_ms / 2,
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
