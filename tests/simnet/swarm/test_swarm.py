"""Whole swarms in virtual time: what is conserved, what is equal, and whose decisions they are."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.properties import examples

from molink.client.circuit import circuit_builder, peer_history, quarantine, route_selector
from molink.dht.gossip import publisher
from molink.dht.host.compressed_stream import Deflater
from molink.dht.membership import timing
from molink.dht.records import announcement
from molink.dht.records.records import PeerView
from molink.peer.announcing import placement_core
from molink.peer.memory import leases
from molink.peer.wire.link.certificate import new_certificate
from molink.routing.cost.terms import Demand
from molink.routing.placement import placement, rebalancing
from molink.routing.routes import planner, shortlist
from molink.routing.snapshot import Snapshot
from molink.shards.spec import Span, missing_spans
from molink.simnet.core.matrices import bundled_matrix
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import MODEL_SHAPES, QWEN2_7B
from molink.simnet.swarm.factory import random_setup, snapshot_setup
from molink.simnet.swarm.members import announcing, initial_placement, member, moving
from molink.simnet.swarm.members import placing as members_placing
from molink.simnet.swarm.members.accounts import Accounts, EndedSession, SessionOutcome
from molink.simnet.swarm.members.member import Member, NotConserved
from molink.simnet.swarm.members.traffic import BUDGET_KBIT_S
from molink.simnet.swarm.population import hardware
from molink.simnet.swarm.population.snapshot_file import parse_snapshot
from molink.simnet.swarm.report import swarm_row, swarm_series
from molink.simnet.swarm.sessions import forming, gateway, gateway_view, generation
from molink.simnet.swarm.sessions.step_cost import PeerLoad, SimulatedHop, link_ms, own_ms
from molink.simnet.swarm.settings import Churn, SwarmSettings
from molink.simnet.swarm.world import SwarmWorld, WorldSetup

LONG_LAYERS = replace(QWEN2_7B, name="wide", intermediate_size=60_000)
"""So large that a circuit has several hops."""
TRACE = tuple(TraceRequest(at * 3.0, 40 + 10 * (at % 7), 30 + 20 * (at % 5)) for at in range(40))
CHURNING = SwarmSettings(
    peers=20, duration_s=240.0, gateways=2, rate_rps=0.5, churn=Churn(300.0, crash_share=0.6), seed=3
)


def ran(its: SwarmSettings, trace: Sequence[TraceRequest] = TRACE) -> SwarmWorld:
    world = SwarmWorld(random_setup(its, LONG_LAYERS, bundled_matrix(), trace), its)
    world.run()
    return world


@cache
def churned() -> SwarmWorld:
    return ran(CHURNING)


@cache
def settled() -> SwarmWorld:
    return ran(replace(CHURNING, churn=Churn(), rate_rps=0.05))


def ended(number: int, arrival_s: float = 0.0) -> EndedSession:
    return EndedSession(number, SessionOutcome.COMPLETED, arrival_s, 1.0, 1, 1, None, None, 1, 1, 0, 0)


def document(peers: int = 4) -> dict[str, object]:
    one = {
        "model": "any", "model_hash": "ab", "free_weight_bytes": 0, "free_kv_bytes": 10**9, "sessions": 0, "queued": 0,
        "draining": False, "device": "cpu", "uplink_mbps": None,
    }  # fmt: skip
    rows = [
        {**one, "peer_id": f"peer-{at}", "name": f"p{at}", "spans": [[14 * (at % 2), 14 * (at % 2) + 14]],
         "layer_ms": 1.0 + at}
        for at in range(peers)
    ]  # fmt: skip
    return {"models": [{"model": "any", "model_hash": "ab", "layers": 28}], "peers": rows}


@pytest.mark.full
def test_every_session_ends_once_and_every_lease_comes_back_however_peers_come_and_go() -> None:
    world = churned()
    world.check()
    accounts = world.accounts
    assert accounts.left > 0
    assert accounts.crashed > 0
    assert accounts.joined > 0
    assert sorted(one.number for one in accounts.ended) == list(range(accounts.arrived))
    assert accounts.arrived > 100
    assert all(not one.book.leases for one in world.members.values() if one.alive)


def test_sessions_survive_the_loss_of_peers_and_compute_their_history_again() -> None:
    row = swarm_row(churned(), "swarm")
    assert row.losses > 0
    assert row.recomputed_tokens > 0
    survivors = [
        one for one in churned().accounts.ended if one.losses and one.outcome is SessionOutcome.COMPLETED
    ]
    assert survivors
    assert all(one.tokens in {30, 50, 70, 90, 110} for one in survivors)
    assert row.hops is not None
    assert row.hops > 1


@pytest.mark.full
def test_equal_seeds_give_equal_bytes_and_others_do_not() -> None:
    few = replace(CHURNING, peers=12, duration_s=20.0, churn=Churn(30.0, crash_share=0.6))
    texts = [
        json.dumps(
            [
                asdict(swarm_row(world, "swarm")),
                swarm_series(world),
                [asdict(one) for one in world.accounts.ended],
            ]
        )
        for world in (ran(few), ran(few), ran(replace(few, seed=4)))
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_littles_law_holds_within_a_hundredth() -> None:
    accounts = churned().accounts
    rate = accounts.arrived / accounts.counted_s
    stays_s = [one.end_s - one.arrival_s for one in accounts.ended]
    assert accounts.mean_open == pytest.approx(rate * sum(stays_s) / len(stays_s), rel=0.01)
    assert accounts.mean_open > 0.1


def test_decisions_are_the_products_own_objects() -> None:
    """That `placing` has the same is tested beside it: it loads what computes."""
    assert (
        gateway.replan_incumbent_among
        is route_selector.replan_incumbent_among
        is shortlist.replan_incumbent_among
    )
    assert forming.core.CircuitCore is circuit_builder.core.CircuitCore is generation.CircuitCore
    assert gateway.criteria is route_selector.criteria
    assert gateway.second_choices is circuit_builder.second_choices
    assert gateway_view.Snapshot is Snapshot
    assert gateway.Quarantine is quarantine.Quarantine
    assert gateway_view.PeerHistory is peer_history.PeerHistory
    assert gateway_view.anti_entropy_interval_s is timing.anti_entropy_interval_s
    assert initial_placement.preview_join is placement.preview_join
    assert members_placing.next_move is rebalancing.next_move
    assert member.PlacementCore is placement_core.PlacementCore
    assert moving.having_turn is rebalancing.having_turn
    assert moving.is_stuck is rebalancing.is_stuck
    assert moving.LOOK_EVERY_S == rebalancing.LOOK_EVERY_S
    assert member.LeaseBook is leases.LeaseBook
    assert member.AnnouncingCore is publisher.core.AnnouncingCore
    assert gateway_view.InFlightLoad is peer_history.InFlightLoad
    assert announcing.announcement_interval_s is timing.announcement_interval_s
    assert announcing.sign_state is announcement.sign_state


def test_a_session_that_ends_twice_or_never_came_is_an_error() -> None:
    accounts = Accounts()
    accounts.arrive(0, 0.0)
    accounts.end(ended(0))
    with pytest.raises(NotConserved, match="session 0"):
        accounts.end(ended(0))
    with pytest.raises(NotConserved, match="session 1"):
        accounts.end(ended(1))
    accounts.arrive(2, 0.0)
    with pytest.raises(NotConserved, match="1 are still open"):
        accounts.check()


def test_a_lease_that_was_not_returned_is_an_error() -> None:
    world = ran(replace(CHURNING, duration_s=20.0, churn=Churn()))
    kept = next(one for one in world.members.values() if one.book.held)
    kept.request(leases.LeaseKey(b"x" * 16, 0), kept.book.held[0], 16, "somebody", world.timeline.now_s)
    with pytest.raises(NotConserved, match="1 leases"):
        world.check()


def test_memory_is_never_granted_beyond_what_there_is() -> None:
    kind = hardware.kinds_of(LONG_LAYERS, LONG_LAYERS.spec())[0]
    cast = random_setup(replace(CHURNING, peers=1), LONG_LAYERS, bundled_matrix(), TRACE)
    one = Member(replace(cast.volunteers[0], memory=kind.memory), cast.model)
    one.hold((Span(0, 3),))
    answers = [
        one.request(leases.LeaseKey(bytes([at]) * 16, 0), Span(0, 3), 32_768, f"owner {at}", 0.0)
        for at in range(80)
    ]
    granted = [answer for answer in answers if isinstance(answer, leases.Granted)]
    assert 0 < len(granted) < len(answers)
    assert sum(lease.kv_bytes for lease in one.book.leases) <= one.book.kv_limit_bytes


def test_on_an_idle_swarm_a_token_takes_what_the_router_predicts() -> None:
    live = parse_snapshot(json.dumps(document()), "live.json", QWEN2_7B)
    its = SwarmSettings(peers=4, duration_s=1.0, gateways=1)
    world = SwarmWorld(snapshot_setup(its, live, TRACE), its)
    views = tuple(_holding(Member(one, live.model), one.spans or ()) for one in live.volunteers)
    route = planner.plan(Snapshot(views, live.model), 200, prompt_tokens=100)
    by_id = {view.peer_id: view for view in views}
    total = 0.0
    for hop, after in zip(route.hops, (*route.hops[1:], route.hops[0]), strict=True):
        there = SimulatedHop(
            hop.peer_id, hop.span, link_ms(world.setup.places.rtt_ms(hop.peer_id, after.peer_id)), None
        )
        own = own_ms(there, by_id[hop.peer_id].facts, live.model, Demand.of(200, 100))
        total += PeerLoad.of(by_id[hop.peer_id]).hop_ms(len(hop.span), own)
    assert len(route.hops) == 2
    assert total == pytest.approx(route.tpot_ms)


def _holding(one: Member, spans: tuple[Span, ...]) -> PeerView:
    one.hold(spans)
    return PeerView(one.volunteer.facts, one.state(), 0.0)


@settings(max_examples=examples(25))
@given(st.integers(1, 60), st.integers(0, 60))
def test_a_step_beside_more_others_never_takes_less(batch: int, more: int) -> None:
    cast = _cast()
    one = Member(cast.volunteers[0], cast.model)
    one.decoding = dict.fromkeys(range(batch), 0)
    alone = PeerLoad.of(one.loaded_view(0)).hop_ms(3, 1.0)
    one.decoding = dict.fromkeys(range(batch + more), 0)
    assert PeerLoad.of(one.loaded_view(0)).hop_ms(3, 1.0) >= alone > 0


@cache
def _cast() -> WorldSetup:
    return random_setup(replace(CHURNING, peers=2), LONG_LAYERS, bundled_matrix(), TRACE)


def test_announcements_are_within_their_size_and_a_settled_swarm_within_its_budget() -> None:
    quiet = swarm_row(settled(), "swarm")
    assert quiet.traffic_kbit_s < BUDGET_KBIT_S
    for row in (quiet, swarm_row(churned(), "swarm")):
        assert 65 < row.largest_state_bytes <= announcement.MAX_STATE_BYTES


@pytest.fixture
def placed_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What volunteers hold is of no matter to their announcements, and takes long to find out."""
    monkeypatch.setattr(initial_placement, "choose_span", lambda *_: Span(0, 1))


@pytest.mark.full
@pytest.mark.usefixtures("placed_anywhere")
def test_a_swarm_in_which_many_come_and_go_stays_within_its_budget_too() -> None:
    its = SwarmSettings(peers=150, duration_s=180.0, churn=Churn(450.0), rate_rps=0.001, gateways=1)
    world = ran(its)
    row = swarm_row(world, "swarm")
    assert row.joined > 40
    assert 5 < row.traffic_kbit_s < BUDGET_KBIT_S
    assert row.busiest_minute_kbit_s < BUDGET_KBIT_S


@pytest.mark.full
@pytest.mark.usefixtures("placed_anywhere")
def test_each_peer_speaks_again_after_the_interval_that_it_has_announced() -> None:
    spoken = [one for one in churned().members.values() if one.alive and one.told is not None]
    assert spoken
    for one in spoken:
        speech = one.speech
        assert speech.due_s - speech.said_s == pytest.approx(
            speech.interval_s, rel=member.TIMING.jitter + 1e-9
        )


@pytest.mark.usefixtures("placed_anywhere")
def test_who_crashes_is_in_no_table_after_two_minutes() -> None:
    its = SwarmSettings(peers=120, duration_s=600.0, churn=Churn(1800.0, 1.0), rate_rps=0.001, gateways=1)
    world = ran(its)
    assert world.accounts.crashed > 30
    dead = sum(not world.members[one].alive for one in world.bulletin.copy())
    assert dead <= world.accounts.crashed * (announcing.LOSS_BELIEVED_S + 60) / 600


def test_facts_are_as_hard_to_deflate_as_those_with_a_real_certificate() -> None:
    cast = random_setup(replace(CHURNING, peers=40), LONG_LAYERS, bundled_matrix(), TRACE)
    drawn, real = Deflater(), Deflater()
    sizes = [0, 0]
    for volunteer in cast.volunteers:
        facts = replace(volunteer.facts, sequence=1, ttl_s=1)
        certified = replace(facts, certificate=new_certificate(facts.peer_id).der)
        for at, (deflater, one) in enumerate(((drawn, facts), (real, certified))):
            record = announcement.sign_facts(one, volunteer.identity)
            sizes[at] += sum(map(len, deflater.pack([record])))
    assert sizes[0] == pytest.approx(sizes[1], rel=0.05)


@pytest.mark.full
def test_nobody_comes_or_goes_without_churn() -> None:
    accounts = settled().accounts
    assert (accounts.joined, accounts.left, accounts.crashed) == (0, 0, 0)
    assert accounts.ended
    assert all(one.outcome is SessionOutcome.COMPLETED for one in accounts.ended)


def test_a_pool_is_drawn_where_peers_are_many_and_holds_every_layer() -> None:
    cast = random_setup(replace(CHURNING, peers=150), LONG_LAYERS, bundled_matrix(), TRACE)
    layers = cast.model.layers
    views = tuple(
        _holding(Member(one, cast.model), (Span(at % (layers - 1), at % (layers - 1) + 2),))
        for at, one in enumerate(cast.volunteers)
    )
    chosen = set(shortlist.candidates(Snapshot(views, cast.model), Demand.of(100, 50), 64))
    assert len(chosen) < len(views)
    held = {layer for view in views if view.peer_id in chosen for span in view.state.spans for layer in span}
    assert held == set(range(layers))


@pytest.mark.parametrize(
    ("mean_stay_s", "crash_share"), [(0.0, 0.1), (-1.0, 0.1), (math.nan, 0.1), (1.0, 1.5)]
)
def test_churn_that_makes_no_sense_is_refused(mean_stay_s: float, crash_share: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        Churn(mean_stay_s, crash_share)


@pytest.mark.full
@pytest.mark.timeout(1500)
def test_ten_thousand_peers_for_a_while_are_conserved() -> None:
    its = SwarmSettings(peers=10_000, duration_s=120.0, churn=Churn(7200.0))
    world = SwarmWorld(random_setup(its, MODEL_SHAPES["llama-2-70b"], bundled_matrix(), TRACE), its)
    world.run()
    assert world.accounts.arrived > 60
    assert swarm_row(world, "swarm").success_rate > 0.5


@pytest.mark.full
@pytest.mark.parametrize("peers", [pytest.param(90, marks=pytest.mark.full), 130])
def test_in_a_swarm_of_any_size_somebody_holds_each_layer_at_the_start(peers: int) -> None:
    its = SwarmSettings(peers, 60.0, 1, 1.0, Churn())
    cast = random_setup(its, MODEL_SHAPES["llama-2-70b"], bundled_matrix(), TRACE)
    held = [
        span
        for member in initial_placement.InitialPlacement(cast.model).place_all(cast.volunteers)
        for span in member.book.held
    ]
    assert missing_spans(cast.model.whole, tuple(held)) == ()
