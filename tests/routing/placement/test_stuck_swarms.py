"""A swarm that can serve nobody mends itself: who may move, what counts as covered, and whose word goes first."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer, snapshot_of

from molink.dht.records.records import PeerView
from molink.routing import JoiningMachine, preview_join
from molink.routing.placement.rebalancing import Move, next_move, without_late_claims
from molink.shards.spec import Span

NOW_S = 10_000.0
HELD_S = 5.0
"""Far less than a settled swarm wants layers to be held."""


def loading(view: PeerView, *spans: tuple[int, int]) -> PeerView:
    state = dataclasses.replace(view.state, loading=tuple(Span(*span) for span in spans))
    return dataclasses.replace(view, state=state)


def half(peer_id: str, start: int = 0, **changes: object) -> PeerView:
    return peer(peer_id, (start, start + 4), free_weight_bytes=400_000 if start == 0 else 0, **changes)


def at_once(peer_id: str, *views: PeerView, leased: tuple[Span, ...] = ()) -> Move | None:
    return next_move(snapshot_of(*views), peer_id, HELD_S, NOW_S, leased)


def test_who_holds_what_another_holds_too_fills_the_hole_at_once() -> None:
    move = at_once("b", half("a"), half("b"))
    assert move is not None
    assert (move.load, move.drop) == ((Span(4, 8),), (Span(0, 4),))
    assert at_once("a", half("a"), half("b")) is None


def test_who_has_memory_and_no_layers_fills_the_hole_at_once() -> None:
    move = at_once("b", half("a"), peer("b", free_weight_bytes=10_000_000))
    assert move is not None
    assert (move.load, move.drop) == ((Span(0, 8),), ())
    assert at_once("b", half("a"), peer("b", free_weight_bytes=0)) is None
    assert at_once("b", half("a"), half("c", 4), peer("b", free_weight_bytes=10_000_000)) is None


def test_a_swarm_that_can_serve_is_left_alone_for_as_long_as_layers_are_to_be_held() -> None:
    assert at_once("b", half("a"), half("b"), half("c", 4)) is None


def test_a_hole_that_somebody_has_memory_to_fill_moves_nobody() -> None:
    assert at_once("b", half("a"), half("b"), peer("c", free_weight_bytes=10_000_000)) is None


def test_a_hole_that_somebody_is_filling_moves_nobody() -> None:
    assert at_once("b", half("a"), half("b"), loading(half("c"), (4, 8))) is None


def test_leased_layers_and_the_last_copy_stay_even_then() -> None:
    assert at_once("b", half("a"), half("b"), leased=(Span(0, 4),)) is None
    assert at_once("b", loading(peer("a"), (0, 4)), half("b")) is None
    assert at_once("b", half("a", draining=True), half("b")) is None


@pytest.mark.parametrize("promised", [True, False])
def test_a_joining_peer_leaves_to_others_what_they_are_loading(promised: bool) -> None:
    other = loading(peer("a"), (0, 4)) if promised else peer("a")
    machine = JoiningMachine("b", 4_400_000, 10**9, peer("b").facts.layer_latencies)
    assert preview_join(snapshot_of(other), machine).span == (Span(4, 8) if promised else Span(0, 4))


def test_of_claims_that_cross_the_one_of_the_smaller_id_counts() -> None:
    seen = (peer("a"), loading(peer("d"), (2, 3)))
    now = (loading(peer("a"), (4, 8)), loading(peer("c"), (4, 8)), loading(peer("d"), (2, 3)))
    views = without_late_claims(now, seen, "b")
    assert [view.state.loading for view in views] == [(Span(4, 8),), (), (Span(2, 3),)]


@given(st.sets(st.sampled_from("abcdef"), min_size=2))
def test_of_any_number_that_claim_at_the_same_moment_exactly_one_sees_no_claim(claimants: set[str]) -> None:
    before = tuple(peer(one) for one in sorted(claimants))
    now = tuple(loading(view, (4, 8)) for view in before)
    unhindered = [
        one
        for one in claimants
        if not any(
            view.state.loading for view in without_late_claims(now, before, one) if view.peer_id != one
        )
    ]
    assert unhindered == [min(claimants)]
