"""From announcements to routes."""

import dataclasses
import itertools

import pytest
from support.circuits.circuit_cases import MODEL, peer, snapshot_of

from molink.dht.records.records import PROTOCOL_VERSION, LayerLatency, PeerView
from molink.routing import CostModel, NoCircuit, plan
from molink.routing.cost.cost import layer_ms_at
from molink.shards.spec import Span

COST = CostModel()


def latency(
    views: list[PeerView], measured: dict[tuple[str, str], float] | None = None
) -> dict[tuple[str, str], float]:
    problem, ids = snapshot_of(*views, measured=measured).problem(1)
    return {
        (ids[a], ids[b]): float(problem.latency_ms[a, b])
        for a, b in itertools.permutations(range(len(ids)), 2)
    }


def test_a_problem_says_what_the_announcements_say() -> None:
    views = [
        peer("b", (0, 4), free_weight_bytes=7, free_kv_bytes=11, embed_ms=0.5, head_ms=0.75),
        peer("a", (6, 8), span_limit=Span(4, 8), load_bytes_per_s=5e6),
    ]
    problem, ids = snapshot_of(*views).problem(10)
    assert ids == ("a", "b")
    assert problem.resident is not None
    assert problem.allowed is not None
    assert problem.resident[1].tolist() == [True] * 4 + [False] * 4
    assert problem.allowed[0].tolist() == [False] * 4 + [True] * 4
    assert problem.allowed[1].all()
    assert problem.free_bytes.tolist() == [0, 7]
    assert problem.free_kv_bytes is not None
    assert problem.free_kv_bytes.tolist() == [10**9, 11]
    assert problem.kv_bytes is not None
    assert problem.kv_bytes.tolist() == [MODEL.kv_bytes(Span(0, 1), 10)] * 8
    assert problem.embed_resident is not None
    assert problem.head_resident is not None
    assert problem.embed_resident.tolist() == [False, True]
    assert problem.head_resident.tolist() == [True, False]
    assert (problem.embed_bytes, problem.head_bytes) == (300_000, 400_000)
    assert problem.load_ms is not None
    assert problem.load_ms[0, 0] == pytest.approx(200.0 + COST.load_layer_overhead_ms)
    assert problem.load_weight == 1 / 2000


def test_layers_outside_its_limit_that_a_peer_holds_anyway_can_be_used() -> None:
    problem, _ = snapshot_of(peer("a", (0, 2), span_limit=Span(4, 8))).problem(1)
    assert problem.allowed is not None
    assert problem.allowed[0].tolist() == [True, True, False, False, True, True, True, True]


def test_the_layer_time_is_that_of_the_batch_which_the_session_would_join() -> None:
    measured = (LayerLatency(1, 2.0), LayerLatency(4, 5.0), LayerLatency(8, 6.0))
    for sessions, expected in ((0, 2.0), (1, 3.0), (3, 5.0), (5, 5.5), (7, 6.0), (11, 7.0)):
        problem, _ = snapshot_of(peer("a", (0, 8), layer_latencies=measured, sessions=sessions)).problem(1)
        assert problem.layer_ms[0, 0] == pytest.approx(expected)


def test_latency_never_falls_beyond_the_largest_measured_batch() -> None:
    assert layer_ms_at((LayerLatency(2, 5.0), LayerLatency(4, 3.0)), 40) == 3.0
    assert layer_ms_at((LayerLatency(4, 3.0),), 1) == 3.0


def test_steps_that_wait_count_like_sessions() -> None:
    measured = (LayerLatency(1, 1.0), LayerLatency(5, 5.0))
    problem, _ = snapshot_of(peer("a", (0, 8), layer_latencies=measured, queued=4)).problem(1)
    assert problem.layer_ms[0, 0] == 5.0


def test_a_measured_round_trip_is_halved_and_serves_both_directions() -> None:
    ways = latency([peer("a", links={"b": 30.0}), peer("b")])
    assert ways == {("a", "b"): 16.0, ("b", "a"): 16.0}


def test_each_direction_keeps_its_own_measurement() -> None:
    ways = latency([peer("a", links={"b": 30.0}), peer("b", links={"a": 40.0})])
    assert ways == {("a", "b"): 16.0, ("b", "a"): 21.0}


def test_the_routers_own_measurement_goes_before_the_announced_one() -> None:
    ways = latency([peer("a", links={"b": 30.0}), peer("b")], {("a", "b"): 50.0})
    assert ways["a", "b"] == 26.0


def test_an_unknown_link_is_as_far_as_its_ends_usually_are() -> None:
    ways = latency([peer("a", links={"b": 20.0, "elsewhere": 60.0, "far": 61.0}), peer("b"), peer("c")])
    assert ways["a", "c"] == 60.0 / 2 + 1
    assert ways["c", "b"] == 20.0 / 2 + 1


def test_without_any_measurement_the_stated_assumption_holds() -> None:
    assert set(latency([peer("a"), peer("b")]).values()) == {COST.unknown_rtt_ms / 2 + COST.hop_overhead_ms}


@pytest.mark.parametrize("nonsense", [float("nan"), float("inf"), -5.0])
def test_numbers_that_cannot_be_round_trips_are_unknown(nonsense: float) -> None:
    assert set(latency([peer("a", links={"b": nonsense}), peer("b")]).values()) == {51.0}


def test_a_link_is_never_free() -> None:
    assert min(latency([peer("a", links={"b": 0.0}), peer("b")]).values()) == COST.hop_overhead_ms


@pytest.mark.parametrize(
    "change",
    [
        {"draining": True},
        {"protocol_version": PROTOCOL_VERSION - 1},
        {"protocol_version": PROTOCOL_VERSION + 1},
        {"model": "ef" * 32},
        {"layer_latencies": ()},
        {"layer_latencies": (LayerLatency(1, float("nan")),)},
        {"head_ms": -1.0},
    ],
)
def test_peers_that_cannot_join_a_new_circuit_are_left_out(change: dict[str, object]) -> None:
    _, ids = snapshot_of(peer("a", (0, 8)), peer("b", (0, 8), **change)).problem(1)
    assert ids == ("a",)


def test_a_peer_that_leaves_is_left_out() -> None:
    leaving = peer("b", (0, 8))
    leaving = dataclasses.replace(leaving, state=dataclasses.replace(leaving.state, ttl_s=0))
    _, ids = snapshot_of(peer("a", (0, 8)), leaving).problem(1)
    assert ids == ("a",)


def test_peers_of_another_model_are_never_mixed_in() -> None:
    views = [peer("a", (0, 4)), peer("b", (4, 8), model="ef" * 32)]
    with pytest.raises(NoCircuit) as caught:
        plan(snapshot_of(*views), 10)
    assert caught.value.missing_layers == (Span(4, 8),)
    assert caught.value.missing_bytes == 4 * (1_000_000 + MODEL.kv_bytes(Span(0, 1), 10)) + 400_000


def test_warm_only_loads_nothing() -> None:
    problem, _ = snapshot_of(peer("a", (0, 8)), peer("b", (2, 4), free_weight_bytes=10**9)).problem(
        1, warm_only=True
    )
    assert problem.free_bytes.tolist() == [0, 0]
    assert problem.allowed is not None
    assert problem.allowed[1].tolist() == [False, False, True, True, False, False, False, False]
