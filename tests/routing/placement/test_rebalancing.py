"""A peer moves rarely, alone, never at a loss, and a swarm left to itself comes to rest."""

import dataclasses
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer, snapshot_of

from molink.dht.records.records import LayerLatency, PeerView
from molink.routing import Snapshot
from molink.routing.placement import coverage, rebalancing
from molink.routing.placement.coverage import layer_rates, layer_table, spans_of
from molink.routing.placement.rebalancing import (
    Move,
    MovePolicy,
    having_turn,
    is_stuck,
    next_move,
    propose_move,
)
from molink.routing.problem.problem import CircuitProblem
from molink.shards.spec import Span

POLICY = MovePolicy(min_hold_s=100.0, horizon_s=1000.0, turn_s=10.0)
ALWAYS = dataclasses.replace(POLICY, peers_per_turn=1)
LATE_S = 10_000.0


def proposed(snapshot: Snapshot, peer_id: str, **changes: object) -> Move | None:
    """What the peer proposes when its turn comes, long after it has settled."""
    turns = (LATE_S + POLICY.turn_s * number for number in range(100))
    moves = (propose_move(snapshot, peer_id, 0.0, now_s, POLICY, **changes) for now_s in turns)  # type: ignore[arg-type]
    return next((move for move in moves if move is not None), None)


def after(view: PeerView, move: Move) -> PeerView:
    """The peer when it has done what it proposed."""
    table = layer_table(8, view.state.spans)
    table[layer_table(8, move.drop)] = False
    free = view.state.free_weight_bytes + 1_000_000 * int(layer_table(8, move.drop).sum()) - move.load_bytes
    table |= layer_table(8, move.load)
    ends = sum((300_000 if span.start == 0 else 0) + (400_000 if span.stop == 8 else 0) for span in move.drop)
    state = dataclasses.replace(view.state, spans=spans_of(table), free_weight_bytes=free + ends)
    return dataclasses.replace(view, state=state)


def test_of_two_that_hold_the_same_half_one_takes_the_other_half() -> None:
    twins = snapshot_of(
        peer("a", (0, 4), free_weight_bytes=100_000), peer("b", (0, 4), free_weight_bytes=100_000)
    )
    move = proposed(twins, "b")
    assert move is not None
    assert (move.load, move.drop) == ((Span(4, 8),), (Span(0, 4),))
    assert move.load_bytes == 4_400_000
    assert move.tpot_before_ms is None
    assert move.tpot_after_ms is not None
    assert proposed(twins, "a") is None


def test_what_it_holds_is_kept_and_not_loaded_again() -> None:
    swarm = snapshot_of(peer("a", (0, 6)), peer("b", (3, 6), free_weight_bytes=2_400_000))
    move = proposed(swarm, "b")
    assert move is not None
    assert (move.load, move.drop) == ((Span(6, 8),), ())
    assert move.load_bytes == 2_400_000


def test_layers_that_nobody_else_holds_stay() -> None:
    swarm = snapshot_of(peer("a", (4, 8)), peer("b", (0, 4), layer_latencies=(LayerLatency(1, 50.0),)))
    assert proposed(swarm, "a") is None
    assert proposed(swarm, "b") is None


@pytest.mark.parametrize("known", [True, False])
def test_leased_layers_stay(known: bool) -> None:
    views = (peer("a", (0, 4)), peer("b", (0, 4), free_weight_bytes=400_000, sessions=1))
    leased = (Span(0, 4),) if known else None
    assert proposed(snapshot_of(*views), "b", leased=leased) is None
    assert proposed(snapshot_of(*views), "b", leased=()) is not None


def test_what_was_taken_lately_is_held_for_a_while() -> None:
    twins = snapshot_of(peer("a", (0, 4)), peer("b", (0, 4), free_weight_bytes=400_000))
    turns = [LATE_S + POLICY.turn_s * number for number in range(20)]
    early = [propose_move(twins, "b", now_s - 99.0, now_s, POLICY) for now_s in turns]
    late = [propose_move(twins, "b", now_s - 101.0, now_s, POLICY) for now_s in turns]
    assert not any(early)
    assert any(late)


def test_a_move_that_cannot_pay_for_its_load_within_the_horizon_is_not_made() -> None:
    slow = {"free_weight_bytes": 400_000, "load_bytes_per_s": 1000.0}
    assert proposed(snapshot_of(peer("a", (0, 4)), peer("b", (0, 4), **slow)), "b") is None


def test_a_gain_within_the_hysteresis_moves_nobody() -> None:
    even = snapshot_of(peer("a", (0, 8)), peer("b", (0, 4)), peer("c", (4, 8)))
    assert [proposed(even, one) for one in "abc"] == [None, None, None]


def test_in_a_small_swarm_one_peer_at_a_time_has_its_turn() -> None:
    """Three peers could all cover what is missing: at any moment only one says that it will."""
    views = [peer(one, (0, 4), free_weight_bytes=400_000) for one in "abc"]
    for number in range(50):
        now_s = LATE_S + number * POLICY.turn_s
        moves = [propose_move(snapshot_of(*views), one, 0.0, now_s, POLICY) for one in "abc"]
        assert sum(move is not None for move in moves) <= 1


@given(st.sets(st.text(max_size=5), max_size=60), st.floats(0, 1e9), st.randoms(use_true_random=False))
def test_one_peer_in_twenty_has_its_turn_whoever_asks(ids: set[str], now_s: float, rng: Random) -> None:
    shuffled = sorted(ids)
    rng.shuffle(shuffled)
    turns = having_turn(shuffled, now_s)
    assert turns == having_turn(ids, now_s)
    assert len(turns) == -(-len(ids) // 20)
    assert set(turns) <= ids


def test_before_its_turn_or_soon_after_it_has_loaded_a_peer_weighs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    views = [peer(f"p{at:02}", (0, 8)) for at in range(40)]
    turns = set(having_turn([view.peer_id for view in views], LATE_S))
    assert len(turns) == 2
    monkeypatch.setattr(rebalancing.Placement, "of", lambda *_: pytest.fail("weighs where it might be"))
    for view in views:
        held_s = 1000.0 if view.peer_id in turns else LATE_S
        assert next_move(snapshot_of(*views), view.peer_id, held_s, LATE_S, ()) is None


def test_whether_to_move_takes_one_search_if_the_best_circuit_does_without_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches: list[CircuitProblem] = []
    plan = coverage.plan_circuit
    monkeypatch.setattr(coverage, "plan_circuit", lambda problem: searches.append(problem) or plan(problem))
    far = {"a": 500.0, "b": 500.0}
    views = (
        peer("a", (0, 4), links={"b": 1.0}),
        peer("b", (4, 8), links={"a": 1.0}),
        peer("c", (0, 4), links=far),
    )
    assert propose_move(snapshot_of(*views), "c", 0.0, LATE_S, ALWAYS) is None
    assert len(searches) == 1


def test_a_swarm_is_stuck_when_nobody_holds_or_loads_some_layer() -> None:
    half = peer("a", (0, 4))
    loading = dataclasses.replace(half, state=dataclasses.replace(half.state, loading=(Span(4, 8),)))
    model = snapshot_of(half).model
    assert is_stuck((), model)
    assert is_stuck((half,), model)
    assert not is_stuck((loading,), model)
    assert not is_stuck((half, peer("b", (4, 8))), model)


def test_a_peer_that_is_not_there_or_drains_does_not_move() -> None:
    assert proposed(snapshot_of(peer("a", (0, 4))), "b") is None
    assert proposed(snapshot_of(peer("a", (0, 4)), peer("b", (0, 4), draining=True)), "b") is None


@pytest.mark.parametrize("name", ["min_hold_s", "horizon_s", "min_gain", "turn_s"])
def test_a_policy_without_sense_is_refused_by_the_name_of_the_field(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(MovePolicy(), **{name: 0.0})


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4))
def test_a_swarm_left_to_itself_loses_no_layer_and_comes_to_rest(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    views: dict[str, PeerView] = {}
    for index in range(count):
        start = int(rng.integers(0, 8))
        stop = int(rng.integers(start + 1, 9))
        views[f"p{index}"] = peer(
            f"p{index}",
            (start, stop),
            free_weight_bytes=int(rng.integers(0, 3)) * 500_000,
            layer_latencies=(LayerLatency(1, float(rng.uniform(0.5, 5.0))),),
            links={f"p{other}": float(rng.uniform(1.0, 80.0)) for other in range(index)},
        )
    since = dict.fromkeys(views, 0.0)
    moved_at: list[int] = []
    for number in range(60):
        now_s = LATE_S + number * POLICY.turn_s
        snapshot = snapshot_of(*views.values())
        before = layer_rates(views.values(), 8)
        for peer_id in tuple(views):  # all decide on the same snapshot
            move = propose_move(snapshot, peer_id, since[peer_id], now_s, POLICY)
            if move is not None:
                views[peer_id], since[peer_id] = after(views[peer_id], move), now_s
                moved_at.append(number)
        rates = layer_rates(views.values(), 8)
        assert ((rates > 0) >= (before > 0)).all()
        assert rates.min() >= before.min() * (1 - 1e-9)
    assert len(moved_at) <= 2 * count
    assert all(number < 45 for number in moved_at)
