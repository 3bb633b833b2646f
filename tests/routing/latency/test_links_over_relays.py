"""Links of peers that nobody can dial: direct where a hole can be punched, else over the best relay, at its share."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.circuits.circuit_cases import MODEL, peer, snapshot_of

from molink.dht.records.records import Coordinate, PeerView, RelayAt
from molink.peer.reach.relay_limits import PairPaces
from molink.routing import CostModel, Hop, Snapshot, plan, preview_join
from molink.routing.cost.terms import Demand
from molink.routing.latency.latency_matrix import latency_matrix_ms
from molink.routing.latency.relayed_links import (
    MOST_RELAYED_MBPS,
    PeerLinks,
    RelayOffer,
    peer_links,
    relay_offers,
    relayed_mbps,
)
from molink.routing.placement.placement import JoiningMachine
from molink.routing.problem.problem import objective_ms
from molink.routing.routes.shortlist import SnapshotPeers

COST = CostModel()
RELAYS = ("r0", "r1", "r2")
places = st.tuples(st.floats(-200, 200), st.floats(-200, 200))


def at(x: float, y: float = 0.0) -> Coordinate:
    return Coordinate((x, y, 0.0, 0.0), 2.0, 0.2)


def relay(peer_id: str, place: Coordinate | None, uplink_mbps: float | None = 100.0) -> PeerView:
    view = peer(peer_id, coordinate=place)
    return replace(view, facts=replace(view.facts, relay_address="192.0.2.1:443", uplink_mbps=uplink_mbps))


def hidden(view: PeerView, *relays: str, cone: bool = False) -> PeerView:
    """The same peer where nobody can dial it."""
    stays = tuple(RelayAt(each, "192.0.2.1:443") for each in relays)
    return replace(view, facts=replace(view.facts, grpc_addresses=(), relays=stays, cone=cone))


@st.composite
def swarms(draw: st.DrawFn) -> list[PeerView]:
    """Three relays, and peers of all kinds."""
    views = [relay(name, at(*draw(places)), draw(st.none() | st.floats(1.0, 500.0))) for name in RELAYS]
    for name in "abcd":
        view = peer(name, coordinate=at(*draw(places)), sessions=draw(st.integers(0, 3)))
        stays = draw(st.lists(st.sampled_from((*RELAYS, "unknown")), unique=True, max_size=3))
        views.append(hidden(view, *stays, cone=draw(st.booleans())) if stays else view)
    return views


def links_of(views: list[PeerView], measured: dict[tuple[str, str], float] | None = None) -> PeerLinks:
    return peer_links(views, measured or {}, relay_offers(views), MODEL.activation_bytes, COST)


def direct_ms(views: list[PeerView]) -> np.ndarray:
    return latency_matrix_ms(
        [view.peer_id for view in views], {}, [view.facts.coordinate for view in views], COST
    )


@given(swarms())
def test_whoever_can_be_dialled_or_punches_at_both_ends_is_as_far_as_coordinates_say(
    views: list[PeerView],
) -> None:
    links, direct = links_of(views), direct_ms(views)
    for source, one in enumerate(views):
        for target, other in enumerate(views):
            both_hidden = source != target and bool(one.facts.relays and other.facts.relays)
            if both_hidden and not (one.facts.cone and other.facts.cone):
                assert links.relay(source, target) is not None
            else:
                assert links.relay(source, target) is None
                assert links.latency_ms[source, target] == direct[source, target]


@given(swarms())
def test_the_relay_is_one_of_the_receivers_and_none_of_them_brings_an_activation_sooner(
    views: list[PeerView],
) -> None:
    links, direct, offers = links_of(views), direct_ms(views), relay_offers(views)
    rows = {view.peer_id: row for row, view in enumerate(views)}

    def arrives_ms(source: int, target: int, name: str) -> float:
        legs = direct[source, rows[name]] + direct[rows[name], target] - COST.hop_overhead_ms
        return float(legs + offers[name].through_ms(MODEL.activation_bytes))

    for source in range(len(views)):
        for target, other in enumerate(views):
            chosen = links.relay(source, target)
            stays = [each.peer_id for each in other.facts.relays]
            if chosen is None or "unknown" in stays:
                continue
            assert chosen.peer_id in stays
            own = arrives_ms(source, target, chosen.peer_id)
            assert own == pytest.approx(min(arrives_ms(source, target, name) for name in stays))
            sent = chosen.through_ms(MODEL.activation_bytes)
            assert links.latency_ms[source, target] == pytest.approx(own - sent)


@given(swarms())
def test_a_dialler_asks_first_at_the_relay_over_which_the_router_predicts_the_link(
    views: list[PeerView],
) -> None:
    links, snapshot = links_of(views), Snapshot(tuple(views), MODEL)
    for source, one in enumerate(views):
        for target, other in enumerate(views):
            if source != target:
                preferred, announced = (
                    snapshot.preferred_relays(one.peer_id, other.facts),
                    other.facts.relays,
                )
                assert sorted(preferred, key=str) == sorted(announced, key=str)
                chosen = links.relay(source, target)
                first = [relay.peer_id for relay in announced[:1]] if chosen is None else [chosen.peer_id]
                assert [relay.peer_id for relay in preferred[:1]] == first


def test_of_who_is_not_known_the_relays_are_asked_as_they_are_announced() -> None:
    stranger = hidden(peer("stranger"), "r1", "r0")
    assert Snapshot((), MODEL).preferred_relays("me", stranger.facts) == stranger.facts.relays


@given(swarms(), st.floats(1.0, 500.0), st.sampled_from([100, 10_000, 10_000_000]))
def test_a_relay_never_makes_bytes_faster_and_touches_no_direct_link(
    views: list[PeerView], uplink_mbps: float, size_bytes: int
) -> None:
    links = links_of(views)
    longer = links.relay_ms(size_bytes, np.full(len(views), uplink_mbps))
    if longer is None:
        return
    own_ms = size_bytes * 8 / 1000 / uplink_mbps
    for source in range(len(views)):
        for target in range(len(views)):
            chosen = links.relay(source, target)
            through_ms = 0.0 if chosen is None else chosen.through_ms(size_bytes)
            at_share_ms = 0.0 if chosen is None else size_bytes * 8 / 1000 / chosen.mbps
            assert longer.alone_ms[source, target] == pytest.approx(max(0.0, through_ms - own_ms))
            assert longer.among_ms[source, target] == pytest.approx(max(0.0, at_share_ms - own_ms))
            assert longer.alone_ms[source, target] <= longer.among_ms[source, target] + 1e-9


@given(st.floats(0.1, 20.0), st.integers(1, 60), st.integers(1, 400_000))
def test_a_step_passes_a_relays_buckets_as_it_is_modelled(mbps: float, pairs: int, size_bytes: int) -> None:
    """A relay that is busy with others' prompts, on a line that takes no time."""
    now, rate = [0.0], mbps * 1e6 / 8
    part_bytes = max(256, size_bytes // 100)
    paces = PairPaces(lambda: (rate, pairs), lambda: now[0])
    prompts, decode = paces.pace(), paces.pace()
    parts, waited_s = [part_bytes] * (size_bytes // part_bytes) + [size_bytes % part_bytes], 0.0
    for part in parts:
        prompts(int(rate * (1 + now[0])))
        wait_s = decode(part)
        waited_s, now[0] = waited_s + wait_s, now[0] + wait_s
    offer = RelayOffer("r0", "r0", None, mbps / pairs, math.inf)
    part_ms = part_bytes * 8 / 1000 / offer.mbps
    assert waited_s * 1000 == pytest.approx(offer.through_ms(size_bytes), rel=1e-3, abs=part_ms + 1e-3)


@given(swarms(), st.floats(0.0, 500.0))
def test_what_was_measured_between_two_peers_goes_before_any_relay(
    views: list[PeerView], rtt_ms: float
) -> None:
    links = links_of(views, {("a", "b"): rtt_ms})
    one, other = (next(row for row, view in enumerate(views) if view.peer_id == name) for name in "ab")
    assert links.relay(one, other) is links.relay(other, one) is None
    assert links.latency_ms[one, other] == links.latency_ms[other, one] == rtt_ms / 2 + COST.hop_overhead_ms


@given(st.lists(st.integers(0, 4), max_size=12))
def test_a_relays_bandwidth_is_split_among_those_that_work_over_it(sessions: list[int]) -> None:
    stayers = [hidden(peer(f"p{row}", sessions=count), "r0", "r1") for row, count in enumerate(sessions)]
    offers = relay_offers([relay("r0", at(0.0), 80.0), *stayers, hidden(peer("new"), "r0", "r1")])
    busy = sum(count > 0 for count in sessions)
    assert offers["r0"].mbps == pytest.approx(8.0 / (1 + busy / 2))
    assert offers["r1"].mbps == pytest.approx(relayed_mbps(None) / (1 + busy / 2))


def test_a_relay_gives_a_tenth_of_its_uplink_and_never_more_than_its_most() -> None:
    assert relayed_mbps(50.0) == 5.0
    assert relayed_mbps(10_000.0) == MOST_RELAYED_MBPS


def pair(*, cone: bool = False, uplink_mbps: float = 10.0) -> Snapshot:
    low = hidden(peer("low", (0, 4), coordinate=at(0.0)), "r0", cone=cone)
    high = hidden(peer("high", (4, 8), coordinate=at(10.0)), "r0", cone=cone)
    return snapshot_of(low, high, relay("r0", at(100.0), uplink_mbps))


def test_the_terms_name_what_a_relay_adds_and_add_up_to_the_objective() -> None:
    snapshot = pair()
    route = plan(snapshot, 100, prompt_tokens=40)
    problem, ids = snapshot.problem(100, prompt_tokens=40)
    hops = [Hop(ids.index(hop.peer_id), hop.span.start, hop.span.stop) for hop in route.hops]
    assert route.objective_ms == pytest.approx(objective_ms(problem, hops))
    terms = {term.name: term for term in route.hops[0].terms}
    assert terms["link"].ms == pytest.approx((104 + 94) / 2 + COST.hop_overhead_ms)
    assert terms["relay"].ms == pytest.approx(MODEL.activation_bytes * 8 / 1000 * (1 / 10 - 1 / 20))
    costs = snapshot.pose(Demand.of(100, 40)).costs[hops[0].machine]
    assert terms["prefill"].ms - costs.prefill_ms == pytest.approx(
        MODEL.activation_bytes * 8 / 1000 * (1 / 1.0 - 1 / 20) * Demand.of(100, 40).prompt_part
    )
    assert terms["relay"].in_tpot
    assert not {term.name: term for term in route.hops[1].terms}["relay"].in_tpot
    assert route.hops[0].relay is not None
    assert any("over the relay of r0, with 1 Mbps of it" in said for said in route.hops[0].assumed)


def test_two_cones_are_predicted_to_punch() -> None:
    punched, relayed = plan(pair(cone=True), 100), plan(pair(), 100)
    assert punched.hops[0].relay is None
    assert "relay" not in {term.name for term in punched.hops[0].terms}
    assert punched.tpot_ms < relayed.tpot_ms
    assert punched.ttft_ms < relayed.ttft_ms


def test_a_relay_that_serves_another_part_of_the_swarm_is_known_to_a_shortlist() -> None:
    snapshot = pair()
    few = SnapshotPeers(snapshot).snapshot(("high", "low"))
    assert len(few.peers) == 2
    posed = few.pose(Demand.of(100))
    whole = snapshot.pose(Demand.of(100))
    assert posed.links.latency_ms.tolist() == whole.links.latency_ms[:2, :2].tolist()
    assert posed.links.relay(0, 1) == whole.links.relay(0, 1)


def test_a_preview_knows_that_a_newcomer_can_only_be_relayed() -> None:
    low = hidden(peer("low", (0, 4), coordinate=at(0.0), load_bytes_per_s=0.0), "r0")
    swarm = snapshot_of(low, relay("r0", at(100.0)))
    open_machine = JoiningMachine(
        "new", 4_400_000, 10**9, peer("new").facts.layer_latencies, coordinate=at(10.0)
    )
    stays = (RelayAt("r0", "192.0.2.1:443"),)
    relayed = preview_join(swarm, replace(open_machine, relays=stays))
    dialable = preview_join(swarm, open_machine)
    assert dialable.tpot_after_ms is not None
    assert relayed.tpot_after_ms is not None
    assert dialable.tpot_after_ms + 90 < relayed.tpot_after_ms
