"""Descriptors: a session is let in as its client describes it, or refused with what is wrong."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC, describe, hop_of
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.dht.records.announcement import sign_facts
from molink.peer.engine.sessions import MAX_HOPS, ServedSession, SessionTable, read_plan
from molink.peer.memory.leases import LeaseKey
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError
from molink.routing.cost.pipeline import STEP_OVERHEAD_MS, TOKEN_BYTES
from molink.shards.kv.prefix import NAME_BYTES
from molink.shards.spec import SamplingParams, Span

IDENTITIES = [Identity.generate() for _ in range(6)]
FACTS = [hop_of(identity, Span(0, 1)).facts for identity in IDENTITIES]
Change = Callable[[pb.SessionDescriptor], None]


def hop(peer: int, start: int, stop: int) -> pb.Hop:
    peer_id = IDENTITIES[peer].peer_id
    return pb.Hop(peer_id=peer_id, start=start, stop=stop, quantization="none", facts=FACTS[peer])


def good() -> pb.SessionDescriptor:
    return describe([hop(0, 0, 2), hop(1, 2, 5), hop(2, 5, 6)])


@st.composite
def circuits(draw: st.DrawFn) -> list[pb.Hop]:
    """Any circuit of up to six peers."""
    cuts = draw(st.sets(st.integers(1, SPEC.layers - 1)))
    peers = draw(st.permutations(range(len(IDENTITIES))))
    bounds = [0, *sorted(cuts), SPEC.layers]
    return [hop(peer, start, stop) for peer, (start, stop) in zip(peers, pairwise(bounds), strict=False)]


@given(circuits(), st.integers(1, 1023), st.data())
def test_a_circuit_that_covers_the_model_is_read_as_it_is(
    hops: list[pb.Hop], prompt_tokens: int, data: st.DataObject
) -> None:
    descriptor = describe(hops, session=7, epoch=3)
    descriptor.prompt_tokens = prompt_tokens
    descriptor.capacity_tokens = data.draw(st.integers(prompt_tokens + 1, SPEC.context_length))
    plan = read_plan(descriptor, SPEC)
    assert plan.key == LeaseKey(bytes([7]) * 16, 3)
    assert [(one.peer_id, one.span.start, one.span.stop) for one in plan.hops] == [
        (one.peer_id, one.start, one.stop) for one in hops
    ]
    assert all(one.facts.peer_id == one.peer_id for one in plan.hops)
    assert (plan.prompt_tokens, plan.capacity_tokens) == (prompt_tokens, descriptor.capacity_tokens)


def test_the_sampling_parameters_are_read_as_they_are() -> None:
    descriptor = good()
    descriptor.trace = True
    descriptor.sampling.CopyFrom(
        pb.Sampling(
            max_new_tokens=9,
            temperature=0.5,
            top_k=3,
            top_p=0.25,
            seed=2**64 - 1,
            stop_token_ids=[1, 383],
            logprobs=0,
            logit_bias={5: -100.0},
        )
    )
    plan = read_plan(descriptor, SPEC)
    assert plan.params == SamplingParams(
        max_new_tokens=9,
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        seed=2**64 - 1,
        stop_token_ids=(1, 383),
        logprobs=0,
        logit_bias=((5, -100.0),),
    )
    assert plan.seed == 2**64 - 1
    assert plan.trace
    descriptor.sampling.ClearField("logprobs")
    assert read_plan(descriptor, SPEC).params.logprobs is None


def _with(name: str, value: object) -> Change:
    return lambda descriptor: setattr(descriptor, name, value)


def _hop(at: int, name: str, value: object) -> Change:
    return lambda descriptor: setattr(descriptor.hops[at], name, value)


def _sampling(name: str, value: object) -> Change:
    return lambda descriptor: setattr(descriptor.sampling, name, value)


def _forged(descriptor: pb.SessionDescriptor) -> None:
    facts = bytearray(descriptor.hops[1].facts)
    facts[-1] ^= 1
    descriptor.hops[1].facts = bytes(facts)


def _standby(at: int, peer: int) -> Change:
    return lambda descriptor: setattr(descriptor.hops[at], "standby_facts", FACTS[peer])


def _foreign_standby(descriptor: pb.SessionDescriptor) -> None:
    facts = facts_of(IDENTITIES[4])
    other = replace(facts, model=replace(facts.model, model_hash="f" * 64))
    descriptor.hops[1].standby_facts = sign_facts(other, IDENTITIES[4])


def _narrow_standby(descriptor: pb.SessionDescriptor) -> None:
    facts = replace(facts_of(IDENTITIES[4]), span_limit=Span(0, 4))
    descriptor.hops[1].standby_facts = sign_facts(facts, IDENTITIES[4])


def _shared_standby(descriptor: pb.SessionDescriptor) -> None:
    descriptor.hops[0].standby_facts = descriptor.hops[2].standby_facts = FACTS[3]


def _forged_standby(descriptor: pb.SessionDescriptor) -> None:
    facts = bytearray(FACTS[3])
    facts[-1] ^= 1
    descriptor.hops[1].standby_facts = bytes(facts)


def _same_peer_twice(descriptor: pb.SessionDescriptor) -> None:
    descriptor.hops[2].peer_id = descriptor.hops[0].peer_id
    descriptor.hops[2].facts = descriptor.hops[0].facts


def _too_many_hops(descriptor: pb.SessionDescriptor) -> None:
    descriptor.hops.extend([descriptor.hops[0]] * MAX_HOPS)


WRONG: dict[str, tuple[Change, str]] = {
    "short session id": (_with("session", bytes(15)), "id of 16 bytes"),
    "no epoch": (_with("epoch", 0), "epoch of 1 or more"),
    "another model": (_with("model_hash", "f" * 64), "serves aaaaaaaaaaaa, not ffffffffffff"),
    "no prompt": (_with("prompt_tokens", 0), "0 prompt tokens"),
    "no room to generate": (_with("capacity_tokens", 5), "do not fit"),
    "beyond the context": (_with("capacity_tokens", 1025), "context of 1024"),
    "no hops": (lambda descriptor: descriptor.ClearField("hops"), "1 to 256 hops, not 0"),
    "too many hops": (_too_many_hops, "1 to 256 hops, not 259"),
    "a gap": (_hop(1, "start", 3), "does not continue the circuit at layer 2"),
    "an overlap": (_hop(1, "start", 1), "does not continue the circuit at layer 2"),
    "a late start": (_hop(0, "start", 1), "does not continue the circuit at layer 0"),
    "an empty hop": (_hop(0, "stop", 0), r"hop \[0, 0\)"),
    "a backward hop": (_hop(1, "stop", 1), r"hop \[2, 1\)"),
    "beyond the model": (_hop(2, "stop", 7), r"hop \[5, 7\)"),
    "an early end": (lambda descriptor: descriptor.hops.pop(), "ends at layer 5 of 6"),
    "other numbers": (_hop(1, "quantization", "int8"), "'int8' does not mix with 'none'"),
    "a peer twice": (_same_peer_twice, "appears twice"),
    "a standby on the circuit": (_standby(1, 2), r"standby of hop \[2, 5\).* is that of \[5, 6\) too"),
    "a hop that is its own standby": (_standby(1, 1), r"standby of hop \[2, 5\).* is that of \[2, 5\) too"),
    "a standby named twice": (
        _shared_standby,
        r"standby of hop \[5, 6\).* is the standby of \[0, 2\) too",
    ),
    "a standby of another model": (_foreign_standby, r"standby of hop \[2, 5\) serves ffffffffffff"),
    "a standby without the layers": (_narrow_standby, r"standby of hop \[2, 5\) serves \[0, 4\) only"),
    "a forged standby": (_forged_standby, r"facts of the standby of hop \[2, 5\)"),
    "a link that never ends": (
        _hop(1, "predicted_link_ms", float("inf")),
        "a link takes 0 to 60000 ms, not inf",
    ),
    "no time of a link": (_hop(1, "predicted_link_ms", float("nan")), "a link takes"),
    "a link into the past": (_hop(0, "predicted_link_ms", -1.0), "a link takes"),
    "an endless uplink": (_hop(1, "uplink_mbps", float("inf")), "an uplink has 0.001 to 1e.06 Mbps, not inf"),
    "no number of Mbps": (_hop(1, "uplink_mbps", float("nan")), "an uplink has"),
    "an uplink that takes": (_hop(2, "uplink_mbps", -5.0), "an uplink has"),
    "no facts": (_hop(1, "facts", b""), "the facts of hop"),
    "forged facts": (_forged, "not signed by"),
    "another's facts": (_hop(1, "facts", FACTS[4]), f"are those of {IDENTITIES[4].peer_id}"),
    "an unknown stop token": (
        lambda descriptor: descriptor.sampling.stop_token_ids.append(384),
        "beyond the vocabulary of 384",
    ),
    "bias for an unknown token": (
        lambda descriptor: descriptor.sampling.logit_bias.update({2**32 - 1: 1.0}),
        "beyond the vocabulary",
    ),
    "no new tokens": (_sampling("max_new_tokens", 0), "max_new_tokens"),
    "not a temperature": (_sampling("temperature", float("nan")), "temperature"),
    "negative temperature": (_sampling("temperature", -0.5), "temperature"),
    "no probability": (_sampling("top_p", 0.0), "top_p"),
    "too many log-probabilities": (_sampling("logprobs", 21), "logprobs"),
    "infinite bias": (
        lambda descriptor: descriptor.sampling.logit_bias.update({1: float("inf")}),
        "logit_bias",
    ),
    "bias that is no number": (
        lambda descriptor: descriptor.sampling.logit_bias.update({1: float("nan")}),
        "logit_bias",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_with_a_descriptor_is_said(case: str) -> None:
    change, reason = WRONG[case]
    descriptor = good()
    read_plan(descriptor, SPEC)
    change(descriptor)
    with pytest.raises(ProtocolError, match=reason):
        read_plan(descriptor, SPEC)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 8)), max_size=6))
def test_only_circuits_that_cover_the_model_once_and_in_order_are_taken(
    hops: list[tuple[int, int, int]],
) -> None:
    layers = [layer for _, start, stop in hops for layer in range(start, stop)]
    right = (
        layers == list(range(SPEC.layers))
        and all(start < stop for _, start, stop in hops)
        and len({peer for peer, _, _ in hops}) == len(hops)
    )
    descriptor = describe([hop(*one) for one in hops])
    if right:
        assert len(read_plan(descriptor, SPEC).hops) == len(hops)
    else:
        with pytest.raises(ProtocolError):
            read_plan(descriptor, SPEC)


def test_facts_of_a_peer_that_serves_elsewhere_are_taken_as_they_are_signed() -> None:
    identity = Identity.generate()
    moved = replace(facts_of(identity), grpc_addresses=("198.51.100.9:4002",))
    plan = read_plan(describe([hop_of(identity, SPEC.whole, moved)]), SPEC)
    assert plan.hops[0].facts.grpc_addresses == ("198.51.100.9:4002",)


def test_a_session_is_found_in_its_own_epoch_only() -> None:
    table = SessionTable()
    plan = read_plan(good(), SPEC)
    session = ServedSession(plan, 1, owner=None)  # type: ignore[arg-type]
    table.add(session)
    key = plan.key
    assert table.get(key.session, 1) is session
    assert table.get(key.session, 2) is None
    assert table.remove(LeaseKey(key.session, 2)) is None
    assert len(table) == 1
    assert table.remove(key) is session
    assert list(table) == []


def test_the_circuit_is_read_as_stages_to_predict_with() -> None:
    descriptor = good()
    for at, (link_ms, uplink_mbps) in enumerate(
        [(1.5 + STEP_OVERHEAD_MS, 100.0), (0.0, 0.0), (20.0 + STEP_OVERHEAD_MS, 8.0)]
    ):
        descriptor.hops[at].predicted_link_ms, descriptor.hops[at].uplink_mbps = link_ms, uplink_mbps
    plan = read_plan(descriptor, SPEC)
    assert plan.circuit == tuple((one.peer_id, one.span) for one in plan.hops)
    assert [stage.layers for stage in plan.stages] == [2, 3, 1]
    assert [stage.link_ms for stage in plan.stages] == [1.5, 0.0, 20.0]
    assert [stage.uplink_mbps for stage in plan.stages] == [100.0, None, 8.0]
    assert [stage.sent_bytes for stage in plan.stages] == [32, 32, TOKEN_BYTES]
    # 1.25 ms a layer for one row and 2.5 for eight; the embedding takes 0.125, and the head 0.75 and 1.5
    assert [stage.decode_ms(1) for stage in plan.stages] == pytest.approx([2.625, 3.75, 2.0])
    assert [stage.decode_ms(8) for stage in plan.stages] == pytest.approx([5.125, 7.5, 4.0])
    assert plan.stages[0].transfer_ms(1000) == pytest.approx(1000 * 32 * 8 / 100e6 * 1000)
    assert plan.stages[1].transfer_ms(1000) == 0.0


def test_each_hop_knows_its_neighbours_and_the_tail_returns_to_the_head() -> None:
    plan = read_plan(good(), SPEC)
    first, second, third = (ServedSession(plan, at, owner=None) for at in range(3))  # type: ignore[arg-type]
    assert (first.is_head, first.is_tail, third.is_head, third.is_tail) == (True, False, False, True)
    assert first.next_peer_id == IDENTITIES[1].peer_id
    assert third.next_peer_id == IDENTITIES[0].peer_id
    assert first.previous_peer_id == IDENTITIES[2].peer_id
    assert second.previous_peer_id == IDENTITIES[0].peer_id
    assert second.span == Span(2, 5)


def test_the_names_of_a_prompt_s_blocks_are_read_in_order() -> None:
    asked = good()
    asked.prompt_tokens, asked.capacity_tokens = 47, 60
    asked.prefix_blocks = b"a" * NAME_BYTES + b"b" * NAME_BYTES
    assert read_plan(asked, SPEC).prefix == (b"a" * NAME_BYTES, b"b" * NAME_BYTES)


@pytest.mark.parametrize("names", [b"x", b"x" * (NAME_BYTES - 1), b"x" * NAME_BYTES * 3])
def test_names_that_a_prompt_cannot_have_are_refused(names: bytes) -> None:
    asked = good()
    asked.prompt_tokens, asked.capacity_tokens = 47, 60
    asked.prefix_blocks = names
    with pytest.raises(ProtocolError, match="names"):
        read_plan(asked, SPEC)
