"""Signed announcements: what goes in comes out, and nothing else does."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.properties import examples
from support.swarms.swarm_examples import facts_of, known_keys, state_of

from molink.dht.identity.identity import Identity
from molink.dht.records import announcement_pb2 as pb
from molink.dht.records.announcement import (
    MAX_FACTS_BYTES,
    MAX_STATE_BYTES,
    AnnouncementError,
    Reason,
    sign_facts,
    sign_state,
    state_tag,
    verify_facts,
    verify_state,
)
from molink.dht.records.bounds import MAX_LAYERS, MAX_SEQUENCE, MAX_TTL_S
from molink.dht.records.facts_codec import MAX_UPLINK_MBPS
from molink.dht.records.records import (
    COORDINATE_DIMENSIONS,
    MAX_COORDINATE_ERROR,
    MAX_COORDINATE_MS,
    AnnouncedDraft,
    Coordinate,
    LayerLatency,
    LinkMeasurement,
    PeerFacts,
    PeerState,
    PrefillLatency,
)
from molink.shards.spec import GRAMMARS, PENALTIES, Span, merge_spans

IDENTITY = Identity.generate()
KEYS = known_keys([IDENTITY.public_key])
COORDINATE = Coordinate((12.5, -40.0, 0.0, 3.25), 7.5, 0.25)
FACTS = sign_facts(replace(facts_of(IDENTITY), coordinate=COORDINATE), IDENTITY)
STATE = sign_state(state_of(IDENTITY), IDENTITY)

spans = st.builds(
    lambda start, length: Span(start, min(start + length, MAX_LAYERS)),
    st.integers(0, MAX_LAYERS - 1),
    st.integers(1, MAX_LAYERS),
)
sequences = st.integers(0, MAX_SEQUENCE)
sizes = st.integers(0, 2**63 - 1)
counts = st.integers(0, 2**62)
parts = st.floats(-MAX_COORDINATE_MS, MAX_COORDINATE_MS, width=32)
coordinates = st.builds(
    Coordinate,
    st.tuples(*[parts] * COORDINATE_DIMENSIONS),
    st.floats(0, MAX_COORDINATE_MS, width=32, exclude_min=True),
    st.floats(0, MAX_COORDINATE_ERROR, width=32, exclude_min=True),
)


@st.composite
def states(draw: st.DrawFn) -> PeerState:
    sequence = draw(sequences)
    return PeerState(
        peer_id=IDENTITY.peer_id,
        sequence=sequence,
        ttl_s=draw(st.integers(0, MAX_TTL_S)),
        facts_sequence=draw(st.integers(0, sequence)),
        spans=tuple(draw(st.lists(spans, max_size=20))),
        free_weight_bytes=draw(sizes),
        free_kv_bytes=draw(sizes),
        sessions=draw(counts),
        queued=draw(counts),
        draining=draw(st.booleans()),
        loading=tuple(draw(st.lists(spans, max_size=3))),
    )


@given(states())
@example(
    PeerState(
        IDENTITY.peer_id,
        MAX_SEQUENCE,
        MAX_TTL_S,
        0,
        tuple(Span(start, start + 200) for start in range(255, MAX_LAYERS - 200, 400)),
        2**63 - 1,
        2**63 - 1,
        2**62,
        2**62,
        draining=True,
        loading=(Span(300, MAX_LAYERS),),
    )
)
def test_every_state_takes_at_most_150_bytes_and_promises_nothing_more(state: PeerState) -> None:
    record = sign_state(state, IDENTITY)
    assert len(record) <= MAX_STATE_BYTES
    said = verify_state(record, KEYS)
    assert (said.sequence, said.ttl_s, said.facts_sequence) == (
        state.sequence,
        state.ttl_s,
        state.facts_sequence,
    )
    assert said.draining == state.draining
    for told, true in (
        (said.free_weight_bytes, state.free_weight_bytes),
        (said.free_kv_bytes, state.free_kv_bytes),
    ):
        assert true * (1 - 1 / 128) <= told <= true
    held, loading = merge_spans(state.spans), merge_spans(state.loading)
    most = 7 if loading else 8
    assert len(said.spans) == min(most, len(held))
    assert set(said.spans) <= set(held)
    assert sum(map(len, said.spans)) == sum(sorted(map(len, held))[-most:])
    assert set(said.loading) <= set(loading)
    assert list(map(len, said.loading)) == sorted(map(len, loading))[-1:]
    assert state_tag(record) in KEYS


def test_a_usual_state_comes_out_as_it_went_in() -> None:
    assert verify_state(STATE, KEYS) == state_of(IDENTITY)
    assert len(STATE) <= 110


@st.composite
def any_facts(draw: st.DrawFn) -> PeerFacts:
    """Facts of which every field that is written in a way of its own varies."""
    layer_ms = draw(
        st.integers(2048, 4095).flatmap(lambda bits: st.integers(-30, 6).map(lambda two: bits * 2.0**two))
    )
    batches = sorted(draw(st.lists(st.integers(1, 4096), min_size=1, max_size=16, unique=True)))
    codecs = st.sampled_from(("float16", "bfloat16", "int8", "int4 of tomorrow"))
    return replace(
        facts_of(IDENTITY, sequence=draw(sequences), links=2),
        name=draw(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=16)),
        layer_latencies=tuple(LayerLatency(size, layer_ms) for size in batches),
        prefill_latencies=tuple(PrefillLatency(size, layer_ms) for size in batches[:8]),
        span_limit=draw(st.none() | st.integers(1, 32).map(lambda stop: Span(0, stop))),
        head_ms=layer_ms,
        coordinate=draw(st.none() | coordinates),
        uplink_mbps=draw(st.none() | st.floats(0, MAX_UPLINK_MBPS, exclude_min=True)),
        activation_codecs=tuple(draw(st.lists(codecs, max_size=8))),
    )


@given(any_facts())
def test_facts_come_out_as_they_went_in(facts: PeerFacts) -> None:
    assert verify_facts(sign_facts(facts, IDENTITY)) == facts


@given(st.floats(1e-6, 1e6))
def test_measurements_lose_less_than_a_two_thousandth(layer_ms: float) -> None:
    facts = replace(facts_of(IDENTITY), head_ms=layer_ms, layer_latencies=(LayerLatency(1, layer_ms),))
    said = verify_facts(sign_facts(facts, IDENTITY))
    for told_ms in (said.head_ms, said.layer_latencies[0].layer_ms):
        assert layer_ms * (1 - 2**-11) <= told_ms <= layer_ms


def test_the_largest_facts_fit_and_the_nearest_links_are_kept() -> None:
    facts = facts_of(IDENTITY, links=40)
    largest = replace(
        facts,
        addresses=tuple(f"/dns/{'h' * 60}{i}.example/tcp/65535/p2p/{IDENTITY.peer_id}" for i in range(8)),
        grpc_addresses=tuple(f"{'h' * 60}{i}.example:65535" for i in range(8)),
        certificate=bytes(500),
        coordinate=COORDINATE,
        uplink_mbps=MAX_UPLINK_MBPS,
        activation_codecs=("a codec of 16 b.",) * 8,
        prefill_latencies=tuple(PrefillLatency(2**size, 1.0) for size in range(12, 20)),
        drafts=(AnnouncedDraft("lookup"), AnnouncedDraft("tables"), AnnouncedDraft("d" * 24, bytes(8), 0.25)),
    )
    record = sign_facts(largest, IDENTITY)
    assert len(record) <= MAX_FACTS_BYTES
    assert [link.rtt_ms for link in verify_facts(record).links] == [float(rtt) for rtt in range(32)]


@pytest.mark.parametrize("record", [FACTS, STATE], ids=["facts", "state"])
def test_no_byte_of_a_record_can_be_altered(record: bytes) -> None:
    for position in range(len(record)):
        for flip in (0x01, 0x80, 0xFF):
            altered = bytearray(record)
            altered[position] ^= flip
            with pytest.raises(AnnouncementError):
                _open(bytes(altered), record is FACTS)
    for shorter in range(len(record)):
        with pytest.raises(AnnouncementError):
            _open(record[:shorter], record is FACTS)
    with pytest.raises(AnnouncementError):
        _open(record + b"\0", record is FACTS)


@settings(max_examples=examples(300))
@given(st.sampled_from((b"", b"\xf1", b"\x51", FACTS[:65], STATE[:65])), st.binary(max_size=5000))
def test_any_bytes_are_refused_with_a_reason(head: bytes, tail: bytes) -> None:
    for is_facts in (True, False):
        with pytest.raises(AnnouncementError) as refusal:
            _open(head + tail, is_facts)
        assert refusal.value.reason in Reason


@settings(max_examples=examples(200))
@given(st.binary(max_size=84))
def test_a_signed_body_of_any_bytes_is_opened_or_refused(body: bytes) -> None:
    for kind, is_facts in ((0xF1, True), (0x51, False)):
        record = _signed(kind, body)
        try:
            _open(record, is_facts)
        except AnnouncementError as error:
            assert error.reason in {Reason.MALFORMED, Reason.FORGED, Reason.UNKNOWN_PEER}  # noqa: PT017


def test_a_record_that_is_too_long_is_refused_before_it_is_read() -> None:
    for is_facts, most in ((True, MAX_FACTS_BYTES), (False, MAX_STATE_BYTES)):
        with pytest.raises(AnnouncementError) as refusal:
            _open(bytes(most + 1), is_facts)
        assert refusal.value.reason is Reason.OVERSIZED


def test_nobody_signs_for_another() -> None:
    other = Identity.generate()
    with pytest.raises(AnnouncementError, match="cannot sign"):
        sign_facts(facts_of(IDENTITY), other)
    with pytest.raises(AnnouncementError, match="cannot sign"):
        sign_state(state_of(IDENTITY), other)
    with pytest.raises(AnnouncementError) as refusal:
        verify_state(sign_state(state_of(other), other), KEYS)
    assert refusal.value.reason is Reason.UNKNOWN_PEER
    tag = state_tag(STATE)
    with pytest.raises(AnnouncementError) as refusal:
        verify_state(STATE, {tag: other.public_key})
    assert refusal.value.reason is Reason.FORGED


@pytest.mark.parametrize(
    "altered",
    [
        {"name": "x" * 65},
        {"name": "two\nlines"},
        {"name": "\x1b[31mred"},
        {"addresses": ("/ip4/192.0.2.7/tcp/4001",)},
        {"addresses": (f"/ip4/192.0.2.7/tcp/4001/p2p/{Identity.generate().peer_id}",)},
        {"addresses": (f"/ip4/192.0.2.7/tcp/4001/p2p/{IDENTITY.peer_id}",) * 9},
        {"grpc_addresses": ("192.0.2.7",)},
        {"grpc_addresses": ("192.0.2.7:0",)},
        {"grpc_addresses": ("host/path:1",)},
        {"certificate": bytes(1025)},
        {"protocol_version": 0},
        {"embed_ms": math.nan},
        {"head_ms": -1.0},
        {"load_bytes_per_s": 0.0},
        {"load_bytes_per_s": math.inf},
        {"layer_latencies": (LayerLatency(1, 0.0),)},
        {"layer_latencies": (LayerLatency(2, 1.0), LayerLatency(1, 1.0))},
        {"layer_latencies": tuple(LayerLatency(size, 1.0) for size in range(1, 18))},
        {"prefill_latencies": (PrefillLatency(16, 0.0),)},
        {"prefill_latencies": (PrefillLatency(0, 1.0),)},
        {"prefill_latencies": (PrefillLatency(16, float("inf")),)},
        {"prefill_latencies": (PrefillLatency(32, 1.0), PrefillLatency(16, 1.0))},
        {"prefill_latencies": tuple(PrefillLatency(tokens, 1.0) for tokens in range(1, 10))},
        {"span_limit": Span(0, 33)},
        {"links": (LinkMeasurement(Identity.generate().peer_id, math.nan),)},
        {"links": (LinkMeasurement("somebody", 1.0),)},
        {"uplink_mbps": 0.0},
        {"uplink_mbps": -1.0},
        {"uplink_mbps": math.nan},
        {"uplink_mbps": math.inf},
        {"uplink_mbps": 2 * MAX_UPLINK_MBPS},
        {"activation_codecs": ("int8",) * 9},
        {"activation_codecs": ("",)},
        {"activation_codecs": ("x" * 17,)},
        {"activation_codecs": ("two\nlines",)},
        {"sequence": -1},
        {"sequence": MAX_SEQUENCE + 1},
        {"ttl_s": MAX_TTL_S + 1},
    ],
    ids=lambda altered: next(iter(altered)),
)
def test_facts_out_of_bounds_are_not_announced(altered: dict[str, Any]) -> None:
    with pytest.raises(AnnouncementError) as refusal:
        sign_facts(replace(facts_of(IDENTITY), **altered), IDENTITY)
    assert refusal.value.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda message: message.spans.extend([0, 1] * 7),
        lambda message: message.spans.extend([1]),
        lambda message: message.spans.extend([0, 0]),
        lambda message: message.spans.extend([MAX_LAYERS, 1]),
        lambda message: setattr(message, "sessions", 70_000),
        lambda message: setattr(message, "free_kv", 2**20),
        lambda message: setattr(message, "facts_age", message.sequence + 1),
        lambda message: setattr(message, "sequence", 2**60),
        lambda message: setattr(message, "ttl_s", 2**31),
    ],
)
def test_a_signed_state_out_of_bounds_is_refused(spoil: Callable[[pb.State], None]) -> None:
    message = pb.State.FromString(STATE[65:])
    spoil(message)
    with pytest.raises(AnnouncementError) as refusal:
        verify_state(_signed(0x51, message.SerializeToString()), KEYS)
    assert refusal.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("uplink_mbps", [math.nan, math.inf, -1.0, 2 * MAX_UPLINK_MBPS])
def test_signed_facts_with_an_impossible_uplink_are_refused(uplink_mbps: float) -> None:
    message = pb.Facts.FromString(FACTS[65:])
    message.uplink_mbps = uplink_mbps
    with pytest.raises(AnnouncementError) as refusal:
        verify_facts(_signed(0xF1, message.SerializeToString()))
    assert refusal.value.reason is Reason.MALFORMED


@pytest.mark.parametrize(
    "spoil",
    [
        lambda coordinate: coordinate.position.append(0.0),
        lambda coordinate: coordinate.ClearField("position"),
        lambda coordinate: coordinate.position.__setitem__(0, math.nan),
        lambda coordinate: coordinate.position.__setitem__(0, -math.inf),
        lambda coordinate: coordinate.position.__setitem__(0, 2 * MAX_COORDINATE_MS),
        lambda coordinate: coordinate.ClearField("height_ms"),
        lambda coordinate: setattr(coordinate, "height_ms", -1.0),
        lambda coordinate: setattr(coordinate, "height_ms", math.nan),
        lambda coordinate: setattr(coordinate, "error", 0.0),
        lambda coordinate: setattr(coordinate, "error", 2 * MAX_COORDINATE_ERROR),
    ],
)
def test_signed_facts_with_a_coordinate_out_of_bounds_are_refused(
    spoil: Callable[[pb.Coordinate], None],
) -> None:
    message = pb.Facts.FromString(FACTS[65:])
    spoil(message.coordinate)
    with pytest.raises(AnnouncementError) as refusal:
        verify_facts(_signed(0xF1, message.SerializeToString()))
    assert refusal.value.reason is Reason.MALFORMED


def test_facts_of_a_peer_that_knows_no_coordinates_are_taken_and_one_takes_few_bytes() -> None:
    without = sign_facts(facts_of(IDENTITY), IDENTITY)
    assert verify_facts(without).coordinate is None
    assert verify_facts(FACTS).coordinate == COORDINATE
    assert len(FACTS) - len(without) <= 32


def _open(record: bytes, is_facts: bool) -> object:
    return verify_facts(record) if is_facts else verify_state(record, KEYS)


def _signed(kind: int, body: bytes) -> bytes:
    head = bytes((kind,))
    return head + IDENTITY.sign(b"molink-announcement-1\0" + head + body) + body


@pytest.mark.parametrize("partner", ["", Identity.generate().peer_id], ids=["nobody", "peer"])
def test_who_keeps_copies_and_who_may_keep_ones_own_is_announced(partner: str) -> None:
    facts = replace(facts_of(IDENTITY), keeps_copies=True, partner_peer_id=partner)
    found = verify_facts(sign_facts(facts, IDENTITY))
    assert (found.keeps_copies, found.partner_peer_id) == (True, partner)
    assert not verify_facts(sign_facts(facts_of(IDENTITY), IDENTITY)).keeps_copies


@pytest.mark.parametrize("region", ["", "DE", "Zürich", "x" * 32])
def test_the_region_that_an_owner_states_is_announced_as_it_is(region: str) -> None:
    assert verify_facts(sign_facts(replace(facts_of(IDENTITY), region=region), IDENTITY)).region == region


@pytest.mark.parametrize("region", ["x" * 33, "a\nb", "\u202eDE"])
def test_a_region_that_is_long_or_not_printable_is_refused(region: str) -> None:
    message = pb.Facts.FromString(FACTS[65:])
    message.region = region
    with pytest.raises(AnnouncementError) as refusal:
        verify_facts(_signed(0xF1, message.SerializeToString()))
    assert refusal.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("abilities", [(), (PENALTIES,), (PENALTIES, GRAMMARS)])
def test_what_a_tail_can_do_where_it_draws_is_announced(abilities: tuple[str, ...]) -> None:
    facts = replace(facts_of(IDENTITY), sampling_abilities=abilities)
    assert verify_facts(sign_facts(facts, IDENTITY)).sampling_abilities == abilities


def test_more_abilities_than_there_could_be_are_refused() -> None:
    message = pb.Facts.FromString(sign_facts(facts_of(IDENTITY), IDENTITY)[65:])
    message.sampling_abilities.extend(["a"] * 9)
    with pytest.raises(AnnouncementError):
        verify_facts(_signed(0xF1, message.SerializeToString()))


@pytest.mark.parametrize("step_tokens", [1, 512, 1024, 2048])
def test_the_longest_step_is_announced_and_512_where_nothing_is_said(step_tokens: int) -> None:
    record = sign_facts(replace(facts_of(IDENTITY), step_tokens=step_tokens), IDENTITY)
    assert verify_facts(record).step_tokens == step_tokens
    said = pb.Facts.FromString(record[65:]).step_tokens
    assert said == (0 if step_tokens == 512 else step_tokens)
