"""Routes of sessions whose tokens are guessed: the head's guesses divide a trip's time, as a term that all can see."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.circuits.circuit_cases import peer, snapshot_of
from support.circuits.route_cases import every_circuit, snapshots
from support.properties import examples

from molink.dht.records.records import AnnouncedDraft, LayerLatency, PeerView
from molink.routing import (
    CostModel,
    Criteria,
    IncumbentRoute,
    PeerObservation,
    Route,
    Snapshot,
    plan,
    replan,
    replan_incumbent,
)
from molink.routing.cost.terms import Demand
from molink.routing.routes.route import route_of
from molink.shards.spec import GUESSES

TOKENS = 100
GUESSED = Criteria(guesses=True)
WITHOUT_SEARCH = Criteria(guesses=True, algorithm="no search may be run")
LOOKUP, MODEL = AnnouncedDraft("lookup"), AnnouncedDraft("small", bytes(8), 0.25)
DRAFTS = ((), (LOOKUP,), (LOOKUP, MODEL), (AnnouncedDraft("large", bytes(8), 20.0),))


def guessing(view: PeerView, *drafts: AnnouncedDraft) -> PeerView:
    return replace(view, facts=replace(view.facts, sampling_abilities=(GUESSES,), drafts=drafts))


def whole(name: str, layer_ms: float, *drafts: AnnouncedDraft, **changes: object) -> PeerView:
    return guessing(peer(name, (0, 8), layer_latencies=(LayerLatency(1, layer_ms),), **changes), *drafts)


def saved_ms(route: Route) -> float:
    return sum(-term.ms for hop in route.hops for term in hop.terms if term.name == "guesses")


def test_a_token_takes_what_the_heads_guesses_leave_of_a_trip_and_the_term_says_so() -> None:
    snapshot = snapshot_of(whole("a", 2.0, LOOKUP, MODEL))
    off, on = plan(snapshot, TOKENS), plan(snapshot, TOKENS, criteria=GUESSED)
    assert on.trip_ms == pytest.approx(off.tpot_ms) == pytest.approx(off.trip_ms)
    assert on.tpot_ms == pytest.approx(off.tpot_ms - saved_ms(on))
    assert 1.5 < on.tokens_per_trip < 2
    assert off.tpot_ms / 2 < on.tpot_ms < off.tpot_ms / 1.5
    assert (saved_ms(off), off.tokens_per_trip) == (0, 1)
    [said] = [one for one in on.hops[0].assumed if "a trip" in one]
    assert said == "2.0 tokens a trip at most, of its draft small"


def test_trips_that_were_measured_go_before_what_is_announced_and_are_said_to_be() -> None:
    few = replace(
        snapshot_of(whole("a", 2.0, LOOKUP, MODEL)),
        observed={"a": PeerObservation(trips=256, trip_tokens=256)},
    )
    route = plan(few, TOKENS, criteria=GUESSED)
    assert route.tokens_per_trip < 1.25
    assert "1.2 tokens a trip at most, of 256 trips" in route.hops[0].measured


def test_a_head_with_a_draft_is_chosen_as_long_as_its_guesses_are_worth_the_longer_trip() -> None:
    plain, drafting = whole("a", 2.0, LOOKUP), whole("b", 2.6, LOOKUP, MODEL)
    assert plan(snapshot_of(plain, drafting), TOKENS).peer_ids == ("a",)
    assert plan(snapshot_of(plain, drafting), TOKENS, criteria=GUESSED).peer_ids == ("b",)
    far = whole("b", 6.0, LOOKUP, MODEL)
    assert plan(snapshot_of(plain, far), TOKENS, criteria=GUESSED).peer_ids == ("a",)


def test_a_head_that_lies_about_its_draft_is_left_once_its_trips_are_known() -> None:
    snapshot = snapshot_of(whole("a", 2.0, LOOKUP), whole("b", 2.6, LOOKUP, MODEL))
    known = {"b": PeerObservation(trips=64, trip_tokens=64.0)}
    assert plan(replace(snapshot, observed=known), TOKENS, criteria=GUESSED).peer_ids == ("a",)


def test_a_hop_that_takes_no_rows_of_guesses_lets_none_travel_and_is_avoided() -> None:
    head, old = guessing(peer("a", (0, 4)), LOOKUP, MODEL), peer("old", (4, 8))
    alone = plan(snapshot_of(head, old), TOKENS, criteria=GUESSED)
    assert (alone.tokens_per_trip, saved_ms(alone)) == (1, 0)
    slower = guessing(peer("new", (4, 8), layer_latencies=(LayerLatency(1, 2.5),)))
    assert plan(snapshot_of(head, old, slower), TOKENS, criteria=GUESSED).peer_ids == ("a", "new")


def test_no_guesses_are_predicted_where_rows_cost_what_steps_do() -> None:
    steep = (LayerLatency(1, 2.0), LayerLatency(64, 128.0))
    busy = guessing(peer("a", (0, 8), layer_latencies=steep, sessions=30), LOOKUP, MODEL)
    assert plan(snapshot_of(busy), TOKENS, criteria=GUESSED).tokens_per_trip == 1


@st.composite
def guessing_snapshots(draw: st.DrawFn) -> Snapshot:
    """Some peers guess, some take rows of guesses only, some are older."""
    snapshot = draw(snapshots())
    views = tuple(
        guessing(view, *draw(st.sampled_from(DRAFTS))) if draw(st.integers(0, 3)) else view
        for view in snapshot.peers
    )
    seen = {
        view.peer_id: PeerObservation(trips=trips, trip_tokens=trips * draw(st.floats(1, 16)))
        for view in views
        if (trips := draw(st.integers(0, 256)))
    }
    return replace(snapshot, peers=views, observed=seen)


def objectives(snapshot: Snapshot) -> list[float]:
    """Of every circuit that there is."""
    posed = snapshot.pose(Demand.of(TOKENS))
    return [
        route_of(posed, hops, snapshot, CostModel(), guesses=True).objective_ms
        for hops in every_circuit(posed.problem)
    ]


@pytest.mark.full
@settings(max_examples=examples(20))
@given(guessing_snapshots())
def test_of_all_circuits_the_search_finds_one_that_is_close_to_the_best(snapshot: Snapshot) -> None:
    route = plan(snapshot, TOKENS, criteria=GUESSED)
    every = [term for hop in route.hops for term in hop.terms]
    assert sum(term.ms for term in every if term.in_tpot) == pytest.approx(route.tpot_ms)
    assert 0 < route.tpot_ms <= route.trip_ms
    best_ms = min(objectives(snapshot))
    assert best_ms - 1e-6 <= route.objective_ms <= 1.1 * best_ms


@settings(max_examples=examples(20))
@given(guessing_snapshots(), guessing_snapshots())
def test_without_a_search_stands_what_no_search_would_leave(before: Snapshot, after: Snapshot) -> None:
    first = replan_incumbent(None, before, TOKENS, criteria=GUESSED)
    try:
        kept: IncumbentRoute = replan_incumbent(first, after, TOKENS, criteria=WITHOUT_SEARCH)
    except ValueError:
        return
    borne_ms = max(0.1 * kept.route.objective_ms, 2.0)
    missed_ms = first.route.objective_ms - min(objectives(before))
    assert kept.route.objective_ms - min(objectives(after)) <= borne_ms + missed_ms + 1e-6


def test_a_head_that_turns_out_to_guess_well_is_searched_for_and_moved_to() -> None:
    snapshot = snapshot_of(whole("a", 2.0, LOOKUP), whole("b", 2.2, LOOKUP))
    first = replan_incumbent(None, snapshot, TOKENS, criteria=GUESSED)
    assert first.route.peer_ids == ("a",)
    assert replan_incumbent(first, snapshot, TOKENS, criteria=WITHOUT_SEARCH).route == first.route
    seen = replace(snapshot, observed={"b": PeerObservation(trips=256, trip_tokens=768.0)})
    assert replan_incumbent(first, seen, TOKENS, criteria=GUESSED).route.peer_ids == ("b",)
    assert replan(first.route, seen, TOKENS, criteria=GUESSED).peer_ids == ("b",)
