"""Peers to insist on: in the circuit, wherever that costs least, or a reason why not."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer, snapshot_of
from support.circuits.route_cases import NAMES, every_circuit, snapshots
from support.properties import examples

from molink.dht.records.records import LayerLatency
from molink.routing import NoCircuit, Snapshot, plan
from molink.routing.problem.problem import objective_ms
from molink.routing.routes.planner import Criteria

SLOW = (LayerLatency(1, 9.0),)


def test_a_slow_peer_takes_part_if_it_must_and_with_as_little_as_possible() -> None:
    views = [
        peer("low", (0, 4), links={"slow": 4.0, "high": 4.0}),
        peer("high", (4, 8), links={"slow": 4.0}),
        peer("slow", (3, 5), layer_latencies=SLOW),
    ]
    assert plan(snapshot_of(*views), 10).peer_ids == ("low", "high")
    route = plan(snapshot_of(*views), 10, criteria=Criteria(require=frozenset({"slow"})))
    assert [(hop.peer_id, len(hop.span)) for hop in route.hops] in (
        [("low", 3), ("slow", 1), ("high", 4)],
        [("low", 4), ("slow", 1), ("high", 3)],
        [("low", 3), ("slow", 2), ("high", 3)],
    )
    assert route.hops[1].span.start in (3, 4)


def test_several_peers_can_be_insisted_on() -> None:
    views = [peer(name, (0, 8), layer_latencies=SLOW) for name in NAMES] + [peer("fast", (0, 8))]
    everybody = frozenset(NAMES)
    assert set(plan(snapshot_of(*views), 10, criteria=Criteria(require=everybody)).peer_ids) >= everybody


def test_a_peer_that_cannot_take_part_is_named() -> None:
    only = snapshot_of(peer("a", (0, 8)), peer("full", (0, 8), free_kv_bytes=0))
    with pytest.raises(NoCircuit, match="not usable: gone"):
        plan(only, 10, criteria=Criteria(require=frozenset({"gone"})))
    with pytest.raises(NoCircuit, match="goes through full"):
        plan(only, 10, criteria=Criteria(require=frozenset({"full"})))
    with pytest.raises(ValueError, match="a: both"):
        plan(only, 10, criteria=Criteria(require=frozenset({"a"}), avoid=frozenset({"a"})))


@settings(max_examples=examples(40))
@given(snapshots(), st.sampled_from(NAMES))
def test_the_required_peer_is_in_the_circuit_whenever_there_is_one(snapshot: Snapshot, name: str) -> None:
    assume(name in {view.peer_id for view in snapshot.peers})
    problem, ids = snapshot.problem(8)
    machine = ids.index(name)
    possible = [
        objective_ms(problem, hops)
        for hops in every_circuit(problem)
        if machine in {hop.machine for hop in hops}
    ]
    if not possible:
        with pytest.raises(NoCircuit):
            plan(snapshot, 8, criteria=Criteria(require=frozenset({name})))
        return
    route = plan(snapshot, 8, criteria=Criteria(require=frozenset({name})))
    assert name in route.peer_ids
    assert min(possible) - 1e-9 <= route.objective_ms
