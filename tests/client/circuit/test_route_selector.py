"""A client keeps to its circuits unless another is really better, and learns whom to rely on."""

from dataclasses import replace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC, asynchronous
from support.swarms.swarm_of_fakes import FakeConnection, FakePeer, template

from molink.client.circuit.connection import SwarmConnection
from molink.client.circuit.peer_history import (
    REMEMBERED_LOST,
    REMEMBERED_TRIPS,
    PeerHistory,
    credited_tokens,
)
from molink.client.circuit.route_selector import RouteSelector
from molink.client.circuit.session_request import SPECULATES
from molink.client.epochs.session_log import SessionLog, TripCounts
from molink.dht.records.records import AnnouncedDraft, LayerLatency
from molink.routing import NoCircuit, PeerObservation, Route
from molink.shards.spec import GUESSES

NOBODY = frozenset[str]()


class Choosing:
    """One client's choices over fakes."""

    def __init__(self, *peers: FakePeer) -> None:
        self.connection = FakeConnection(*peers)
        self.chooser = RouteSelector(cast("SwarmConnection", self.connection), SPEC)

    async def choose(self, avoid: frozenset[str] = NOBODY, *, epoch: int = 0) -> Route:
        session = template()
        session.epoch = epoch
        return await self.chooser.choose(self.connection.snapshot(), session, avoid)


def takes(peer: FakePeer, layer_ms: float) -> None:
    """The peer announces another speed."""
    latencies = (LayerLatency(1, layer_ms),)
    peer.view = replace(peer.view, facts=replace(peer.view.facts, layer_latencies=latencies))


@asynchronous
async def test_the_circuit_stays_for_noise_and_changes_for_a_real_gain() -> None:
    first, second = FakePeer(SPEC.whole, layer_ms=5.0), FakePeer(SPEC.whole, layer_ms=5.2)
    choosing = Choosing(first, second)
    assert (await choosing.choose()).peer_ids == (first.peer_id,)
    takes(second, 4.8)
    assert (await choosing.choose()).peer_ids == (first.peer_id,)
    assert (await Choosing(first, second).choose()).peer_ids == (second.peer_id,)
    takes(second, 2.0)
    assert (await choosing.choose()).peer_ids == (second.peer_id,)


@asynchronous
async def test_sessions_of_other_lengths_have_circuits_of_their_own() -> None:
    first, second = FakePeer(SPEC.whole, layer_ms=5.0), FakePeer(SPEC.whole, layer_ms=5.2)
    choosing = Choosing(first, second)
    await choosing.choose()
    takes(second, 4.8)
    long = template()
    long.capacity_tokens *= 4
    chosen = await choosing.chooser.choose(choosing.connection.snapshot(), long, NOBODY)
    assert chosen.peer_ids == (second.peer_id,)
    assert (await choosing.choose()).peer_ids == (first.peer_id,)


@pytest.mark.parametrize("epoch", [0, 1])
@asynchronous
async def test_who_is_avoided_is_left_though_the_circuit_stood(epoch: int) -> None:
    first, second = FakePeer(SPEC.whole, layer_ms=1.0), FakePeer(SPEC.whole, layer_ms=5.0)
    choosing = Choosing(first, second)
    await choosing.choose()
    avoid = frozenset({first.peer_id})
    assert (await choosing.choose(avoid, epoch=epoch)).peer_ids == (second.peer_id,)
    with pytest.raises(NoCircuit):
        await choosing.choose(avoid | {second.peer_id}, epoch=epoch)


@asynchronous
async def test_of_equals_the_one_that_was_lost_is_second() -> None:
    peers = (FakePeer(SPEC.whole), FakePeer(SPEC.whole))
    first = (await Choosing(*peers).choose()).peer_ids[0]
    (other,) = {peer.peer_id for peer in peers} - {first}
    choosing = Choosing(*peers)
    choosing.chooser.record_loss(first)
    assert (await choosing.choose()).peer_ids == (other,)


@asynchronous
async def test_the_clients_own_round_trips_count() -> None:
    peers = (FakePeer(SPEC.whole), FakePeer(SPEC.whole))
    first = (await Choosing(*peers).choose()).peer_ids[0]
    (other,) = (peer for peer in peers if peer.peer_id != first)
    other.rtt_ms = 2.0
    route = await Choosing(*peers).choose()
    assert route.peer_ids == (other.peer_id,)
    assert not any("to the client" in sentence for sentence in route.hops[0].assumed)


@asynchronous
async def test_the_clients_own_sessions_count_before_any_peer_has_announced_them() -> None:
    peers = (FakePeer(SPEC.whole), FakePeer(SPEC.whole))
    for peer in peers:
        slow = (LayerLatency(1, 10.0), LayerLatency(2, 20.0))
        facts = replace(peer.view.facts, layer_latencies=slow)
        peer.view = replace(peer.view, facts=facts, age_s=600.0)
    choosing = Choosing(*peers)
    first = (await choosing.choose()).peer_ids
    descriptor = template()
    descriptor.hops.add(peer_id=first[0])
    choosing.chooser.begin_session(descriptor)
    second = (await choosing.choose()).peer_ids
    assert second != first
    choosing.chooser.end_session(descriptor)
    descriptor.hops[0].peer_id = second[0]
    choosing.chooser.begin_session(descriptor)
    assert (await choosing.choose()).peer_ids == first


@pytest.mark.parametrize(
    ("changed", "learns"),
    [({}, True), ({"epochs": 2}, False), ({"moves": 1}, False), ({"speculates": False}, False)],
)
@asynchronous
async def test_a_head_whose_trips_brought_more_than_others_is_chosen_from_then_on(
    changed: dict[str, int], learns: bool
) -> None:
    quick, guessing = FakePeer(SPEC.whole, layer_ms=5.0), FakePeer(SPEC.whole, layer_ms=5.6)
    for peer in (quick, guessing):
        facts = replace(peer.view.facts, sampling_abilities=(GUESSES,), drafts=(AnnouncedDraft("lookup"),))
        peer.view = replace(peer.view, facts=facts)
    choosing, session = Choosing(quick, guessing), template()
    session.speculates = True

    async def chosen() -> Route:
        return await choosing.chooser.choose(choosing.connection.snapshot(), session, NOBODY)

    assert (await chosen()).peer_ids == (quick.peer_id,)
    route = await Choosing(guessing).choose()
    log = SessionLog(route, epochs=changed.get("epochs", 1), moves=changed.get("moves", 0))
    trips, tokens = 65, 193
    log.arrived_s = [at * 64 * route.trip_ms / 1000 / (tokens - 1) for at in range(tokens)]
    log.trips = TripCounts(trips)
    told = template()
    told.speculates = bool(changed.get("speculates", True))
    for _ in range(4):
        choosing.chooser.record_trips(told, log, SPECULATES)
    expected = guessing if learns else quick
    assert (await chosen()).peer_ids == (expected.peer_id,)


# -- observations


def unmeasured(_: str) -> None:
    return None


def test_uptime_counts_between_looks_at_which_the_peer_was_there() -> None:
    seen = PeerHistory()
    for now_s, alive in ((10.0, "ab"), (15.0, "ab"), (20.0, "b"), (30.0, "ab"), (31.0, "ab")):
        seen.record_alive(alive, now_s)
    assert seen.observations_of("abc", unmeasured) == {
        "a": PeerObservation(1.0),
        "b": PeerObservation(21.0),
        "c": PeerObservation(),
    }


def test_losses_are_remembered_when_the_peer_comes_back() -> None:
    seen = PeerHistory()
    seen.record_alive("a", 0.0)
    seen.record_alive("a", 8.0)
    seen.record_loss("a")
    seen.record_alive("", 9.0)
    seen.record_alive("a", 20.0)
    assert seen.observations_of("a", {"a": 5.0}.get) == {"a": PeerObservation(8.0, 1, 5.0)}


def test_only_the_latest_of_the_lost_are_remembered() -> None:
    seen = PeerHistory()
    names = [f"peer {number}" for number in range(REMEMBERED_LOST + 1)]
    for name in names:
        seen.record_loss(name)
    seen.record_alive((), 0.0)
    known = seen.observations_of(names, unmeasured)
    assert [known[name].losses for name in (names[0], names[1], names[-1])] == [0, 1, 1]


def test_trips_of_a_head_are_summed_up_and_older_ones_count_less_and_less() -> None:
    seen = PeerHistory()
    seen.record_trips("a", 40, 100.0)
    seen.record_trips("a", 60, 60.0)
    seen.record_alive("a", 1.0)
    assert seen.observations_of("a", unmeasured)["a"] == PeerObservation(trips=100, trip_tokens=160.0)
    for _ in range(20):
        seen.record_trips("a", 100, 300.0)
    late = seen.observations_of("a", unmeasured)["a"]
    assert late.trips == REMEMBERED_TRIPS
    assert late.trip_tokens / late.trips == pytest.approx(3.0, abs=0.01)


def test_of_tokens_that_seem_to_come_of_few_trips_only_those_count_that_their_time_bears_out() -> None:
    honest = credited_tokens(100, 300, taken_ms=100 * 120.0, trip_ms=100.0)
    bunched = credited_tokens(100, 300, taken_ms=300 * 100.0, trip_ms=100.0)
    assert (honest, bunched) == (300, 150)
    assert credited_tokens(100, 300, taken_ms=1e9, trip_ms=100.0) == 100
    assert credited_tokens(1, 1, taken_ms=0.0, trip_ms=100.0) == 1


@given(st.lists(st.tuples(st.floats(0, 100), st.sets(st.sampled_from("ab")), st.booleans())))
def test_nobody_is_seen_for_longer_than_the_client_looked(
    looks: list[tuple[float, set[str], bool]],
) -> None:
    seen, now_s = PeerHistory(), 0.0
    for wait_s, alive, lost in looks:
        now_s += wait_s
        seen.record_alive(alive, now_s)
        if lost:
            seen.record_loss("a")
    known = seen.observations_of("ab", unmeasured)
    assert all(0 <= one.uptime_s <= now_s + 1e-6 for one in known.values())
    assert known["b"].losses == 0
