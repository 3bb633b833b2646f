"""Whatever strangers send, what reads it gives a value or its documented error, and nothing else."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.links.data_plane import SPEC, describe, hop_of
from support.links.relay_examples import EXAMPLES
from support.swarms.swarm_examples import facts_of, known_keys, state_of

from molink.client.errors import InvalidRequest
from molink.client.gateway.apis.openai import ChatRequest, CompletionRequest
from molink.dht.identity.identity import Identity
from molink.dht.identity.swarm_key import SwarmKey
from molink.dht.records.announcement import (
    AnnouncementError,
    sign_facts,
    sign_state,
    state_tag,
    verify_facts,
    verify_state,
)
from molink.dht.records.records import AnnouncedDraft, Coordinate
from molink.peer.engine.sessions import read_plan
from molink.peer.wire.link.handshake import HandshakeRefused, challenge, check, prove
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.peer.wire.protocol.frames import ProtocolError, decode, encode
from molink.peer.wire.reach.packets import RelayError, RelayProof, RelayWelcome, decode_relay, encode_relay
from molink.peer.wire.reach.relay_client import endpoint, host_and_port_of
from molink.peer.wire.reach.relay_proof import check_relay, check_user, new_challenge, prove_relay, prove_user
from molink.shards.checkpoint import catalog, store
from molink.shards.checkpoint.manifest import canonical_json
from molink.shards.checkpoint.stored_quantization import stored_quantization
from molink.shards.spec import ModelSpec, SamplingParams, Span

pytestmark = pytest.mark.fuzz

IDENTITY = Identity.generate()
KEYS = known_keys([IDENTITY.public_key])
COORDINATE = Coordinate((12.5, -40.0, 0.0, 3.25), 7.5, 0.25)
DRAFTS = (AnnouncedDraft("lookup"), AnnouncedDraft("a draft model", bytes(range(8)), 0.375))
FACTS = sign_facts(replace(facts_of(IDENTITY, links=4), coordinate=COORDINATE, drafts=DRAFTS), IDENTITY)
STATE = sign_state(state_of(IDENTITY), IDENTITY)
SIGNED_FROM = 65
"""What precedes a record's body: its kind and the signature."""
DESCRIPTOR = describe([hop_of(IDENTITY, Span(0, 3)), hop_of(Identity.generate(), Span(3, 6))])
FRAMES = [
    encode(pb.Request(id=3, reserve=pb.Reserve(descriptor=DESCRIPTOR, hop=1))),
    encode(pb.Activations(rows=[pb.ActivationRow(session=bytes(16), rows=2)], hidden_size=8), bytes(64)),
    encode(pb.Tokens(tokens=[pb.Token(session=bytes(16), token_id=3, logprob=-0.5)])),
    encode(
        pb.CopyParts(
            parts=[pb.CopyPart(session=bytes(16), epoch=1, tokens=2, payload_bytes=8, form=pb.TOKEN_IDS)]
        ),
        bytes(8),
    ),
    encode(pb.CopiesKept(copies=[pb.CopyKept(session=bytes(16), epoch=1, tokens=2)])),
    encode(pb.Proof(protocol_version=1, public_key=bytes(32), signature=bytes(64))),
]
QUESTION = challenge()
CERTIFICATE = bytes(400)
KEY = SwarmKey.generate()
RELAY, CHALLENGE = Identity.generate(), new_challenge()
RELAY_PACKETS = [encode_relay(packet) for packet, _ in EXAMPLES]
RELAY_PROOF = prove_user(CHALLENGE, RELAY.peer_id, IDENTITY, KEY)
WELCOME = prove_relay(CHALLENGE, RELAY_PROOF, "203.0.113.10:4000", RELAY, KEY)
PROOF = prove(QUESTION, IDENTITY, CERTIFICATE, KEY, link_id=bytes(16), is_client=False).SerializeToString()


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, start: int = 0) -> bytes:
    """`whole`, from byte `start` on changed, cut out of, or added to, in a few places."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(start, len(data)))
        cut = draw(st.integers(0, 6))
        data[at : at + cut] = draw(st.binary(max_size=6))
    return bytes(data)


def any_bytes(*whole: bytes, start: int = 0) -> st.SearchStrategy[bytes]:
    """Bytes of any kind, and such as are nearly right."""
    return st.one_of(st.binary(max_size=300), *(damaged(one, start) for one in whole))


@pytest.fixture(scope="module")
def manifest() -> bytes:
    return store.read_manifest(catalog.resolve("molink/tiny-shakespeare")).to_bytes()


@given(any_bytes(*FRAMES))
def test_any_bytes_are_a_frame_or_a_protocol_error(data: bytes) -> None:
    try:
        frame = decode(data)
    except ProtocolError:
        return
    assert decode(encode(frame.header, frame.payload)).header == frame.header


@given(any_bytes(PROOF))
def test_any_proof_is_refused_or_that_of_its_key(data: bytes) -> None:
    proof = pb.Proof()
    try:
        proof.ParseFromString(data)
        remote = check(proof, QUESTION, CERTIFICATE, KEY)
    except (DecodeError, HandshakeRefused):
        return
    assert remote.peer_id == IDENTITY.peer_id


@given(any_bytes(*RELAY_PACKETS))
def test_any_bytes_are_a_packet_of_a_relay_or_a_relay_error(data: bytes) -> None:
    try:
        packet = decode_relay(data)
    except RelayError:
        return
    assert encode_relay(packet) == data


@given(any_bytes(encode_relay(RELAY_PROOF), start=4))
def test_any_proof_to_a_relay_is_refused_or_that_of_its_key(data: bytes) -> None:
    try:
        proof = decode_relay(data)
        if isinstance(proof, RelayProof):
            assert check_user(proof, CHALLENGE, RELAY.peer_id, KEY) == IDENTITY.peer_id
    except RelayError as error:
        assert str(error)  # noqa: PT017 - nearly all are refused


@given(any_bytes(encode_relay(WELCOME), start=4))
def test_no_welcome_but_the_relays_own_is_believed(data: bytes) -> None:
    try:
        welcome = decode_relay(data)
        if isinstance(welcome, RelayWelcome):
            check_relay(welcome, CHALLENGE, RELAY_PROOF, RELAY.peer_id, IDENTITY.peer_id, KEY)
            assert welcome == WELCOME
    except RelayError as error:
        assert str(error)  # noqa: PT017 - nearly all are refused


@given(
    st.one_of(st.text(max_size=60), damaged(b"[2001:db8::1]:4000").map(lambda data: data.decode("latin-1")))
)
def test_any_text_is_an_address_that_can_be_dialled_or_a_value_error(text: str) -> None:
    try:
        host, port = endpoint(text)
    except ValueError:
        return
    assert 0 <= port <= 65535
    assert endpoint(host_and_port_of(host, port))[1] == port


@pytest.mark.parametrize(
    "read",
    [verify_facts, lambda record: verify_state(record, KEYS), state_tag],
    ids=["facts", "state", "tag"],
)
@given(record=any_bytes(FACTS, STATE))
def test_any_bytes_are_an_announcement_or_an_announcement_error(
    read: Callable[[bytes], object], record: bytes
) -> None:
    try:
        read(record)
    except AnnouncementError as error:
        assert error.reason  # noqa: PT017 - nearly all are refused, and a few are right


@pytest.mark.parametrize("kind", ["facts", "state"])
@given(data=st.data())
def test_whatever_a_peer_signs_is_an_announcement_or_an_announcement_error(
    kind: str, data: st.DataObject
) -> None:
    whole = FACTS if kind == "facts" else STATE
    record = data.draw(damaged(whole, SIGNED_FROM))
    body = record[SIGNED_FROM:]
    signature = IDENTITY.sign(b"molink-announcement-1\0" + record[:1] + body)
    record = record[:1] + signature + body
    try:
        if kind == "facts":
            assert verify_facts(record).peer_id == IDENTITY.peer_id
        else:
            assert verify_state(record, KEYS).peer_id == IDENTITY.peer_id
    except AnnouncementError as error:
        assert error.reason  # noqa: PT017 - as above


@given(any_bytes(DESCRIPTOR.SerializeToString()))
def test_any_descriptor_is_a_plan_or_a_protocol_error(data: bytes) -> None:
    descriptor = pb.SessionDescriptor()
    try:
        descriptor.ParseFromString(data)
        plan = read_plan(descriptor, SPEC)
    except (DecodeError, ProtocolError):
        return
    assert [layer for hop in plan.hops for layer in hop.span] == list(range(SPEC.layers))
    assert 1 <= plan.prompt_tokens < plan.capacity_tokens <= SPEC.context_length


numbers = st.one_of(st.integers(), st.floats(), st.integers(-2, 3))
leaves = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.just("9" * 5000))
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, "tools", "min_p", "guided_json"})
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "model": st.just("m"),
    "prompt": st.one_of(st.just("a"), st.lists(st.integers(0, 9), max_size=3)),
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": st.text(max_size=3)}),
        max_size=2,
    ),
    "logit_bias": st.dictionaries(st.sampled_from(["1", "²", "-1", "9" * 5000]), numbers, max_size=2),
    "n": st.integers(0, 3),
    "max_tokens": st.integers(0, 9),
    "stop": st.lists(st.text(max_size=2), max_size=3),
    "stop_token_ids": st.lists(st.integers(0, 9), max_size=3),
}
bodies = st.fixed_dictionaries(
    {},
    optional={name: st.one_of(objects, RIGHT[name]) if name in RIGHT else objects for name in NAMES},
)
likely_bodies = st.builds(
    lambda body, right: body | right,
    st.fixed_dictionaries({}, optional={name: objects for name in NAMES if name not in RIGHT}),
    st.fixed_dictionaries(
        {"model": RIGHT["model"], "prompt": RIGHT["prompt"], "messages": RIGHT["messages"]}
    ),
)


@given(data=st.data())
def test_any_manifest_is_a_model_or_a_value_error(manifest: bytes, data: st.DataObject) -> None:
    content = json.loads(manifest)
    for _ in range(data.draw(st.integers(1, 3))):
        part = content
        while True:
            keys: list[Any] = sorted(part) if isinstance(part, dict) else list(range(len(part)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(part[key], dict | list) or not part[key] or data.draw(st.booleans()):
                break
            part = part[key]
        part[key] = data.draw(objects)
    try:
        spec = store.describe(
            store.Manifest.from_bytes(canonical_json(content)), "float32", "none", name="molink/any"
        )
    except ValueError as error:
        assert str(error)  # noqa: PT017 - many are refused
        return
    assert isinstance(spec, ModelSpec)


LIKELY_VALUES = st.one_of(
    objects, st.lists(objects, min_size=2, max_size=2), st.lists(st.just("sliding_attention"), max_size=2)
)
FIELDS = (
    *(
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    ),
    *("max_position_embeddings", "layer_types", "sliding_window", "use_sliding_window", "kv_lora_rank"),
    *("qk_rope_head_dim", "index_head_dim", "word_embed_proj_dim", "tie_word_embeddings", "text_config"),
    *("eos_token_id", "dtype", "torch_dtype", "linear_num_value_heads", "conv_L_cache"),
)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "opt", "qwen3_next", "deepseek_v3", "lfm2"])
@given(data=st.data())
def test_any_value_in_a_configuration_is_a_model_or_a_value_error(
    manifest: bytes, architecture: str, data: st.DataObject
) -> None:
    content = json.loads(manifest)
    fields = data.draw(st.lists(st.sampled_from(FIELDS), min_size=1, max_size=2))
    content["configuration"] |= {"model_type": architecture, "num_key_value_heads": 4}
    content["configuration"] |= {field: data.draw(LIKELY_VALUES) for field in fields}
    try:
        spec = store.describe(store.Manifest.from_bytes(canonical_json(content)), "float32", "none")
    except ValueError as error:
        assert str(error)  # noqa: PT017 - many are refused
        return
    assert isinstance(spec, ModelSpec)


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8"])
@given(data=st.data())
def test_any_stored_quantization_is_one_that_is_known_or_refused(method: str, data: st.DataObject) -> None:
    names = ("quant_method", "bits", "version", "checkpoint_format", "group_size", "weight_block_size")
    fields = data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=2))
    settings = {"quant_method": method} | {field: data.draw(LIKELY_VALUES) for field in fields}
    try:
        stored = stored_quantization({"quantization_config": settings})
    except ValueError as error:
        assert str(error)  # noqa: PT017 - many are refused
        return
    assert stored is not None
    assert len(stored.block) == 2


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatRequest])
@given(body=st.one_of(bodies, likely_bodies, objects))
def test_any_request_is_understood_or_refused(
    request_type: type[CompletionRequest] | type[ChatRequest], body: object
) -> None:
    try:
        request = request_type.model_validate(body)
        params = [request.params(choice) for choice in range(request.choices)]
    except (ValidationError, InvalidRequest):
        return
    assert all(isinstance(one, SamplingParams) for one in params)
    assert all(one.max_new_tokens >= 1 for one in params)


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatRequest])
@given(data=any_bytes(json.dumps({"model": "m", "prompt": "a", "messages": [{"role": "user"}]}).encode()))
def test_any_body_is_understood_or_refused(
    request_type: type[CompletionRequest] | type[ChatRequest], data: bytes
) -> None:
    try:
        request_type.model_validate_json(data).params(0)
    except (ValidationError, InvalidRequest) as error:
        assert str(error)  # noqa: PT017 - nearly all are refused
