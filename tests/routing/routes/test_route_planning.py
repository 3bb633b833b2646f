"""Routes: warm preferred, cold where it pays, the same for the same announcements."""

import itertools

import numpy as np
import pytest
from support.circuits.circuit_cases import MODEL, peer, snapshot_of

from molink.dht.records.records import LayerLatency
from molink.routing import CostModel, NoCircuit, Route, plan
from molink.routing.routes.planner import Criteria
from molink.shards.spec import Span


def used(route: Route) -> set[str]:
    return set(route.peer_ids)


def test_a_route_predicts_each_hop_and_adds_up() -> None:
    views = [
        peer("a", (0, 3), links={"b": 10.0, "c": 30.0}),
        peer("b", (3, 6), links={"c": 20.0}),
        peer("c", (6, 8), layer_latencies=(LayerLatency(1, 1.0),)),
    ]
    route = plan(snapshot_of(*views), 10)
    assert [(hop.peer_id, hop.span) for hop in route.hops] == [
        ("a", Span(0, 3)),
        ("b", Span(3, 6)),
        ("c", Span(6, 8)),
    ]
    assert [hop.compute_ms for hop in route.hops] == pytest.approx([6.1, 6.0, 2.3])
    assert [hop.link_ms for hop in route.hops] == pytest.approx([6.0, 11.0, 16.0])
    others_ms = 2 * 0.1024 + 0.25  # two activations on the uplink, and the head's service
    assert sum(hop.compute_ms + hop.link_ms for hop in route.hops) + others_ms == pytest.approx(route.tpot_ms)
    assert route.warm
    assert route.load_s == 0.0


def test_one_peer_with_the_whole_model_has_no_link() -> None:
    route = plan(snapshot_of(peer("a", (0, 8))), 10)
    assert [hop.link_ms for hop in route.hops] == [0.0]
    assert route.tpot_ms == pytest.approx(16.4 + 0.25)


def test_overlapping_warm_spans_make_a_warm_route_though_both_peers_have_room() -> None:
    a = peer("a", (0, 5), free_weight_bytes=10**9, links={"b": 2.0})
    b = peer("b", (3, 8), free_weight_bytes=10**9)
    route = plan(snapshot_of(a, b), 10, criteria=Criteria(cost=CostModel(load_amortisation_tokens=1.0)))
    assert route.warm
    assert route.peer_ids == ("a", "b")


def test_an_equal_newcomer_does_not_cause_loading() -> None:
    for newcomer in ("a0", "z"):
        views = [peer("m", (0, 8)), peer(newcomer, free_weight_bytes=10**9)]
        route = plan(snapshot_of(*views), 10)
        assert used(route) == {"m"}
        assert route.warm


def test_a_fast_newcomer_is_loaded_when_the_gain_pays_for_it() -> None:
    fast = {"layer_latencies": (LayerLatency(1, 0.5),), "free_weight_bytes": 10**9}
    route = plan(snapshot_of(peer("a", (0, 8)), peer("b", **fast)), 10)
    assert used(route) == {"b"}
    assert route.hops[0].cold_spans == (Span(0, 8),)
    assert not route.warm
    assert route.load_s == pytest.approx((8 * (1.0 + 50.0) + 0.0) / 1000, rel=0.2)
    slow_disk = fast | {"load_bytes_per_s": 100.0}
    assert used(plan(snapshot_of(peer("a", (0, 8)), peer("b", **slow_disk)), 10)) == {"a"}


def test_loading_pays_sooner_when_it_serves_more_tokens() -> None:
    views = [peer("a", (0, 8)), peer("b", layer_latencies=(LayerLatency(1, 1.99),), free_weight_bytes=10**9)]
    snapshot = snapshot_of(*views)
    assert used(plan(snapshot, 10)) == {"a"}
    assert used(plan(snapshot, 10, criteria=Criteria(cost=CostModel(load_amortisation_tokens=1e9)))) == {"b"}


def test_cold_layers_are_loaded_where_nobody_is_warm() -> None:
    route = plan(snapshot_of(peer("a", (0, 4)), peer("b", free_weight_bytes=10**9)), 10)
    cold = [hop.cold_spans for hop in route.hops if hop.peer_id == "b"]
    assert cold in ([(Span(4, 8),)], [(Span(0, 8),)])
    assert route.load_s > 0


def test_a_peer_that_cannot_load_is_given_nothing_cold() -> None:
    with pytest.raises(NoCircuit):
        plan(snapshot_of(peer("a", free_weight_bytes=10**9, load_bytes_per_s=0.0)), 10)


def test_avoided_peers_are_not_used_and_are_named_when_that_leaves_nobody() -> None:
    snapshot = snapshot_of(peer("a", (0, 8)), peer("b", (0, 8)))
    assert used(plan(snapshot, 10, criteria=Criteria(avoid=frozenset({"a"})))) == {"b"}
    with pytest.raises(NoCircuit, match="0 of 2 peers of this model are usable: 2 avoided"):
        plan(snapshot, 10, criteria=Criteria(avoid=frozenset({"a", "b"})))


def test_the_route_does_not_depend_on_the_order_of_announcements() -> None:
    views = [peer(name, span) for name in "dcba" for span in ((0, 8),)] + [
        peer("e", (0, 4)),
        peer("f", (4, 8)),
    ]
    routes = {plan(snapshot_of(*order), 10) for order in itertools.permutations(views, len(views))}
    assert {route.peer_ids for route in routes} == {("a",)}


def test_a_session_too_long_for_a_peers_kv_cache_goes_elsewhere() -> None:
    tight = peer("a", (0, 8), free_kv_bytes=8 * 512 * 96)
    roomy = peer("b", (0, 8), layer_latencies=(LayerLatency(1, 9.0),))
    assert used(plan(snapshot_of(tight, roomy), 96)) == {"a"}
    assert "b" in used(plan(snapshot_of(tight, roomy), 97))


def test_an_empty_swarm_says_so() -> None:
    with pytest.raises(NoCircuit, match="there are no machines") as caught:
        plan(snapshot_of(), 10)
    assert caught.value.missing_layers == (MODEL.whole,)


def test_draining_peers_are_mentioned_when_no_circuit_is_left() -> None:
    with pytest.raises(NoCircuit, match="1 draining"):
        plan(snapshot_of(peer("a", (0, 8), draining=True)), 10)


def test_tokens_and_assumptions_are_checked() -> None:
    with pytest.raises(ValueError, match="tokens"):
        plan(snapshot_of(peer("a", (0, 8))), 0)
    for name in CostModel.__slots__:
        for value in (0.0, -1.0, np.nan, np.inf):
            with pytest.raises(ValueError, match=name):
                CostModel(**{name: value})
