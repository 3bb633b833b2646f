"""What peers announce goes into `status --json` and comes out of it as the facts of simulated volunteers."""

import contextlib
import json
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from molink.client.api.overview import SwarmOverview
from molink.client.api.running_sessions import RunningSessions
from molink.dht.records.description import describe_swarm
from molink.dht.records.records import (
    Coordinate,
    DeviceProperties,
    LayerLatency,
    LinkMeasurement,
    PeerFacts,
    PeerState,
    PeerView,
    PrefillLatency,
)
from molink.peer.memory.memory import MemoryPlan
from molink.peer.profiling.profile import Profile
from molink.routing.routes.planner import plan
from molink.routing.snapshot import Snapshot
from molink.shards.spec import Span
from molink.simnet.core.traces import TraceRequest
from molink.simnet.devices.model_shapes import QWEN2_7B
from molink.simnet.swarm.factory import snapshot_setup
from molink.simnet.swarm.population.hardware import CardKind
from molink.simnet.swarm.population.snapshot_file import LiveSwarm, SnapshotError, parse_snapshot
from molink.simnet.swarm.population.volunteers import Volunteer, identity_of, plain_facts
from molink.simnet.swarm.settings import SwarmSettings
from molink.simnet.swarm.world import SwarmWorld

ROUNDED = 1e-5
TRACE = (TraceRequest(0.0, 400, 20), TraceRequest(1.0, 400, 20))
MODEL = replace(QWEN2_7B, layers=8).spec()
SETTINGS = SwarmSettings(peers=2, duration_s=20.0, gateways=1, rate_rps=0.2)
MEASURED = ("layer_latencies", "prefill_latencies", "embed_ms", "head_ms", "step_ms", "load_bytes_per_s",
            "decode_context_ms", "prefill_context_ms", "span_limit", "coordinate", "uplink_mbps")  # fmt: skip
"""Facts that a router counts with, beside the links and the device's processors."""
NEW_KEYS = {"processors", "span_limit", "layer_ms_by_batch_size", "prefill_layer_ms", "decode_context_ms",
            "prefill_context_ms", "step_ms", "embed_ms", "head_ms", "load_bytes_per_s", "coordinate"}  # fmt: skip

TIMES_MS = st.floats(1e-6, 1e5)
PLACES = st.builds(
    Coordinate,
    st.tuples(*[st.floats(-1e4, 1e4)] * 4),
    st.floats(0.01, 1e4),
    st.floats(0.05, 1.5),
)
COSTS = st.fixed_dictionaries(
    {
        "layer_latencies": st.dictionaries(st.integers(1, 2**20), TIMES_MS, min_size=1, max_size=5).map(
            lambda times: tuple(LayerLatency(*one) for one in sorted(times.items()))
        ),
        "prefill_latencies": st.dictionaries(st.integers(1, 2**20), TIMES_MS, max_size=5).map(
            lambda times: tuple(PrefillLatency(*one) for one in sorted(times.items()))
        ),
        "embed_ms": TIMES_MS, "head_ms": TIMES_MS, "step_ms": TIMES_MS, "load_bytes_per_s": st.floats(1.0, 1e12),
        "decode_context_ms": TIMES_MS, "prefill_context_ms": TIMES_MS,
        "span_limit": st.none() | st.integers(0, 7).map(lambda start: Span(start, 8)),
        "coordinate": st.none() | PLACES, "uplink_mbps": st.none() | st.floats(0.1, 1e4),
    }
)  # fmt: skip
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


def announced(name: str, *spans: tuple[int, int], **costs: object) -> PeerView:
    """A peer as the directory knows it; `costs` are fields of its facts."""
    kind = CardKind(
        "any",
        DeviceProperties("cpu", "", 1, 0, "", 1),
        Profile((LayerLatency(1, 2.0),), 0.1, 0.3, 1e9),
        MemoryPlan(0, 0, 0),
    )
    facts = plain_facts(identity_of(0, name), MODEL, name, kind)
    held = tuple(Span(*span) for span in spans)
    state = PeerState(facts.peer_id, 2, 120, 1, held, 0, 10**9, 0, 0)
    return PeerView(replace(facts, **costs), state, 1.0)  # type: ignore[arg-type]


def well_measured(name: str, *spans: tuple[int, int], place_ms: float = 0.0) -> PeerView:
    return announced(
        name,
        *spans,
        layer_latencies=(LayerLatency(1, 1.25), LayerLatency(8, 2.123456)),
        prefill_latencies=(PrefillLatency(64, 8.5), PrefillLatency(448, 40.0)),
        decode_context_ms=0.125,
        prefill_context_ms=0.25,
        embed_ms=0.0625,
        head_ms=3.5,
        step_ms=0.75,
        load_bytes_per_s=1.5e9,
        device=DeviceProperties("cpu", "Processor", 1, 8 * 10**9, "Linux x86_64", 6),
        coordinate=Coordinate((place_ms, 0.0, 0.0, 0.0), 2.0, 0.1),
        uplink_mbps=80.0,
    )


def two() -> list[PeerView]:
    return [well_measured("a", (0, 4)), well_measured("b", (4, 8), place_ms=30.0)]


def read(document: object) -> LiveSwarm:
    """From its text, as a file would have it."""
    return parse_snapshot(json.dumps(document), "live.json", QWEN2_7B)


def by_name(live: LiveSwarm) -> list[Volunteer]:
    return sorted(live.volunteers, key=lambda one: one.facts.name)


def round_trips_ms(document: object) -> set[float]:
    """Between the two peers of a document, in both directions."""
    live = read(document)
    places = snapshot_setup(SETTINGS, live, TRACE).places
    one, other = (each.peer_id for each in live.volunteers)
    return {places.rtt_ms(one, other), places.rtt_ms(other, one)}


def close(one: PeerFacts, other: PeerFacts) -> bool:
    """Whether the measured facts are equal but for the rounding."""
    numbers: list[list[float | None]] = [[], []]
    for found, facts in zip(numbers, (one, other), strict=True):
        for name in MEASURED:
            _flatten(getattr(facts, name), found)
    ours, theirs = numbers
    return [value is None for value in ours] == [value is None for value in theirs] and [
        value for value in ours if value is not None
    ] == pytest.approx([value for value in theirs if value is not None], rel=ROUNDED)


def _flatten(value: object, found: list[float | None]) -> None:
    if isinstance(value, tuple):
        found.append(len(value))
        for part in value:
            _flatten(part, found)
    elif value is None or isinstance(value, (int, float)):
        found.append(value)
    else:
        for field in fields(value):  # type: ignore[arg-type]
            _flatten(getattr(value, field.name), found)


@given(COSTS)
def test_what_a_peer_announces_is_what_its_simulated_counterpart_announces(costs: dict[str, Any]) -> None:
    view = announced("a", (0, 8), **costs)
    (volunteer,) = read(describe_swarm([view])).volunteers
    assert close(volunteer.facts, view.facts)
    assert volunteer.uplink_mbps == view.facts.uplink_mbps


@pytest.mark.anyio
async def test_processors_and_the_round_trips_of_an_overview_are_announced_too() -> None:
    one, other = two()
    one = replace(one, facts=replace(one.facts, links=(LinkMeasurement(other.peer_id, 7.5),)))
    views = (one, other)
    told = await SwarmOverview(MODEL, lambda: views, RunningSessions()).describe()
    one, other = by_name(read(told))
    assert one.facts.device.processors == 6
    assert one.facts.links == (LinkMeasurement(other.peer_id, 7.5),)
    assert other.facts.links == ()


def test_measured_round_trips_go_before_those_that_coordinates_predict() -> None:
    document: dict[str, Any] = describe_swarm(two())
    assert round_trips_ms(document) == {34.0}
    first, second = (one["peer_id"] for one in document["peers"])
    document["links"] = [{"from": second, "to": first, "rtt_ms": 5.0}]
    assert round_trips_ms(document) == {5.0}


def test_a_coordinate_that_is_too_wrong_for_a_router_places_nobody() -> None:
    document: dict[str, Any] = describe_swarm(two())
    document["peers"][0]["coordinate"]["error"] = 1.0
    assert round_trips_ms(document) == {100.0}


def test_a_router_plans_in_the_simulated_swarm_as_in_the_real_one() -> None:
    views = two()
    copies = tuple(
        PeerView(one.facts, replace(view.state, peer_id=one.peer_id), 1.0)
        for one, view in zip(by_name(read(describe_swarm(views))), views, strict=True)
    )
    real, simulated = (
        plan(Snapshot(tuple(peers), MODEL), 200, prompt_tokens=100) for peers in (views, copies)
    )
    assert [hop.span for hop in simulated.hops] == [hop.span for hop in real.hops] == [Span(0, 4), Span(4, 8)]
    assert simulated.tpot_ms == pytest.approx(real.tpot_ms, rel=ROUNDED)
    assert simulated.ttft_ms == pytest.approx(real.ttft_ms, rel=ROUNDED)


def test_a_document_of_an_older_version_is_read_with_what_routers_assume() -> None:
    document: dict[str, Any] = describe_swarm(two())
    for one in document["peers"]:
        assert set(one) >= NEW_KEYS
        for key in NEW_KEYS:
            del one[key]
    live = read(document)
    for volunteer in live.volunteers:
        assert volunteer.facts.layer_latencies == (LayerLatency(1, 1.25),)
        assert volunteer.facts.prefill_latencies == ()
        assert volunteer.facts.coordinate is None
        assert volunteer.facts.load_bytes_per_s == 2e9


def test_batches_and_prompts_take_a_simulated_peer_what_was_measured() -> None:
    document: dict[str, Any] = describe_swarm(two())
    firsts_s = []
    for prefill_ms in (40.0, 400.0):
        for one in document["peers"]:
            one["prefill_layer_ms"] = dict.fromkeys(one["prefill_layer_ms"], prefill_ms)
        cast = snapshot_setup(SETTINGS, read(document), TRACE)
        world = SwarmWorld(cast, SETTINGS)
        world.run()
        firsts_s.append([one.ttft_ms for one in world.accounts.ended])
    assert all(slow > fast for fast, slow in zip(*firsts_s, strict=True))


def test_a_peer_that_speaks_another_version_is_in_no_simulated_swarm() -> None:
    old = announced("old", (0, 8), protocol_version=0)
    assert len(read(describe_swarm([*two(), old])).volunteers) == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("layer_ms_by_batch_size", [1.0], "layer_ms_by_batch_size: an object of milliseconds"),
        ("layer_ms_by_batch_size", {"0": 1.0}, "layer_ms_by_batch_size: '0' is no whole number above 0"),
        ("layer_ms_by_batch_size", {"one": 1.0}, "layer_ms_by_batch_size: 'one' is no whole number"),
        ("prefill_layer_ms", {"64": "1"}, "key prefill_layer_ms, key 64: a number is needed, got '1'"),
        ("prefill_layer_ms", {"64": -1}, "key prefill_layer_ms, key 64: -1 is not from 0"),
        ("decode_context_ms", float("nan"), "decode_context_ms: a number is needed, got nan"),
        ("load_bytes_per_s", "fast", "load_bytes_per_s: a number is needed, got 'fast'"),
        ("head_ms", 10**400, "key head_ms: 1000"),
        ("processors", -1, "processors: -1 is not from 0"),
        ("span_limit", [0, 9], "span_limit: [0, 9] is no span of 8 layers"),
        ("coordinate", [1, 2], "coordinate: position, height_ms and error are needed"),
        ("coordinate", {}, "coordinate, key position: a list of numbers"),
        ("coordinate", {"position": [0, "x", 0, 0]}, "coordinate, key position[1]: a number is needed"),
        ("coordinate", {"position": [0] * 4, "error": 1}, "coordinate, key height_ms: a number is needed"),
        ("coordinate", {"position": [0], "height_ms": 1, "error": 1}, "coordinate: a position has 4 dim"),
        ("coordinate", {"position": [0] * 4, "height_ms": 1, "error": 2}, "coordinate: error must be"),
        ("name", "\ud800", "key name: a text is needed"),
    ],
)  # fmt: skip
def test_a_wrong_measurement_is_named_by_file_peer_and_key(key: str, value: object, said: str) -> None:
    document: dict[str, Any] = describe_swarm(two())
    document["peers"][1][key] = value
    with pytest.raises(SnapshotError) as error:
        read(document)
    assert "live.json, peers[1]" in str(error.value)
    assert said in str(error.value)
    assert len(str(error.value)) < 200


@given(st.sampled_from(sorted(NEW_KEYS | {"spans", "layer_ms", "name", "uplink_mbps"})), JSON_VALUES)
def test_no_measurement_does_more_than_be_refused(key: str, value: object) -> None:
    document: dict[str, Any] = describe_swarm(two())
    document["peers"][0][key] = value
    with contextlib.suppress(SnapshotError):
        assert len(read(document).volunteers) == 2


@given(st.fixed_dictionaries({"position": JSON_VALUES, "height_ms": JSON_VALUES, "error": JSON_VALUES}))
def test_no_coordinate_does_more_than_be_refused(value: dict[str, object]) -> None:
    document: dict[str, Any] = describe_swarm(two())
    document["peers"][0]["coordinate"] = value
    with contextlib.suppress(SnapshotError):
        read(document)
