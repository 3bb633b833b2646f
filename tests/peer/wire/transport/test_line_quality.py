"""What a peer measured of its line: announced when it has really changed, shown as it is, bounded in number."""

import asyncio
import math
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from support.links.data_plane import SPEC, asynchronous, until
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.node.discovery import Discovery
from molink.dht.records.facts_codec import MAX_UPLINK_MBPS
from molink.dht.records.records import LayerLatency, PeerFacts, PeerState
from molink.peer.announcing import announcer
from molink.peer.announcing.announcer import Announcer, Measurements
from molink.peer.announcing.prober import Prober
from molink.peer.engine.metrics import MAX_LINKS, PeerMetrics, describe_line, describe_predictions
from molink.peer.engine.stepping import Stepper
from molink.peer.memory.leases import LeaseBook
from molink.peer.memory.memory import MemoryPlan
from molink.peer.profiling.profile import Profile, StepWork
from molink.peer.profiling.step_times import StepTimes
from molink.peer.wire.transport.line_quality import (
    CHANGED_BY,
    MOST_MBPS,
    LineQuality,
    LinkQuality,
    announced_mbps,
)
from molink.routing.latency.coordinates import START

rates = st.floats(1.0, 1e12)


class Neighbourhood:
    """What an announcer uses of Discovery, Prober and Stepper: it keeps the facts that were announced."""

    coordinate = START
    queued = 0

    def __init__(self) -> None:
        self.facts: list[PeerFacts] = []
        self.states = 0

    def measurements(self) -> tuple[()]:
        return ()

    async def announce(self, facts: PeerFacts | None, state: PeerState) -> None:
        assert facts is None or facts.peer_id == state.peer_id
        self.states += 1
        self.facts += [] if facts is None else [facts]


@given(announced=rates, measured=rates)
def test_what_is_announced_is_near_what_was_measured_and_seldom_new(
    announced: float, measured: float
) -> None:
    first = announced_mbps(None, announced)
    assert first is not None
    assert first == pytest.approx(min(max(announced * 8e-6, 0.01), MOST_MBPS), rel=0.051)
    assert announced_mbps(first, announced) == first
    second = announced_mbps(first, measured)
    assert second is not None
    assert 0 < second <= MAX_UPLINK_MBPS
    told = min(max(measured * 8e-6, 0.01), MOST_MBPS)
    assert (second == first) or abs(told - first) > CHANGED_BY * first
    assert abs(second - told) <= 0.051 * told or abs(told - first) <= CHANGED_BY * first


@pytest.mark.parametrize("nothing", [None, 0.0, -1.0, math.nan, math.inf])
def test_without_a_measurement_the_announced_one_stays(nothing: float | None) -> None:
    assert announced_mbps(None, nothing) is None
    assert announced_mbps(95.0, nothing) == 95.0


def test_digits_beyond_the_second_are_not_announced() -> None:
    assert announced_mbps(None, 12_345_678.0) == 99.0
    assert announced_mbps(99.0, 14_000_000.0) == 99.0
    assert announced_mbps(99.0, 1_543_210.0) == 12.0
    assert announced_mbps(None, 154_321.0) == 1.2


@asynchronous
async def test_an_uplink_is_announced_with_the_facts_when_it_changes_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around = Neighbourhood()
    line = LineQuality()
    changed = asyncio.Event()
    weights = SPEC.weight_bytes(SPEC.whole)
    telling = Announcer(
        cast("Discovery", around),
        facts_of(Identity.generate()),
        SPEC,
        LeaseBook(SPEC, MemoryPlan(weights, 0, weights)),
        cast("Stepper", around),
        changed,
        Measurements(cast("Prober", around), lambda: line, StepTimes(Profile((), 1.0, 1.0, 1.0))),
    )
    keeping = asyncio.create_task(telling.keep_announced())

    async def look() -> None:
        before = around.states
        changed.set()
        await until(lambda: around.states > before)

    try:
        await look()
        assert around.facts == []
        line = LineQuality(12_500_000.0)
        await look()
        assert [facts.uplink_mbps for facts in around.facts] == [100.0]
        line = LineQuality(14_000_000.0)
        await look()
        line = LineQuality(2_500_000.0)
        await look()
        assert len(around.facts) == 1, "facts are not announced again within the gap"
        monkeypatch.setattr(announcer, "UPLINK_GAP_S", 0.0)
        await look()
        await look()
        assert [facts.uplink_mbps for facts in around.facts] == [100.0, 20.0]
        assert telling.own_view().facts.uplink_mbps == 20.0
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


@asynchronous
async def test_a_profile_that_steps_have_refined_is_announced_with_the_facts_and_then_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    around = Neighbourhood()
    changed = asyncio.Event()
    weights = SPEC.weight_bytes(SPEC.whole)
    facts = facts_of(Identity.generate())
    times = StepTimes(Profile((LayerLatency(1, 1.0),), 1.0, 1.0, 1.0))
    telling = Announcer(
        cast("Discovery", around),
        facts,
        SPEC,
        LeaseBook(SPEC, MemoryPlan(weights, 0, weights)),
        cast("Stepper", around),
        changed,
        Measurements(cast("Prober", around), LineQuality, times),
    )
    keeping = asyncio.create_task(telling.keep_announced())

    async def look() -> None:
        before = around.states
        changed.set()
        await until(lambda: around.states > before)

    def step(measured_ms: float) -> None:
        for _ in range(200):
            times.observe(StepWork(10, False, False, (0,)), measured_ms)

    try:
        step(11.0)
        await look()
        assert around.facts == [], "a little more is not worth telling"
        step(20.0)
        await look()
        assert [round(told.layer_latencies[0].layer_ms, 2) for told in around.facts] == [2.0]
        step(40.0)
        await look()
        assert len(around.facts) == 1, "facts are not announced again within the gap"
        monkeypatch.setattr(announcer, "PROFILE_GAP_S", 0.0)
        await look()
        await look()
        assert [round(told.layer_latencies[0].layer_ms, 2) for told in around.facts] == [2.0, 4.0]
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def test_gauges_of_predictions_come_with_the_first_step() -> None:
    metrics = PeerMetrics()
    times = StepTimes(Profile((LayerLatency(1, 1.0),), 1.0, 1.0, 1.0))
    metrics.compare(times)
    assert metrics.registry.get_sample_value("molink_step_prediction_error") is None
    assert describe_predictions(times) == {
        "predicted_steps": 0,
        "prediction_error": None,
        "profile_error": None,
    }
    metrics.stepped(0.02, 1, 1, StepWork(10, False, False, (0,)))
    assert metrics.registry.get_sample_value("molink_step_prediction_error") == 0.5
    assert metrics.registry.get_sample_value("molink_step_profile_error") == 0.5
    assert describe_predictions(times)["predicted_steps"] == 1


def test_gauges_show_the_line_as_it_is_at_each_look() -> None:
    metrics = PeerMetrics()
    line = LineQuality()
    metrics.watch(lambda: line)
    assert "\nmolink_uplink_bytes_per_second " not in generate_latest(metrics.registry).decode()
    slow = LinkQuality("12D3KooW-slow-peer", 1e6, 0.031, 0.002)
    line = LineQuality(12.5e6, (slow, LinkQuality("12D3KooW-new-peer", None, None, 0.0)))
    shown = generate_latest(metrics.registry).decode().splitlines()
    assert "molink_uplink_bytes_per_second 1.25e+07" in shown
    assert 'molink_link_bytes_per_second{peer="low-peer"} 1e+06' in shown
    assert 'molink_link_round_trip_seconds{peer="low-peer"} 0.031' in shown
    assert 'molink_link_queueing_seconds{peer="low-peer"} 0.002' in shown
    assert 'molink_link_queueing_seconds{peer="new-peer"} 0.0' in shown
    assert not any("new-peer" in each and "round_trip" in each for each in shown)
    assert describe_line(line) == {
        "uplink_mbps": 100.0,
        "links": [
            {"peer_id": slow.peer_id, "mbps": 8.0, "rtt_ms": 31.0, "queueing_ms": 2.0},
            {"peer_id": "12D3KooW-new-peer", "mbps": None, "rtt_ms": None, "queueing_ms": 0.0},
        ],
    }


@given(st.lists(st.tuples(st.integers(0, 200), st.none() | st.floats(0, 1e9)), max_size=100))
def test_many_links_and_equal_short_ids_are_few_series_and_the_busiest_ones(
    links: list[tuple[int, float | None]],
) -> None:
    measured = tuple(LinkQuality(f"{number}-{number % 50:08}", rate, 0.1, 0.0) for number, rate in links)
    metrics = PeerMetrics()
    metrics.watch(lambda: LineQuality(1.0, measured))
    shown = [
        line
        for line in generate_latest(metrics.registry).decode().splitlines()
        if line.startswith("molink_link_round_trip_seconds{")
    ]
    assert len(shown) == len(set(shown)) <= MAX_LINKS
    fastest = max((rate for _, rate in links if rate is not None), default=None)
    described = describe_line(LineQuality(1.0, measured))["links"]
    assert isinstance(described, list)
    assert len(described) == len(shown)
    if fastest is not None:
        assert described[0]["mbps"] == round(fastest * 8e-6, 3)


def test_activations_are_counted_by_encoding_and_together() -> None:
    metrics = PeerMetrics()
    metrics.sent_activations("int8", 272)
    metrics.sent_activations("float32", 1024)
    metrics.sent_activations("int8", 272)
    shown = generate_latest(metrics.registry).decode().splitlines()
    assert 'molink_activation_bytes_total{encoding="int8"} 544.0' in shown
    assert metrics.activation_bytes == 1568
