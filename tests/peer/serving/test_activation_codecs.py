"""A lossy codec is used on a link where the session asks for it and both ends take part, and nowhere else."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.links.data_plane import SPEC, End, asynchronous, describe, hop_of, soon
from support.swarms.served_peer import HIGH, LOW, failures_told, model, served
from support.swarms.swarm_examples import facts_of

from molink.dht.identity.identity import Identity
from molink.peer.engine.sessions import ServedSession, read_plan
from molink.peer.models.model import LocalModel
from molink.peer.profiling.lossy_effects import measure_codec
from molink.peer.serving.data_plane import DataPlaneSettings
from molink.peer.wire.protocol import molink_pb2 as pb
from molink.routing.cost.encodings import SETTINGS, encoding_of_link, encodings_of_circuit, opted_in, saves
from molink.shards.codec import decode, encode, encoded_bytes
from molink.shards.spec import ACTIVATION_CODECS, DTYPE_BYTES, Span

__all__ = ["model"]

INT8 = ("int8",)
names = st.sampled_from((*ACTIVATION_CODECS, "", "int4"))
announced = st.frozensets(names)
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


@pytest.mark.parametrize(
    ("asked", "dtype", "sender", "receiver", "encoding"),
    [
        ("", "float32", INT8, INT8, "float32"),
        ("none", "float32", INT8, INT8, "float32"),
        ("int8", "float32", INT8, INT8, "int8"),
        ("int8", "float32", INT8, (), "float32"),
        ("int8", "float32", (), INT8, "float32"),
        ("int8", "bfloat16", INT8, ("float16", "int8"), "int8"),
        ("float16", "float32", INT8, ("float16", "int8"), "float32"),
        ("float16", "float32", ("float16",), ("float16",), "float16"),
        ("float16", "bfloat16", ("float16",), ("float16",), "bfloat16"),
        ("bfloat16", "bfloat16", ("bfloat16",), ("bfloat16",), "bfloat16"),
        ("int4", "float32", ("int4",), ("int4",), "float32"),
    ],
)
def test_a_codec_needs_the_session_and_both_ends(
    asked: str, dtype: str, sender: tuple[str, ...], receiver: tuple[str, ...], encoding: str
) -> None:
    assert encoding_of_link(asked, dtype, sender, receiver) == encoding


@given(asked=names, dtype=dtypes, hops=st.lists(announced, min_size=1, max_size=6))
def test_every_link_is_lossless_or_as_all_three_agreed(
    asked: str, dtype: str, hops: list[frozenset[str]]
) -> None:
    encodings = encodings_of_circuit(asked, dtype, hops)
    assert len(encodings) == len(hops)
    assert encodings[-1] == dtype
    for encoding, (sender, receiver) in zip(encodings, pairwise(hops), strict=False):
        assert encoding in {dtype, asked}
        assert encoding == dtype or (asked in sender and asked in receiver and saves(asked, dtype))


@given(setting=st.sampled_from(SETTINGS), dtype=dtypes)
def test_a_peer_announces_what_it_was_told_as_far_as_it_saves_bytes(setting: str, dtype: str) -> None:
    codecs = opted_in(setting, dtype)
    assert all(encoded_bytes(codec, 1, 4096) < encoded_bytes(dtype, 1, 4096) for codec in codecs)
    if setting in ("none", "auto"):
        assert ("int8" in codecs) == (setting == "auto")
    else:
        assert set(codecs) <= {setting}


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'int4'"):
        opted_in("int4", "float32")


def test_both_ends_of_a_link_read_the_same_encoding_from_a_descriptor() -> None:
    identities = [Identity.generate() for _ in range(3)]
    codecs = [INT8, INT8, ()]
    spans = (Span(0, 2), Span(2, 5), Span(5, 6))
    hops = [
        hop_of(identity, span, replace(facts_of(identity), activation_codecs=accepted))
        for identity, span, accepted in zip(identities, spans, codecs, strict=True)
    ]
    asked = describe(hops)
    asked.activation_codec = "int8"
    plan = read_plan(asked, SPEC)
    first, second, third = (ServedSession(plan, at, owner=None) for at in range(3))  # type: ignore[arg-type]
    assert (first.place.encoding, second.receives_in) == ("int8", "int8")
    assert (second.place.encoding, third.receives_in) == ("float32", "float32")
    asked.activation_codec = ""
    assert set(read_plan(asked, SPEC).encodings) == {"float32"}


def test_a_later_epoch_in_another_encoding_does_not_share_what_an_earlier_one_computed() -> None:
    identities, before = [Identity.generate() for _ in range(3)], []
    spans = (Span(0, 2), Span(2, 5), Span(5, 6))
    hops = [
        hop_of(identity, span, replace(facts_of(identity), activation_codecs=INT8))
        for identity, span in zip(identities, spans, strict=True)
    ]
    for codec in ("int8", ""):
        asked = describe(hops)
        asked.activation_codec = codec
        plan = read_plan(asked, SPEC)
        before.append([ServedSession(plan, at, owner=None).before for at in range(3)])  # type: ignore[arg-type]
    coded, exact = before
    assert coded[0] == exact[0] == (), "a head computes from the tokens"
    assert all(one != other for one, other in zip(coded[1:], exact[1:], strict=True))


@asynchronous
async def test_a_head_sends_what_the_descriptor_agrees_on_and_sessions_do_not_mix(model: LocalModel) -> None:
    async with served(model, settings=DataPlaneSettings(activation_codecs=INT8)) as peer, End() as tail:
        hops = [peer.hop(LOW), hop_of(tail.identity, HIGH, replace(tail.facts, activation_codecs=INT8))]
        hidden: dict[str, torch.Tensor] = {}
        for session, codec, encoding in ((1, "", "float32"), (2, "int8", "int8")):
            asked = describe(hops, session=session, spec=peer.spec)
            asked.activation_codec = codec
            assert (await peer.reserve(asked)).HasField("reserved")
            assert (await peer.ready(asked)).readiness.ready
            assert peer.link.post(pb.Start(session=asked.session, epoch=1, token_ids=[5, 6, 7, 8, 9]))
            _, frame = await soon(tail.handler.frames.get())
            width = peer.spec.hidden_size
            assert frame.header.dtype == encoding
            assert len(frame.payload) == encoded_bytes(encoding, 5, width)
            hidden[encoding] = decode(frame.payload, 5, width, "float32", encoding)
        exact, coded = hidden["float32"], hidden["int8"]
        assert not torch.equal(exact, coded)
        assert float((exact - coded).norm() / exact.norm()) < 0.02


@asynchronous
async def test_activations_in_another_encoding_than_agreed_fail_their_session_and_name_the_hop(
    model: LocalModel,
) -> None:
    for agreed, sent in (("int8", "float32"), ("", "int8")):
        async with served(model, settings=DataPlaneSettings(activation_codecs=INT8)) as peer, End() as head:
            hops = [hop_of(head.identity, LOW, replace(head.facts, activation_codecs=INT8)), peer.hop(HIGH)]
            asked = describe(hops, spec=peer.spec)
            asked.activation_codec = agreed
            assert (await peer.reserve(asked, hop=1)).HasField("reserved")
            assert (await peer.ready(asked)).readiness.ready
            failures = failures_told(peer)
            link = await head.linked(peer.identity.peer_id)
            width = peer.spec.hidden_size
            header = pb.Activations(hidden_size=width, dtype=sent)
            header.rows.add(session=asked.session, epoch=1, step=0, rows=5, sample=True, prefill=True)
            assert link.post(header, encode(torch.zeros(5, width), sent))
            failed = await soon(failures.get())
            assert failed.peer_id == head.peer_id
            assert f"activations in {sent} came where" in failed.detail
            assert link.closed_because is None


@asynchronous
async def test_a_peer_that_takes_part_no_more_refuses_what_its_old_facts_agree_on(model: LocalModel) -> None:
    async with served(model) as peer, End() as tail:
        old = replace(peer.facts, activation_codecs=INT8)
        hops = [
            hop_of(peer.identity, LOW, old),
            hop_of(tail.identity, HIGH, replace(tail.facts, activation_codecs=INT8)),
        ]
        asked = describe(hops, spec=peer.spec)
        asked.activation_codec = "int8"
        refusal = (await peer.reserve(asked)).refusal
        assert (refusal.code, refusal.detail) == ("codec", "this peer takes no activations in int8")
        asked.activation_codec = ""
        assert (await peer.reserve(asked)).HasField("reserved")


def test_the_effect_is_measured_on_the_model_and_said_in_one_line(model: LocalModel) -> None:
    int8 = measure_codec(model, "cpu", "int8")
    half = measure_codec(model, "cpu", "float16")
    assert measure_codec(model, "cpu", "int8") == int8
    assert 0 < half.error.rms < int8.error.rms < 0.02
    assert 0 <= half.error.divergence_nats < int8.error.divergence_nats < 0.1
    assert int8.error.same_tokens <= int8.error.samples
    assert int8.row_bytes < half.row_bytes < int8.plain_row_bytes
    line = str(int8)
    assert "\n" not in line
    assert line.startswith("Activation codec int8: a token takes")
    assert f"{int8.error.rms:.2%} (RMS); with one such link {int8.error.tokens_line}" in line
